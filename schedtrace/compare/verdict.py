"""The first line of a comparison: what changed, in the order of what matters."""

from schedtrace.diagnose.rules.common import counted
from schedtrace.model.comparison import FindingChange, MetricChange, Outcome

MOST_METRICS = 3
SAME = "no difference found"


def verdict(
    metrics: list[MetricChange],
    findings: list[FindingChange],
    *,
    same_work: bool,
    least: int,
    in_turn: bool | None,
) -> str:
    """Findings that went or appeared, then the largest changes beyond chance, or that none was found.

    Args:
        metrics: With their outcomes.
        findings: Of both runs.
        same_work: Whether both runs had the same to do.
        least: Trials a side for anything to be significant.
        in_turn: Whether the machine was the same for both; None: unknown.
    """
    parts = [] if same_work else ["different workloads, so the figures say little"]
    for state, verb in (("went", "gone"), ("appeared", "new")):
        named = [_finding(change) for change in findings if change.state == state]
        if named:
            parts.append(f"{verb}: {', '.join(named)}")
    parts += [
        said for metric in metrics if metric.name == "first-step requests" and (said := _steadied(metric))
    ]
    parts = [part for part in parts if part]
    figures = _figures(metrics, shapes_too=not parts)
    parts += figures or _nothing_found(metrics, least, other=bool(parts))
    if figures and in_turn is False:
        parts.append("the runs were not made in turn, so it may be the machine")
    return "; ".join(parts) or SAME


def _figures(metrics: list[MetricChange], *, shapes_too: bool) -> list[str]:
    """The largest changes beyond chance.

    Figures without a unit, such as the number of steps, count only where nothing else is to be said.
    """
    certain = sorted((metric for metric in metrics if metric.significant), key=_size, reverse=True)
    in_other_units = {(_size(m), m.new.mean > m.base.mean, m.p): m for m in reversed(certain) if m.unit}
    if measured := list(in_other_units.values())[::-1]:
        return [", ".join(f"{m.name} {percent(m.change_frac)}" for m in measured[:MOST_METRICS])]
    if certain and shapes_too:
        return [", ".join(f"{m.name} {m.base.mean:g} -> {m.new.mean:g}" for m in certain[:MOST_METRICS])]
    return []


def _nothing_found(metrics: list[MetricChange], least: int, *, other: bool) -> list[str]:
    """That no figure differs for certain, and what could not have been seen; nothing if all are the same."""
    changed = [m for m in metrics if m.outcome in {Outcome.NONE_FOUND, Outcome.TOO_FEW}]
    if not changed:
        return []
    first = changed[0]
    if all(m.outcome is Outcome.TOO_FEW for m in changed):
        trials = min(first.base.count, first.new.count)
        told = f"{first.name} {percent(first.change_frac)}, but "
        return [f"{told}{counted(trials, 'trial')} a side are too few to tell: {least} needed"]
    floor = first.noise_floor_frac
    seen = "" if floor is None else f" (in {first.name} one of {100 * floor:.1f} % would have been seen)"
    what = "no other difference found" if other else SAME
    return [f"{what} at this number of trials{seen}"]


def percent(change_frac: float | None) -> str:
    """``+12.3 %``, or that the base was 0."""
    return "from 0" if change_frac is None else f"{100 * change_frac:+.1f} %"


def _size(metric: MetricChange) -> float:
    """How large a change is, as a ratio: twice and half are alike."""
    low, high = sorted((metric.base.mean, metric.new.mean))
    return round(high / low, 9) if low > 0 else float("inf")


def _finding(change: FindingChange) -> str:
    went = change.state == "went"
    count = change.base_count if went else change.new_count
    trials = change.base_trials if went else change.new_trials
    cause = f" {change.cause}" if change.code == "blocked-budget" else ""
    where = f" in {counted(len(trials), 'trial')}" if trials else ""
    return (
        f"{change.code}{cause} ({counted(count, 'step' if change.code != 'preemption' else 'time')}{where})"
    )


def _steadied(metric: MetricChange) -> str:
    """That trials no longer vary, or now do; empty if neither, or if that may be chance."""
    before, after = metric.base, metric.new
    if not metric.significant:
        return ""
    if after.min == after.max and before.min < before.max:
        return f"{metric.name} now {after.min:.0f} in every trial (were {before.min:.0f} to {before.max:.0f})"
    if before.min == before.max and after.min < after.max:
        return f"{metric.name} now vary from {after.min:.0f} to {after.max:.0f} (were {before.min:.0f})"
    return ""
