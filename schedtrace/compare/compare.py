"""Comparison of two runs, as a document: the verdict, notes, findings and refusals.

The other modules of the package compute the figures (``metric_changes``), the other differences
(``comparability``) and the first different decision (``decisions``).
"""

from collections import defaultdict

from schedtrace.compare.comparability import (
    Load,
    changed_settings,
    fairness_notes,
    recorded_work,
    same_work,
    taken_in_turn,
    workload,
)
from schedtrace.compare.decisions import compare_decisions
from schedtrace.compare.metric_changes import (
    Served,
    judge_servers,
    metric_changes,
    most_tests,
    number_of_tests,
    server_changes,
    trials_used,
)
from schedtrace.compare.significance import fewest_trials, trials_for
from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.rule import Threshold, share_frac
from schedtrace.diagnose.rules import KINDS, unused_budget
from schedtrace.diagnose.run_statistics import survivors
from schedtrace.diagnose.serving_metrics import counted_time
from schedtrace.diagnose.waits import FOUND_FROM_FRAC
from schedtrace.errors import InputError
from schedtrace.model.comparison import CauseChange, Comparison, FindingChange, MetricChange, Outcome, Sample
from schedtrace.model.message import Message, joined
from schedtrace.model.report import Finding, RunReport
from schedtrace.model.say import say
from schedtrace.read.run import Run
from schedtrace.timeline.timeline import make_timeline

_Refusal = tuple[str, str, str | None]
_Kind = tuple[str, str | None]

FELL = 2.0
"""Factor by which a finding's share must change for the finding to count as gone or as new."""


