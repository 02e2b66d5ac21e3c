"""The first line of a comparison: what changed, in the order of what matters."""

from schedtrace.diagnose.rules.common import counted
from schedtrace.model.comparison import FindingChange, MetricChange

MOST_METRICS = 3


def verdict(metrics: list[MetricChange], findings: list[FindingChange], *, same_work: bool) -> str:
    """Findings that went or appeared, then the largest changes beyond the spread of the trials."""
    parts = [] if same_work else ["different workloads, so the figures say little"]
    for state, verb in (("went", "gone"), ("appeared", "new")):
        named = [_finding(change) for change in findings if change.state == state]
        if named:
            parts.append(f"{verb}: {', '.join(named)}")
    parts += [
        said for metric in metrics if metric.name == "first-step requests" and (said := _steadied(metric))
    ]
    parts = [part for part in parts if part]
    parts += _figures(metrics, shapes_too=not parts)
    return "; ".join(parts) or "no difference found"


def _figures(metrics: list[MetricChange], *, shapes_too: bool) -> list[str]:
    """The largest changes beyond the spread; else the first change, and that it may be chance.

    Figures without a unit, such as the number of steps, count only where nothing else is to be said.
    """
    beyond = sorted((metric for metric in metrics if metric.beyond_spread), key=_size, reverse=True)
    if measured := [metric for metric in beyond if metric.unit]:
        return [", ".join(f"{m.name} {percent(m.change_frac)}" for m in measured[:MOST_METRICS])]
    if beyond and shapes_too:
        return [", ".join(f"{m.name} {m.base.mean:g} -> {m.new.mean:g}" for m in beyond[:MOST_METRICS])]
    changed = [m for m in metrics if (m.unit or shapes_too) and not m.base.same_figures(m.new)]
    return [f"{m.name} {percent(m.change_frac)}, {_how_sure(m)}" for m in changed[:1]]


def percent(change_frac: float | None) -> str:
    """``+12.3 %``, or that the base was 0."""
    return "from 0" if change_frac is None else f"{100 * change_frac:+.1f} %"


def _how_sure(metric: MetricChange) -> str:
    one_trial = metric.beyond_spread is None
    return "one trial on a side: may be noise" if one_trial else "within the spread of the trials"


def _size(metric: MetricChange) -> float:
    """How large a change is, as a ratio: twice and half are alike."""
    low, high = sorted((metric.base.mean, metric.new.mean))
    return high / low if low > 0 else float("inf")


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
    """That trials no longer vary, or now do; empty if neither, or not to be told from one trial."""
    before, after = metric.base, metric.new
    if min(before.count, after.count) == 1:
        return ""
    if after.min == after.max and before.min < before.max:
        return f"{metric.name} now {after.min:.0f} in every trial (were {before.min:.0f} to {before.max:.0f})"
    if before.min == before.max and after.min < after.max:
        return f"{metric.name} now vary from {after.min:.0f} to {after.max:.0f} (were {before.min:.0f})"
    return ""
