"""Which findings and which refusals appeared, stayed or went between two runs."""

from collections import defaultdict

from schedtrace.diagnose.rule import Threshold, share_frac
from schedtrace.diagnose.rules import KINDS, budget_underused
from schedtrace.diagnose.waits import FOUND_FROM_FRAC
from schedtrace.model.comparison import CauseChange, FindingChange
from schedtrace.model.report import Finding, RunReport

_Refusal = tuple[str, str, str | None]
_Kind = tuple[str, str | None]

FELL = 2.0
"""A finding went, or appeared, if its share is now at most half, or at least twice, what it was."""


def finding_changes(*, base: RunReport, new: RunReport) -> list[FindingChange]:
    """One row per code and cause that either run has and both could have, those of the new run first."""
    before, after = _by_kind(base), _by_kind(new)
    unjudged = _unjudged(base, new)
    return [
        _change(kind, before.get(kind, []), after.get(kind, []))
        for kind in dict.fromkeys([*after, *before])
        if kind[0] not in unjudged
    ]


def _change(kind: _Kind, old: list[Finding], now: list[Finding]) -> FindingChange:
    code, cause = kind
    threshold = _threshold(code)
    base_frac, new_frac = (_frac(threshold, findings) for findings in (old, now))
    changed = not (old and now) and _really(threshold, [base_frac, new_frac])
    return FindingChange(
        code=code,
        cause=cause,
        state="stayed" if not changed else "appeared" if now else "went",
        base_count=sum(finding.count for finding in old),
        new_count=sum(finding.count for finding in now),
        base_trials=sorted({trial for finding in old for trial in finding.trials}),
        new_trials=sorted({trial for finding in now for trial in finding.trials}),
        base_frac=base_frac,
        new_frac=new_frac,
        threshold_frac=threshold.least_frac if threshold else None,
        message=(now or old)[0].message,
    )


def _threshold(code: str) -> Threshold | None:
    rule = KINDS[code]
    return rule.threshold or (Threshold(FOUND_FROM_FRAC, share_frac) if rule.charges else None)


def _frac(threshold: Threshold | None, findings: list[Finding]) -> float | None:
    """The largest share that the findings were found for; None: not known, or none was found."""
    if threshold is None:
        return None
    fracs = [threshold.found(finding) for finding in findings]
    return max((frac for frac in fracs if frac is not None), default=None)


def _really(threshold: Threshold | None, fracs: list[float | None]) -> bool:
    """Whether what one run has and the other has not is more than a share that crossed its threshold.

    A share that is not known on the side without the finding is at most the threshold.
    """
    if threshold is None or fracs == [None, None]:
        return True
    low, high = sorted(threshold.least_frac if frac is None else frac for frac in fracs)
    return FELL * low <= high


def _unjudged(base: RunReport, new: RunReport) -> set[str]:
    """Findings that one side could not have."""
    codes = {rule.code for report in (base, new) for rule in report.not_judged}
    differ = bool(base.not_judged) != bool(new.not_judged)
    only_without_queue = {budget_underused.RULE.code} if differ else set()
    return codes | only_without_queue


def _by_kind(report: RunReport) -> dict[_Kind, list[Finding]]:
    kinds: dict[_Kind, list[Finding]] = {}
    for finding in report.every_finding():
        kinds.setdefault((finding.code, finding.cause), []).append(finding)
    return kinds


def refusal_changes(*, base: RunReport, new: RunReport) -> list[CauseChange]:
    """One row per refusal of either run, the largest change first.

    Runs differ in length, so steps are compared as shares: ``steps that showed it / all steps``.
    """
    before, after = _refusals(base), _refusals(new)
    rows = [
        CauseChange(
            loop=kind[0],
            cause=kind[1],
            detail=kind[2],
            base_exits=before[kind][0],
            new_exits=after[kind][0],
            base_steps_frac=before[kind][1] / max(1, _steps(base)),
            new_steps_frac=after[kind][1] / max(1, _steps(new)),
        )
        for kind in {**before, **after}
    ]
    return sorted(rows, key=lambda row: (-abs(row.new_steps_frac - row.base_steps_frac), row.cause, row.loop))


def _refusals(report: RunReport) -> defaultdict[_Refusal, tuple[int, int]]:
    """Exits and steps of each kind of refusal; kinds that differ only in the line are one."""
    found: defaultdict[_Refusal, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in report.causes:
        if row.refusal:
            exits, steps = found[row.loop, row.cause, row.detail]
            found[row.loop, row.cause, row.detail] = (exits + row.exits, steps + row.steps)
    return found


def _steps(report: RunReport) -> int:
    return sum(trial.steps for trial in report.trials)