def finding_changes(*, base: RunReport, new: RunReport) -> list[FindingChange]:
    """Return a row for each code and cause of findings in either run, if both records could show them."""
    before, after = _by_kind(base), _by_kind(new)
    unjudged = _unjudged(base, new)
    changes = []
    for code, cause in dict.fromkeys([*after, *before]):
        if code in unjudged:
            continue
        old, now = before.get((code, cause), []), after.get((code, cause), [])
        rule = KINDS[code]
        threshold = rule.threshold or (Threshold(FOUND_FROM_FRAC, share_frac) if rule.charges else None)
        base_frac, new_frac = (
            max((frac for finding in side if (frac := threshold.share(finding)) is not None), default=None)
            if threshold
            else None
            for side in (old, now)
        )
        changed = not (old and now)
        if changed and threshold is not None and (base_frac is not None or new_frac is not None):
            # A share that merely crossed the threshold does not count; an unknown one is at the threshold.
            fracs = [threshold.least_frac if frac is None else frac for frac in (base_frac, new_frac)]
            changed = FELL * min(fracs) <= max(fracs)
        changes.append(
            FindingChange(
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
        )
    return changes


def _unjudged(base: RunReport, new: RunReport) -> set[str]:
    """Return the findings that one side cannot show, because its record lacks facts."""
    codes = {rule.code for report in (base, new) for rule in report.not_judged}
    differ = bool(base.not_judged) != bool(new.not_judged)
    only_without_queue = {unused_budget.BUDGET_UNDERUSED_RULE.code} if differ else set()
    return codes | only_without_queue


def _by_kind(report: RunReport) -> dict[_Kind, list[Finding]]:
    kinds: dict[_Kind, list[Finding]] = {}
    for finding in report.every_finding():
        kinds.setdefault((finding.code, finding.cause), []).append(finding)
    return kinds


def refusal_changes(*, base: RunReport, new: RunReport) -> list[CauseChange]:
    """Return a row per kind of refusal in either run, the largest change first.

    Runs differ in length, so each row compares shares: steps with the refusal divided by all steps.
    """
    before, after = _refusals(base), _refusals(new)
    base_steps, new_steps = (max(1, sum(trial.steps for trial in run.trials)) for run in (base, new))
    rows = [
        CauseChange(
            loop=kind[0],
            cause=kind[1],
            detail=kind[2],
            base_exits=before[kind][0],
            new_exits=after[kind][0],
            base_steps_frac=before[kind][1] / base_steps,
            new_steps_frac=after[kind][1] / new_steps,
        )
        for kind in {**before, **after}
    ]
    return sorted(rows, key=lambda row: (-abs(row.new_steps_frac - row.base_steps_frac), row.cause, row.loop))


def _refusals(report: RunReport) -> defaultdict[_Refusal, tuple[int, int]]:
    """Return the numbers of exits and steps of each kind of refusal, regardless of its source line."""
    totals: defaultdict[_Refusal, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in report.causes:
        if row.refusal:
            exits, steps = totals[row.loop, row.cause, row.detail]
            totals[row.loop, row.cause, row.detail] = (exits + row.exits, steps + row.steps)
    return totals


SERVERS = say("servers have no trials: how much one start of a server differs from the next is unknown")


def compare(*, base: Run, new: Run) -> Comparison:
    """Compare two runs.

    Raises:
        InputError: If they have no common figures to compare.
    """
    reports = {"base": analyze_run(base), "new": analyze_run(new)}
    alike = same_work(**reports)
    _require_common_ground(**reports, alike=alike)
    metrics = metric_changes(**reports)
    findings = finding_changes(**reports)
    refusals_known = all(report.config["exits_via"] for report in reports.values())
    tests, least = number_of_tests(metrics), fewest_trials(most_tests(metrics))
    timelines = {
        side: make_timeline(run.traces[0], run.manifest) for side, run in {"base": base, "new": new}.items()
    }
    loads = []
    if any(recorded_work(report) is None for report in reports.values()):
        before, after = (Load.from_report(reports[side], timelines[side]) for side in reports)
        if before.differs(after):
            words = "the loads differ: base {base}, new {new}: that alone changes the figures"
            loads.append(say(words, base=before.requests_and_tokens(), new=after.requests_and_tokens()))
    served, new_served = (Served.from_server_run(reports[side], timelines[side]) for side in reports)
    by_requests = served is not None and new_served is not None
    if served is not None and new_served is not None:
        tested = {} if loads or not alike else server_changes(base=served, new=new_served)
        judge_servers(metrics, tested)
        tests = len(tested)
    return Comparison(
        verdict=comparison_verdict(
            metrics,
            findings,
            same_work=alike,
            most_tests=most_tests(metrics),
            in_turn=taken_in_turn(**timelines),
            whole=not _unjudged(**reports),
        ),
        base_path=reports["base"].path,
        new_path=reports["new"].path,
        base_label=reports["base"].label,
        new_label=reports["new"].label,
        notes=[
            *_notes(**reports, alike=alike, least=None if by_requests else least),
            *loads,
            *fairness_notes(**timelines, metrics=metrics),
        ],
        config=changed_settings(base=base, new=new),
        metrics=metrics,
        causes=refusal_changes(**reports) if refusals_known else None,
        findings=findings,
        unjudged=[code for code in KINDS if code in _unjudged(**reports)],
        compared_by="requests" if by_requests else "trials",
        tests=tests,
        trials_least=least,
        decisions=compare_decisions(**timelines),
    )


def _notes(*, base: RunReport, new: RunReport, alike: bool, least: int | None) -> list[Message]:
    """Return the caveats for reading the figures.

    Args:
        base: Report of the base run.
        new: Report of the new run.
        alike: Whether both had the same work.
        least: Trials per side that a comparison needs; None for servers, which have no trials.
    """
    sides = {"base": base, "new": new}
    notes = [
        say("{side}: {problem}", side=side, problem=problem)
        for side, run in sides.items()
        for problem in run.problems
    ]
    notes += _not_compared(sides)
    if not alike:
        loads = {side: workload(run) for side, run in sides.items()}
        notes.append(say("different workloads: base {base}, new {new}", **loads))
    counts = {side: len(trials_used(run)) for side, run in sides.items()}
    if counts["base"] != counts["new"]:
        notes.append(say("base has {base:n trial}, new has {new:n trial}: all are used", **counts))
    notes += [
        say("{side}: its only trial was cut", side=side)
        for side, run in sides.items()
        if not any(trial.complete for trial in run.trials)
    ]
    notes += [
        say("{side}: {survivors}", side=side, survivors=none)
        for side, run in sides.items()
        if any(trial.ttft_ms for trial in run.trials) and (none := survivors(run.statistics))
    ]
    sources = [{t.throughput_from for t in report.trials if t.throughput_from} for report in (base, new)]
    if all(sources) and sources[0] != sources[1]:
        notes.append(
            say("throughput is the front end's on one side and the trace's on the other: not quite alike")
        )
    if any(trial.throughput_over == "requests" for run in sides.values() for trial in run.trials):
        notes += [
            say("{side}: throughput is {over}", side=side, over=over)
            for side, run in sides.items()
            if (over := counted_time(run))
        ]
    if least is None:
        notes.append(SERVERS)
    elif min(counts.values()) <= 1:
        notes.append(
            say(
                "one trial on a side: how much it would vary by itself is unknown; {option:code} can tell",
                option=f"--trials {least}",
            )
        )
    return notes


def _require_common_ground(*, base: RunReport, new: RunReport, alike: bool) -> None:
    for report in (base, new):
        if not any(trial.steps for trial in report.trials):
            msg = f"{report.path}: no step in it to compare"
            raise InputError(msg)
    if base.config["model"] != new.config["model"] and not alike:
        msg = (
            f"nothing in common to compare: {base.path} ran {base.config['model']}, "
            f"{new.path} ran {new.config['model']}, on different workloads"
        )
        raise InputError(msg)


def _not_compared(sides: dict[str, RunReport]) -> list[Message]:
    """Return the findings that could not be judged on a side, and why; one message if both sides agree."""
    sides_by_reason: dict[tuple[str, str, int], list[str]] = {}
    for side, run in sides.items():
        if run.not_judged:
            key = run.config["record"], ", ".join(run.lacks), len(run.not_judged)
            sides_by_reason.setdefault(key, []).append(side)
    return [
        say(
            "{sides}: {record:code}; it lacks {missing}: {rules:n finding} cannot be compared",
            sides=" and ".join(names),
            record=record,
            missing=missing,
            rules=rules,
        )
        for (record, missing, rules), names in sides_by_reason.items()
    ]


MOST_METRICS = 3
MOST_FINDINGS = 2
"""Maximum number of findings named as gone or new; one of each if there are both."""
SAME = "no difference found"


def comparison_verdict(
    metrics: list[MetricChange],
    findings: list[FindingChange],
    *,
    same_work: bool,
    most_tests: int,
    in_turn: bool | None,
    whole: bool = True,
) -> Message:
    """Return the verdict: findings that disappeared or appeared, then the largest significant changes.

    Args:
        metrics: Metric changes with their outcomes.
        findings: Findings of both runs.
        same_work: Whether both runs had the same work.
        most_tests: Number of metrics that could vary with more trials.
        in_turn: Whether the runs overlapped in time (``taken_in_turn``); None if unknown.
        whole: Whether both records contain everything that is compared.
    """
    parts = [] if same_work else [say("different workloads: the figures say little")]
    most = 1 if {"went", "appeared"} <= {finding.state for finding in findings} else MOST_FINDINGS
    for state, word in {"went": "gone", "appeared": "new"}.items():
        changes: list[FindingChange] = [finding for finding in findings if finding.state == state]
        codes = [
            say("{code}[ {cause:cause}{by_cause:?}]", change, by_cause=change.code == "blocked-budget")
            for change in changes[:most]
        ]
        if codes:
            rest = max(0, len(changes) - most)
            named = say("{named}[ and {rest:n} more]", named=joined(codes, ", "), rest=rest)
            parts.append(say("{state}: {named}", state=word, named=named))
    steadied = False
    for metric in metrics:
        steady = [sample.min == sample.max for sample in (metric.base, metric.new)]
        if metric.name == "first-step requests" and same_work and metric.significant and len({*steady}) > 1:
            steadied = True
            new, base = _values(metric.new), _values(metric.base)
            parts.append(say("{name} now {new} (were {base})", metric, new=new, base=base))
    figures = _figures(metrics, most=1 if steadied else MOST_METRICS, shapes_too=not parts)
    parts += figures or _nothing_found(metrics, most_tests, has_changes=bool(parts))
    if figures and same_work and in_turn is False:
        parts.append(say("not alternated: may be the machine"))
    return (
        joined(parts, "; ") if parts else say("{same}[{whole:!} in what both record]", same=SAME, whole=whole)
    )


def _figures(metrics: list[MetricChange], *, most: int, shapes_too: bool) -> list[Message]:
    """Return the largest significant changes.

    Figures without a unit, such as the number of steps, are listed only if there are no others.
    """
    certain = sorted((metric for metric in metrics if metric.significant), key=_size, reverse=True)
    in_other_units = {(_size(m), m.new.mean > m.base.mean, m.p): m for m in reversed(certain) if m.unit}
    if measured := list(in_other_units.values())[::-1]:
        return [joined([_changed(metric) for metric in measured[:most]], ", ")]
    if certain and shapes_too:
        shapes = [
            say("{name} {base:n} -> {new:n}", metric, base=metric.base.mean, new=metric.new.mean)
            for metric in certain[:most]
        ]
        return [joined(shapes, ", ")]
    return []


def _changed(metric: MetricChange) -> Message:
    """Describe a change: ``output +12.3 %``, or ``output from 0`` if the base was 0."""
    return say("{name} from 0" if metric.change_frac is None else "{name} {change_frac:+%}", metric)


def _nothing_found(metrics: list[MetricChange], most_tests: int, *, has_changes: bool) -> list[Message]:
    """Return why no change is certain: too few trials, one server a side, or no change of detectable size."""
    untold = {Outcome.NONE_FOUND, Outcome.TOO_FEW, Outcome.ONE_EACH}
    changed = [m for m in metrics if m.outcome in untold]
    if not changed:
        return []
    tested = [m for m in changed if m.outcome is Outcome.NONE_FOUND]
    first: MetricChange = (tested or changed)[0]
    if first.outcome is Outcome.TOO_FEW:
        # With the trials that would show this change, at this spread and with all possible tests.
        least = fewest_trials(most_tests)
        if first.change_frac:
            values = first.base.values, first.new.values
            least = max(least, trials_for(*values, most_tests, abs(first.change_frac)) or 0)
        trials = min(first.base.count, first.new.count)
        words = (
            "{change}, but {trials:n trial} a side cannot tell: [at least {unknown_spread:?}]{least:n} needed"
        )
        return [say(words, change=_changed(first), trials=trials, unknown_spread=trials == 1, least=least)]
    if first.outcome is Outcome.ONE_EACH:
        unknown = "{change}, one server against one: how much it would vary by itself is unknown"
        return [say(unknown, change=_changed(first))]
    return [
        say(
            "{what} at this number of {counted}[ ({noise_floor_frac:%} in {name} would have shown)]",
            first,
            what="no other difference found" if has_changes else SAME,
            counted="requests" if any(m.outcome is Outcome.ONE_EACH for m in metrics) else "trials",
        )
    ]


def _size(metric: MetricChange) -> float:
    """Return the size of a change as a ratio; doubling and halving have the same size."""
    low, high = sorted((metric.base.mean, metric.new.mean))
    return round(high / low, 9) if low > 0 else float("inf")


def _values(sample: Sample) -> Message:
    return say("always {min:n}" if sample.min == sample.max else "{min:n} to {max:n}", sample)
