"""What became of each metric between two runs, and whether that is more than chance."""

from collections.abc import Sequence

from schedtrace.compare import power, statistics
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
        for one in family:
            one.effect, one.p, one.p_corrected = effect, p, p_corrected
    for one in changes:
        _judge(one, tests=len(families))
    return changes


def number_of_tests(changes: Sequence[MetricChange]) -> int:
    """How many tests the p-values are corrected for."""
    return len(_families(changes))


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
    for one in changes:
        values = [*one.base.values, *one.new.values]
        several = min(one.base.count, one.new.count) > 1
        if several and (statistics.spreads(one.base.values) or statistics.spreads(one.new.values)):
            largest = max(values, key=abs)
            shape = (one.base.count, *(round(value / largest, 9) for value in values))
            families.setdefault(shape, []).append(one)
    return list(families.values())


def _judge(one: MetricChange, *, tests: int) -> None:
    """Say what the figures and their test allow to be said."""
    values = one.base.values, one.new.values
    if one.p is None:
        one.outcome, one.significant = _without_test(one)
        return
    one.noise_floor_frac = power.noise_floor(*values, tests)
    one.trials_needed = power.trials_for(*values, tests)
    if one.base.same_figures(one.new):
        one.significant, one.outcome = False, Outcome.SAME
    elif one.p_corrected is not None and one.p_corrected <= statistics.ALPHA:
        one.significant, one.outcome = True, _direction(one)
    elif statistics.smallest_p(one.base.count, one.new.count) * tests > statistics.ALPHA:
        one.significant, one.outcome = None, Outcome.TOO_FEW
    else:
        one.significant, one.outcome = False, Outcome.NONE_FOUND


def _without_test(one: MetricChange) -> tuple[Outcome, bool | None]:
    """Nothing varies, or nobody knows whether it does."""
    several = min(one.base.count, one.new.count) > 1
    if one.base.same_figures(one.new):
        return Outcome.SAME, False if several else None
    return (Outcome.EXACT, True) if several else (Outcome.TOO_FEW, None)


def _direction(one: MetricChange) -> Outcome:
    higher = one.new.mean > one.base.mean
    if one.higher_is_better is None or one.effect is None or higher != (one.effect > 0):
        return Outcome.DIFFERS
    return Outcome.BETTER if higher == one.higher_is_better else Outcome.WORSE
