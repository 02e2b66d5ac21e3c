"""First lines of a comparison: what changed, by importance, in at most three lines."""

from schedtrace.compare.significance import fewest_trials, trials_for
from schedtrace.model.comparison import FindingChange, MetricChange, Outcome, Sample
from schedtrace.model.message import NOTHING, Message, joined
from schedtrace.model.say import say

MOST_METRICS = 3
MOST_FINDINGS = 2
"""Maximum number of named findings that went or appeared; one of each if there are both."""
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
    """Return findings that disappeared or appeared, then the largest changes beyond chance, if any.

    Args:
        metrics: Metric changes with their outcomes.
        findings: Findings of both runs.
        same_work: Whether both runs had the same work.
        most_tests: Number of metrics that may vary with more trials.
        in_turn: Whether the machine was the same for both; None if unknown.
        whole: Whether both records show all that is compared.
    """
    parts = [] if same_work else [say("different workloads: the figures say little")]
    parts += _findings(findings)
    first_steps = [metric for metric in metrics if metric.name == "first-step requests" and same_work]
    steadied = [steady for metric in first_steps if (steady := _steadied(metric))]
    parts += steadied
    figures = _figures(metrics, most=1 if steadied else MOST_METRICS, shapes_too=not parts)
    parts += figures or _nothing_found(metrics, most_tests, has_changes=bool(parts))
    if figures and same_work and in_turn is False:
        parts.append(say("not made in turn: may be the machine"))
    return (
        joined(parts, "; ") if parts else say("{same}[{whole:!} in what both record]", same=SAME, whole=whole)
    )


def _findings(findings: list[FindingChange]) -> list[Message]:
    states = {"went": "gone", "appeared": "new"}
    changed = {state: [change for change in findings if change.state == state] for state in states}
    most = 1 if all(changed.values()) else MOST_FINDINGS
    return [
        say("{state}: {named}", state=states[state], named=_named(changes, most))
        for state, changes in changed.items()
        if changes
    ]


def _named(changes: list[FindingChange], most: int) -> Message:
    return say(
        "{named}[ and {rest:n} more]",
        named=joined([_finding(change) for change in changes[:most]], ", "),
        rest=max(0, len(changes) - most),
    )


def _finding(change: FindingChange) -> Message:
    return say("{code}[ {cause:cause}{by_cause:?}]", change, by_cause=change.code == "blocked-budget")


def _figures(metrics: list[MetricChange], *, most: int, shapes_too: bool) -> list[Message]:
    """Return the largest changes beyond chance.

    Figures without a unit, such as the number of steps, are listed only if there are no others.
    """
    certain = sorted((metric for metric in metrics if metric.significant), key=_size, reverse=True)
    in_other_units = {(_size(m), m.new.mean > m.base.mean, m.p): m for m in reversed(certain) if m.unit}
    if measured := list(in_other_units.values())[::-1]:
        return [joined([_changed(metric) for metric in measured[:most]], ", ")]
    if certain and shapes_too:
        return [joined([_shape(metric) for metric in certain[:most]], ", ")]
    return []


def _changed(metric: MetricChange) -> Message:
    """Return ``output +12.3 %``, or that the base was 0."""
    return say("{name} from 0" if metric.change_frac is None else "{name} {change_frac:+%}", metric)


def _shape(metric: MetricChange) -> Message:
    return say("{name} {base:n} -> {new:n}", metric, base=metric.base.mean, new=metric.new.mean)


def _nothing_found(metrics: list[MetricChange], most_tests: int, *, has_changes: bool) -> list[Message]:
    """Return a sentence if no figure certainly differs, with what could not be detected."""
    untold = {Outcome.NONE_FOUND, Outcome.TOO_FEW, Outcome.ONE_EACH}
    changed = [m for m in metrics if m.outcome in untold]
    if not changed:
        return []
    tested = [m for m in changed if m.outcome is Outcome.NONE_FOUND]
    first: MetricChange = (tested or changed)[0]
    if first.outcome is Outcome.TOO_FEW:
        return [_too_few(first, most_tests)]
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


def _too_few(metric: MetricChange, most_tests: int) -> Message:
    """Return a sentence on how many trials would show this change at this spread, with all possible tests."""
    least = fewest_trials(most_tests)
    if metric.change_frac:
        wanted = abs(metric.change_frac)
        least = max(least, trials_for(metric.base.values, metric.new.values, most_tests, wanted) or 0)
    trials = min(metric.base.count, metric.new.count)
    return say(
        "{change}, but {trials:n trial} a side cannot tell: [at least {unknown_spread:?}]{least:n} needed",
        change=_changed(metric),
        trials=trials,
        unknown_spread=trials == 1,
        least=least,
    )


def _size(metric: MetricChange) -> float:
    """Return the size of a change as a ratio, the same for double and half."""
    low, high = sorted((metric.base.mean, metric.new.mean))
    return round(high / low, 9) if low > 0 else float("inf")


def _steadied(metric: MetricChange) -> Message:
    """Return a sentence if trials no longer vary, or now vary, or nothing if it may be chance."""
    steady = [sample.min == sample.max for sample in (metric.base, metric.new)]
    if not metric.significant or steady[0] == steady[1]:
        return NOTHING
    return say("{name} now {new} (were {base})", metric, new=_values(metric.new), base=_values(metric.base))


def _values(sample: Sample) -> Message:
    return say("always {min:n}" if sample.min == sample.max else "{min:n} to {max:n}", sample)
