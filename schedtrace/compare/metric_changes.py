"""Change of each metric between two runs, its significance, and the conditions of ``diff --fail-on``.

Runs are compared by their trials or, without them, by their requests.

Two servers under one load have no trials, so their requests are compared (``Served``, ``server_changes``).
Consecutive requests share a queue, a batch or a slow phase of the machine. The bootstrap therefore draws
blocks of consecutive requests instead of single requests and, for the throughput, blocks of time windows.
(Circular block bootstrap: Politis and Romano 1992, after Kuensch 1989.)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import expm1, sqrt
from typing import Any, Self

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr, stdtrit

from schedtrace.compare import significance
from schedtrace.compare.significance import ALPHA, CONFIDENCE, POWER, holm
from schedtrace.diagnose.serving_metrics import counted_spans, request_latencies
from schedtrace.errors import InputError, UsageError
from schedtrace.model.comparison import Comparison, MetricChange, Outcome, Sample
from schedtrace.model.report import RunReport, TrialReport
from schedtrace.model.statistics import Percentiles
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.timeline.timeline import Timeline

Series = NDArray[np.float64]
RESAMPLES = 999
BLOCKS = 5
"""Number of blocks; few, so that each block is as long as possible. With shorter blocks, even of the length
that Politis and White (2004) compute, equal servers appear to differ, because a queue outlasts the blocks."""
FREEDOM = BLOCKS - 2
"""Degrees of freedom of Student's t; with one more, too many false differences are found
(``tools/bench/server_rates.py``)."""
FEWEST_VALUES = 30
MOST_WINDOWS, STEPS_A_WINDOW = 120, 5
STATISTICS: dict[str, Callable[..., Series]] = {
    "output": np.mean,
    "TTFT p50": np.median,
    "TPOT p50": np.median,
    "E2E p50": np.median,
}
"""Compared metrics, each with the statistic of its series; tails such as p99 are left out, because there are
too few requests for them."""
LATENCIES = {"TTFT p50": "ttft_us", "TPOT p50": "tpot_us", "E2E p50": "e2e_us"}
"""Latencies of requests, by column name."""


@dataclass(frozen=True)
class Served:
    """Series of values behind a server's figures, by metric."""

    series: dict[str, Series]

    @classmethod
    def from_server_run(cls, report: RunReport, timeline: Timeline) -> Self | None:
        """Return a server's series; None with trials, with several engines, or without requests or times."""
        if not {Fact.LIVES, Fact.TIMES} <= timeline.facts:
            return None
        if report.config["engines"] > 1 or [trial.trial for trial in report.trials] != [None]:
            return None
        latencies = {name: request_latencies(timeline)[column] / 1e3 for name, column in LATENCIES.items()}
        series = {name: values.drop_nulls().to_numpy() for name, values in latencies.items()}
        return cls({"output": _output(timeline), **series})


@dataclass(frozen=True)
class LogChange:
    """Change of a metric from base to new, as a logarithm: ``new / base = exp(change)``."""

    change: float
    error: float
    """Standard error of the change."""

    @property
    def p(self) -> float:
        """Two-sided p-value, by Student's t."""
        return float(2 * stdtr(FREEDOM, -abs(self.change) / self.error))

    @property
    def interval(self) -> tuple[float, float]:
        """Both ends of the 95 % interval of ``new / base - 1``."""
        width = -float(stdtrit(FREEDOM, (1 - CONFIDENCE) / 2)) * self.error
        return expm1(self.change - width), expm1(self.change + width)

    def detectable_change(self, tests: int) -> float:
        """Return the smallest change that would be detected with a probability of ``POWER``."""
        level = -float(stdtrit(FREEDOM, ALPHA / max(1, tests) / 2))
        return expm1((level - float(ndtri(1 - POWER))) * self.error)


