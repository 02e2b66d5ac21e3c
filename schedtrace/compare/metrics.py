"""The metrics of a run, trial by trial."""

from collections.abc import Callable
from dataclasses import dataclass

from schedtrace.compare.statistics import effective_count
from schedtrace.model.comparison import Sample
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
    Metric("steps that admit", "", None, lambda t: None if t.new_per_step is None else len(t.new_per_step)),
    Metric("preemptions", "", False, lambda t: t.preemptions),
]


def trials_used(report: RunReport) -> list[list[TrialReport]]:
    """Whole trials, each as the reports of its engines; cut ones only where there is no whole one."""
    whole = [trial for trial in report.trials if trial.complete]
    by_trial: dict[int | None, list[TrialReport]] = {}
    for trial in whole or report.trials:
        by_trial.setdefault(trial.trial, []).append(trial)
    return list(by_trial.values())


def sample(metric: Metric, report: RunReport) -> Sample | None:
    """The metric over the trials of a run; None if no trial has it."""
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
        effective_count=effective_count(figures),
        mean=figures[0] if len({*figures}) == 1 else _mean(figures),
        min=min(figures),
        max=max(figures),
    )


def _p(percentiles: Percentiles | None, name: str) -> float | None:
    return None if percentiles is None else float(getattr(percentiles, name))
