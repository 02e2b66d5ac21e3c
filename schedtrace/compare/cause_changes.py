"""Which refusals became more or less frequent between two runs."""

from collections import defaultdict

from schedtrace.model.comparison import CauseChange
from schedtrace.model.report import RunReport

_Kind = tuple[str, str, str | None]


def cause_changes(*, base: RunReport, new: RunReport) -> list[CauseChange]:
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


def _refusals(report: RunReport) -> defaultdict[_Kind, tuple[int, int]]:
    """Exits and steps of each kind of refusal; kinds that differ only in the line are one."""
    found: defaultdict[_Kind, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in report.causes:
        if row.refusal:
            exits, steps = found[row.loop, row.cause, row.detail]
            found[row.loop, row.cause, row.detail] = (exits + row.exits, steps + row.steps)
    return found


def _steps(report: RunReport) -> int:
    return sum(trial.steps for trial in report.trials)
