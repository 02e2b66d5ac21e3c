"""What became of each metric between two runs, and whether that is more than chance."""

from collections.abc import Mapping, Sequence

from schedtrace.compare import power, servers, statistics
from schedtrace.compare.metrics import METRICS, Metric, sample
from schedtrace.model.comparison import MetricChange, Outcome, Sample
from schedtrace.model.report import RunReport


def metric_changes(*, base: RunReport, new: RunReport) -> list[MetricChange]:
    """The metrics that both sides have, their tests corrected for their number."""
    pairs = [(metric, sample(metric, base), sample(metric, new)) for metric in METRICS]
    changes = [
        _untested(metric, base=before, new=after) for metric, before, after in pairs if before and after
    ]
    families = _families(changes)
    tested = [statistics.rank_test(family[0].base.values, family[0].new.values) for family in families]
    corrected = statistics.holm([p for _, p in tested])
    for family, (effect, p), p_corrected in zip(families, tested, corrected, strict=True):
        for change in family:
            change.effect, change.p, change.p_corrected = effect, p, p_corrected
    for change in changes:
        _judge(change, tests=len(families))
    return changes


def number_of_tests(changes: Sequence[MetricChange]) -> int:
    """How many tests the p-values are corrected for."""
    return len(_families(changes))


def most_tests(changes: Sequence[MetricChange]) -> int:
    """How many tests there would be if all of them varied, those once that are one figure in other units.

    More trials may show that a metric varies which did not before: what is said of their number stays true.
    """
    rates = {_shape(change) for change in changes if change.unit.endswith("/s")}
    return len(rates) + sum(not change.unit.endswith("/s") for change in changes)


def judge_servers(
    changes: Sequence[MetricChange], tested: Mapping[str, tuple[servers.Change, float]]
) -> None:
    """The outcomes of one server against one; what ``tested`` lacks is not tested."""
    for change in changes:
        if change.base.same_figures(change.new):
            change.outcome = Outcome.SAME
        elif change.name not in tested:
            change.outcome = Outcome.ONE_EACH
        else:
            found, p_corrected = tested[change.name]
            change.p, change.p_corrected = found.p, p_corrected
            change.ci_low_frac, change.ci_high_frac = found.interval
            change.noise_floor_frac = found.noise_floor(len(tested))
            change.significant = p_corrected <= statistics.ALPHA
            better = (found.change > 0) == change.higher_is_better
            change.outcome = Outcome.NONE_FOUND
            if change.significant:
                change.outcome = Outcome.BETTER if better else Outcome.WORSE


def _untested(metric: Metric, *, base: Sample, new: Sample) -> MetricChange:
    several = base.count > 1 and new.count > 1
    interval = statistics.change_interval(base.values, new.values)
    return MetricChange(
        name=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        base=base,
        new=new,
        change_frac=statistics.change(base.values, new.values),
        beyond_spread=(new.min > base.max or new.max < base.min) if several else None,
        outcome=Outcome.TOO_FEW,
        significant=None,
        p=None,
        p_corrected=None,
        effect=None,
        ci_low_frac=interval[0] if interval else None,
        ci_high_frac=interval[1] if interval else None,
        noise_floor_frac=None,
        trials_needed=None,
    )


def _families(changes: Sequence[MetricChange]) -> list[list[MetricChange]]:
    """Metrics that vary, those together that are one figure in other units and so one test.

    Tokens and requests per second are such where every trial had the same work.
    """
    families: dict[tuple[float, ...], list[MetricChange]] = {}
    for change in changes:
        several = min(change.base.count, change.new.count) > 1
        if several and (statistics.spreads(change.base.values) or statistics.spreads(change.new.values)):
            families.setdefault(_shape(change), []).append(change)
    return list(families.values())


def _shape(change: MetricChange) -> tuple[float, ...]:
    """The same for one figure in other units."""
    values = [*change.base.values, *change.new.values]
    largest = max(values, key=abs) or 1.0
    return (change.base.count, *(round(value / largest, 9) for value in values))


def _judge(change: MetricChange, *, tests: int) -> None:
    """The outcome that the figures and their test allow."""
    values = change.base.values, change.new.values
    if change.p is None:
        change.outcome, change.significant = _without_test(change)
        return
    change.noise_floor_frac = power.noise_floor(*values, tests)
    change.trials_needed = power.trials_for(*values, tests)
    if change.base.same_figures(change.new):
        change.significant, change.outcome = False, Outcome.SAME
    elif change.p_corrected is not None and change.p_corrected <= statistics.ALPHA:
        change.significant, change.outcome = True, _direction(change)
    elif statistics.smallest_p(change.base.count, change.new.count) * tests > statistics.ALPHA:
        change.significant, change.outcome = None, Outcome.TOO_FEW
    else:
        change.significant, change.outcome = False, Outcome.NONE_FOUND


def _without_test(change: MetricChange) -> tuple[Outcome, bool | None]:
    """Nothing varies, or nobody knows whether it does."""
    several = min(change.base.count, change.new.count) > 1
    if change.base.same_figures(change.new):
        return Outcome.SAME, False if several else None
    return (Outcome.EXACT, True) if several else (Outcome.TOO_FEW, None)


def _direction(change: MetricChange) -> Outcome:
    higher = change.new.mean > change.base.mean
    if change.higher_is_better is None or change.effect is None or higher != (change.effect > 0):
        return Outcome.DIFFERS
    return Outcome.BETTER if higher == change.higher_is_better else Outcome.WORSE