def server_changes(base: Served, new: Served) -> dict[str, tuple[LogChange, float]]:
    """Return each metric's change and Holm-corrected p-value, if both sides have enough values."""
    changes = {}
    for name, statistic in STATISTICS.items():
        before, after = (_estimate(served.series[name], statistic) for served in (base, new))
        if before and after and (before[1] or after[1]):
            changes[name] = LogChange(after[0] - before[0], sqrt(before[1] ** 2 + after[1] ** 2))
    corrected = holm([change.p for change in changes.values()])
    return {name: (change, p) for (name, change), p in zip(changes.items(), corrected, strict=True)}


def _estimate(values: Series, statistic: Callable[..., Series]) -> tuple[float, float] | None:
    """Return the logarithm of a statistic, and its standard error; None if values are few or all 0."""
    if len(values) < FEWEST_VALUES:
        return None
    length = len(values) // BLOCKS
    starts = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, BLOCKS))
    places = (starts[:, :, None] + np.arange(length)) % len(values)
    figures = statistic(values[places.reshape(RESAMPLES, -1)], axis=1)
    if min(figures.min(), statistic(values)) <= 0:
        return None
    # with so few blocks, resampling underestimates the variance by one block's share
    error = float(np.log(figures).std(ddof=1)) * sqrt(BLOCKS / (BLOCKS - 1))
    return float(np.log(statistic(values))), error


def _output(timeline: Timeline) -> Series:
    """Return output tokens per second in equal windows of the time in which requests were present."""
    spans = counted_spans(timeline).select(
        pl.col("begin_us", "end_us") - timeline.header.wall_anchor_us,
        before_us=LENGTH_US.cum_sum() - LENGTH_US,
    )
    back = timeline.steps.filter(pl.col("output_us").is_not_null() & pl.col("output_tokens").is_not_null())
    if back.is_empty() or spans.is_empty():
        return np.array([])
    into = pl.min_horizontal("output_us", "end_us") - pl.col("begin_us")
    rows = (
        back.select(pl.col("output_us").cast(pl.Int64), "output_tokens")
        .sort("output_us")
        .join_asof(spans, left_on="output_us", right_on="begin_us", coalesce=False)
        .select(at_us=(pl.col("before_us") + into).fill_null(0), tokens="output_tokens")
    )
    lasted_us = int(spans.select(LENGTH_US.sum()).item())
    return in_windows(rows["at_us"].to_numpy(), rows["tokens"].to_numpy(), lasted_us)


