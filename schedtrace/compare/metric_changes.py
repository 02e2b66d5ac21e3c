"""Change of each metric between two runs, and its significance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from schedtrace.compare import servers, significance
from schedtrace.errors import InputError, UsageError
from schedtrace.model.comparison import Comparison, MetricChange, Outcome, Sample
from schedtrace.model.report import RunReport, TrialReport
from schedtrace.model.statistics import Percentiles

Value = float | int | None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class Metric:
    """Figure of a trial, and how it is combined over the engines of a run."""

    name: str
    unit: str
    higher_is_better: bool | None
    """Direction of improvement; None if neither direction is better."""
    value: Callable[[TrialReport], Value]
    over_engines: Callable[[list[float]], float] = sum


METRICS = [
    Metric("output", "tok/s", True, lambda t: t.output_tokens_per_s),
    Metric("total", "tok/s", True, lambda t: t.total_tokens_per_s),
    Metric("requests", "req/s", True, lambda t: t.requests_per_s),
    Metric("queue mean", "ms", False, lambda t: _p(t.queue_ms, "mean"), _mean),
    Metric("TTFT p50", "ms", False, lambda t: _p(t.ttft_ms, "p50"), _mean),
    Metric("TTFT p99", "ms", False, lambda t: _p(t.ttft_ms, "p99"), _mean),
    Metric("TPOT p50", "ms", False, lambda t: _p(t.tpot_ms, "p50"), _mean),
    Metric("E2E p50", "ms", False, lambda t: _p(t.e2e_ms, "p50"), _mean),
    Metric("E2E p99", "ms", False, lambda t: _p(t.e2e_ms, "p99"), _mean),
    Metric("E2E mean", "ms", False, lambda t: _p(t.e2e_ms, "mean"), _mean),
    Metric("steps", "", None, lambda t: t.steps),
    Metric("first-step requests", "", None, lambda t: t.first_step_requests),
    Metric("first-step tokens", "", None, lambda t: t.first_step_tokens),
    Metric("steps that admit", "", None, lambda t: None if t.new_per_step is None else len(t.new_per_step)),
    Metric("preemptions", "", False, lambda t: t.preemptions),
]


def trials_used(report: RunReport) -> list[list[TrialReport]]:
    """Return whole trials, each as its engines' reports; cut trials only if none is whole."""
    whole = [trial for trial in report.trials if trial.complete]
    by_trial: dict[int | None, list[TrialReport]] = {}
    for trial in whole or report.trials:
        by_trial.setdefault(trial.trial, []).append(trial)
    return list(by_trial.values())


def sample(metric: Metric, report: RunReport) -> Sample | None:
    """Return the metric over the trials of a run; None if no trial has it."""
    figures = []
    for engines in trials_used(report):
        values = [value for trial in engines if (value := metric.value(trial)) is not None]
        if values:
            figures.append(metric.over_engines(values))
    if not figures:
        return None
    return Sample(
        values=figures,
        count=len(figures),
        effective_count=significance.effective_count(figures),
        mean=figures[0] if len({*figures}) == 1 else _mean(figures),
        min=min(figures),
        max=max(figures),
    )


def metric_changes(*, base: RunReport, new: RunReport) -> list[MetricChange]:
    """Return the metrics that both sides have, their tests corrected for their number."""
    pairs = [(metric, sample(metric, base), sample(metric, new)) for metric in METRICS]
    changes = [
        _untested(metric, base=before, new=after) for metric, before, after in pairs if before and after
    ]
    families = _families(changes)
    tested = [significance.rank_test(family[0].base.values, family[0].new.values) for family in families]
    corrected = significance.holm([p for _, p in tested])
    for family, (effect, p), p_corrected in zip(families, tested, corrected, strict=True):
        for change in family:
            change.effect, change.p, change.p_corrected = effect, p, p_corrected
    for change in changes:
        _judge(change, tests=len(families))
    return changes


def number_of_tests(changes: Sequence[MetricChange]) -> int:
    """Return the number of tests for which p-values are corrected."""
    return len(_families(changes))


def most_tests(changes: Sequence[MetricChange]) -> int:
    """Return the number of tests if all metrics varied, counting each figure once for all its units.

    With more trials, more metrics may vary; statements about the number of trials then stay true.
    """
    rates = {_shape(change) for change in changes if change.unit.endswith("/s")}
    return len(rates) + sum(not change.unit.endswith("/s") for change in changes)


def judge_servers(
    changes: Sequence[MetricChange], tested: Mapping[str, tuple[servers.Change, float]]
) -> None:
    """Set the outcomes of one server against one; metrics missing from ``tested`` stay untested."""
    for change in changes:
        if change.base.same_figures(change.new):
            change.outcome = Outcome.SAME
        elif change.name not in tested:
            change.outcome = Outcome.ONE_EACH
        else:
            tested_change, p_corrected = tested[change.name]
            change.p, change.p_corrected = tested_change.p, p_corrected
            change.ci_low_frac, change.ci_high_frac = tested_change.interval
            change.noise_floor_frac = tested_change.detectable_change(len(tested))
            change.significant = p_corrected <= significance.ALPHA
            change.outcome = Outcome.NONE_FOUND
            if change.significant:
                change.outcome = _direction(change, tested_change.change)


