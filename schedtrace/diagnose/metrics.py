"""The metrics of two runs, trial by trial: means, ranges and changes."""

from collections.abc import Callable
from dataclasses import dataclass

from schedtrace.model.comparison import MetricChange, Sample
from schedtrace.model.report import Percentiles, RunReport, TrialReport

Value = float | int | None


def _sum(values: list[float]) -> float:
    return sum(values)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class Metric:
    """One figure of a trial, and how the engines of a run are put together for it."""

    name: str
    unit: str
    higher_is_better: bool | None
    """None: neither; it is a shape."""
    value: Callable[[TrialReport], Value]
    over_engines: Callable[[list[float]], float] = _sum


METRICS = [
    Metric("output", "tok/s", True, lambda t: t.output_tokens_per_s),
    Metric("total", "tok/s", True, lambda t: t.total_tokens_per_s),
    Metric("requests", "req/s", True, lambda t: t.requests_per_s),
    Metric("TTFT p50", "ms", False, lambda t: _p(t.ttft_ms, "p50"), _mean),
    Metric("TTFT p99", "ms", False, lambda t: _p(t.ttft_ms, "p99"), _mean),
    Metric("TPOT p50", "ms", False, lambda t: _p(t.tpot_ms, "p50"), _mean),
    Metric("E2E p50", "ms", False, lambda t: _p(t.e2e_ms, "p50"), _mean),
    Metric("E2E p99", "ms", False, lambda t: _p(t.e2e_ms, "p99"), _mean),
    Metric("steps", "", None, lambda t: t.steps),
    Metric("first-step requests", "", None, lambda t: t.first_step_requests),
    Metric("first-step tokens", "", None, lambda t: t.first_step_tokens),
    Metric("steps that admit", "", None, lambda t: len(t.new_per_step)),
    Metric("preemptions", "", False, lambda t: t.preemptions),
]


def metric_changes(*, base: RunReport, new: RunReport) -> list[MetricChange]:
    """The metrics that both sides have."""
    changes = []
    for metric in METRICS:
        before, after = _sample(metric, base), _sample(metric, new)
        if before is not None and after is not None:
            changes.append(_change(metric, base=before, new=after))
    return changes


def trials_used(report: RunReport) -> list[list[TrialReport]]:
    """Whole trials, each as the reports of its engines; cut ones only where there is no whole one."""
    whole = [trial for trial in report.trials if trial.complete]
    by_trial: dict[int | None, list[TrialReport]] = {}
    for trial in whole or report.trials:
        by_trial.setdefault(trial.trial, []).append(trial)
    return list(by_trial.values())


def _sample(metric: Metric, report: RunReport) -> Sample | None:
    figures = []
    for engines in trials_used(report):
        values = [float(value) for trial in engines if (value := metric.value(trial)) is not None]
        if values:
            figures.append(metric.over_engines(values))
    if not figures:
        return None
    return Sample(count=len(figures), mean=_mean(figures), min=min(figures), max=max(figures))


def _change(metric: Metric, *, base: Sample, new: Sample) -> MetricChange:
    known_spread = base.count > 1 and new.count > 1
    return MetricChange(
        name=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        base=base,
        new=new,
        change_frac=new.mean / base.mean - 1 if base.mean else None,
        beyond_spread=(new.min > base.max or new.max < base.min) if known_spread else None,
    )


def _p(percentiles: Percentiles | None, name: str) -> float | None:
    return None if percentiles is None else float(getattr(percentiles, name))