def in_windows(at_us: NDArray[Any], tokens: NDArray[Any], lasted_us: int) -> Series:
    """Return tokens per second in equal windows, from the times and tokens of steps."""
    windows = min(MOST_WINDOWS, len(at_us) // STEPS_A_WINDOW)
    if not windows:
        return np.array([])
    counts, _ = np.histogram(at_us, bins=windows, range=(0, lasted_us), weights=tokens)
    return counts * windows / (lasted_us / 1e6)


Value = float | int | None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class Metric:
    """Figure of a trial, with the function that combines it over the run's engines."""

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
    """Return the whole trials, each as the reports of its engines; cut trials only if none is whole."""
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
    """Return the metrics that both sides have, with p-values corrected for the number of tests."""
    pairs = [(metric, sample(metric, base), sample(metric, new)) for metric in METRICS]
    changes = []
    for metric, before, after in pairs:
        if not (before and after):
            continue
        several = before.count > 1 and after.count > 1
        interval = significance.change_interval(before.values, after.values)
        changes.append(
            MetricChange(
                name=metric.name,
                unit=metric.unit,
                higher_is_better=metric.higher_is_better,
                base=before,
                new=after,
                change_frac=significance.relative_change(before.values, after.values),
                beyond_spread=(after.min > before.max or after.max < before.min) if several else None,
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
        )
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
    """Return the number of tests if all metrics varied, counting figures of one quantity only once.

    With more trials, more metrics may vary; statements about the number of trials must remain true then.
    """
    rates = {_shape(change) for change in changes if change.unit.endswith("/s")}
    return len(rates) + sum(not change.unit.endswith("/s") for change in changes)


def judge_servers(changes: Sequence[MetricChange], tested: Mapping[str, tuple[LogChange, float]]) -> None:
    """Set the outcomes of one server against another; metrics missing from ``tested`` stay untested."""
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


def _families(changes: Sequence[MetricChange]) -> list[list[MetricChange]]:
    """Group metrics that vary; figures of one quantity in several units form one group with one test.

    Tokens per second and requests per second form such a group if every trial had the same work.
    """
    families: dict[tuple[float, ...], list[MetricChange]] = {}
    for change in changes:
        several = min(change.base.count, change.new.count) > 1
        if several and (significance.spreads(change.base.values) or significance.spreads(change.new.values)):
            families.setdefault(_shape(change), []).append(change)
    return list(families.values())


def _shape(change: MetricChange) -> tuple[float, ...]:
    """Return a key that is equal for the same figure in different units."""
    values = [*change.base.values, *change.new.values]
    largest = max(values, key=abs) or 1.0
    return (change.base.count, *(round(value / largest, 9) for value in values))


def _judge(change: MetricChange, *, tests: int) -> None:
    """Set the outcome that the figures and their test support."""
    values = change.base.values, change.new.values
    if change.p is None:  # the metric does not vary, or whether it does is unknown
        several = min(change.base.count, change.new.count) > 1
        if change.base.same_figures(change.new):
            change.outcome, change.significant = Outcome.SAME, False if several else None
        elif several:
            change.outcome, change.significant = Outcome.EXACT, True
        else:
            change.outcome, change.significant = Outcome.TOO_FEW, None
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


def _direction(change: MetricChange, difference: float) -> Outcome:
    if change.higher_is_better is None:
        return Outcome.DIFFERS
    return Outcome.BETTER if (difference > 0) == change.higher_is_better else Outcome.WORSE


def _p(percentiles: Percentiles | None, name: str) -> float | None:
    return None if percentiles is None else float(getattr(percentiles, name))


JUDGED = [metric.name for metric in METRICS if metric.higher_is_better is not None]
"""Metrics that have a direction, and can therefore become worse."""


def regressed(asked: Sequence[str]) -> Callable[[MetricChange], bool]:
    """Return a predicate for metrics that became worse in the sense of ``--fail-on``.

    Args:
        asked: ``regression`` (any metric), ``regression:METRIC`` or ``regression:METRIC:PERCENT``: this
            metric, by at least so many percent of the base. In names, dashes and spaces are the same, and
            case does not matter.

    Raises:
        UsageError: If ``asked`` has another form.
    """
    conditions = [_parsed(text) for text in asked]
    return lambda change: any(
        change.name in names
        and change.worsened
        and (change.change_frac is None or abs(change.change_frac) >= least_frac)
        for names, least_frac in conditions
    )


def require_compared(asked: Sequence[str], comparison: Comparison) -> None:
    """Raise InputError if a condition is about a metric that one of the records lacks.

    Args:
        asked: As for ``regressed``.
        comparison: Comparison of the two runs.

    Raises:
        InputError: If the runs have none of a condition's metrics in common.
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


def _parsed(asked: str) -> tuple[list[str], float]:
    """Return the metrics of a condition, and the smallest change that meets it."""
    kind, *rest = asked.split(":")
    if kind != "regression" or len(rest) > 2:  # noqa: PLR2004  # a metric and a percentage
        msg = f"--fail-on {asked}: expected regression, regression:METRIC or regression:METRIC:PERCENT"
        raise UsageError(msg)
    names = JUDGED
    if rest:
        wanted = rest[0].replace("-", " ").strip().lower()
        names = [name for name in JUDGED if name.replace("-", " ").lower() == wanted]
    if not names:
        listed = ", ".join(name.replace(" ", "-") for name in JUDGED)
        msg = f"--fail-on {asked}: no metric {rest[0]} that can be worse; there are {listed}"
        raise UsageError(msg)
    percent = 0.0
    if rest[1:]:
        try:
            percent = float(rest[1].removesuffix("%"))
        except ValueError:
            percent = -1.0
    if not 0 <= percent < float("inf"):
        msg = f"--fail-on {asked}: {rest[1]} is no percentage, such as 5"
        raise UsageError(msg)
    return names, percent / 100