def _untested(metric: Metric, *, base: Sample, new: Sample) -> MetricChange:
    several = base.count > 1 and new.count > 1
    interval = significance.change_interval(base.values, new.values)
    return MetricChange(
        name=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        base=base,
        new=new,
        change_frac=significance.change(base.values, new.values),
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
    """Group metrics that vary; figures of one quantity in several units share a group and a test.

    Tokens and requests per second are such figures if every trial had the same work.
    """
    families: dict[tuple[float, ...], list[MetricChange]] = {}
    for change in changes:
        several = min(change.base.count, change.new.count) > 1
        if several and (significance.spreads(change.base.values) or significance.spreads(change.new.values)):
            families.setdefault(_shape(change), []).append(change)
    return list(families.values())


def _shape(change: MetricChange) -> tuple[float, ...]:
    """Return a key that is equal for one figure in several units."""
    values = [*change.base.values, *change.new.values]
    largest = max(values, key=abs) or 1.0
    return (change.base.count, *(round(value / largest, 9) for value in values))


def _judge(change: MetricChange, *, tests: int) -> None:
    """Set the outcome that the figures and their test allow."""
    values = change.base.values, change.new.values
    if change.p is None:
        change.outcome, change.significant = _without_test(change)
        return
    change.noise_floor_frac = significance.noise_floor(*values, tests)
    change.trials_needed = significance.trials_for(*values, tests)
    if change.base.same_figures(change.new):
        change.significant, change.outcome = False, Outcome.SAME
    elif change.p_corrected is not None and change.p_corrected <= significance.ALPHA:
        of_means = change.new.mean - change.base.mean
        agree = change.effect is not None and (of_means > 0) == (change.effect > 0)
        change.significant, change.outcome = True, _direction(change, of_means) if agree else Outcome.DIFFERS
    elif significance.smallest_p(change.base.count, change.new.count) * tests > significance.ALPHA:
        change.significant, change.outcome = None, Outcome.TOO_FEW
    else:
        change.significant, change.outcome = False, Outcome.NONE_FOUND


def _without_test(change: MetricChange) -> tuple[Outcome, bool | None]:
    """Set the outcome of a metric without a test: it does not vary, or this is unknown."""
    several = min(change.base.count, change.new.count) > 1
    if change.base.same_figures(change.new):
        return Outcome.SAME, False if several else None
    return (Outcome.EXACT, True) if several else (Outcome.TOO_FEW, None)


def _direction(change: MetricChange, difference: float) -> Outcome:
    if change.higher_is_better is None:
        return Outcome.DIFFERS
    return Outcome.BETTER if (difference > 0) == change.higher_is_better else Outcome.WORSE


def _p(percentiles: Percentiles | None, name: str) -> float | None:
    return None if percentiles is None else float(getattr(percentiles, name))


NAMES = [metric.name for metric in METRICS if metric.higher_is_better is not None]
"""Metrics that can be worse."""


def regressed(asked: Sequence[str]) -> Callable[[MetricChange], bool]:
    """Return a predicate for metrics that became worse in the sense of ``--fail-on``; none does without it.

    Args:
        asked: ``regression`` (any metric), ``regression:METRIC`` or ``regression:METRIC:PERCENT``: this
            metric, by at least so many percent of the base. Dashes and spaces in names are alike, and so are
            cases.

    Raises:
        UsageError: If it is none of these.
    """
    conditions = [_condition(text) for text in asked]
    return lambda change: any(condition(change) for condition in conditions)


def require_compared(asked: Sequence[str], comparison: Comparison) -> None:
    """Raise InputError if a condition is about a metric that one of the records lacks.

    Args:
        asked: As for ``regressed``.
        comparison: Comparison of the two runs.

    Raises:
        InputError: If none of the metrics of a condition is in both.
    """
    compared = {change.name for change in comparison.metrics}
    for condition in asked:
        names, _ = _parsed(condition)
        if not compared.intersection(names):
            what = names[0] if len(names) == 1 else "a metric that can be worse"
            msg = (
                f"--fail-on {condition} cannot be judged: {comparison.base_path} and {comparison.new_path} "
                f"do not both record {what}"
            )
            raise InputError(msg)


def _condition(asked: str) -> Callable[[MetricChange], bool]:
    names, least_frac = _parsed(asked)

    def is_met(change: MetricChange) -> bool:
        large = change.change_frac is None or abs(change.change_frac) >= least_frac
        return change.name in names and change.worsened and large

    return is_met


def _parsed(asked: str) -> tuple[list[str], float]:
    """Return the metrics of a condition, and the least change."""
    kind, *rest = asked.split(":")
    if kind != "regression" or len(rest) > 2:  # noqa: PLR2004  # a metric and a percentage
        msg = f"--fail-on {asked}: expected regression, regression:METRIC or regression:METRIC:PERCENT"
        raise UsageError(msg)
    names = [name for name in NAMES if _plain(name) == _plain(rest[0])] if rest else NAMES
    if not names:
        listed = ", ".join(name.replace(" ", "-") for name in NAMES)
        msg = f"--fail-on {asked}: no metric {rest[0]} that can be worse; there are {listed}"
        raise UsageError(msg)
    return names, _percent(asked, rest[1]) if rest[1:] else 0.0


def _percent(asked: str, text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        msg = f"--fail-on {asked}: {text} is no percentage, such as 5"
        raise UsageError(msg)
    return value / 100


def _plain(name: str) -> str:
    return name.replace("-", " ").strip().lower()
