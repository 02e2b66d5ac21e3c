"""Figures of a prediction: those that scheduling determines, times with intervals, and the misfit."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from schedtrace.compare.metric_changes import METRICS as COMPARED
from schedtrace.compare.metric_changes import Metric
from schedtrace.model.report import TrialReport
from schedtrace.model.what_if import Figure
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.timeline.timeline import Timeline
from schedtrace.whatif.interval import ratio_interval, with_leaned

if TYPE_CHECKING:
    from schedtrace.whatif.prediction import RecordedLoad


MAKESPAN = Metric("makespan", "s", False, lambda trial: trial.duration_s)
TIMED = ("output", "TTFT p50", "TTFT p99", "TPOT p50", "E2E p50", "E2E p99", "E2E mean")
"""Metrics of ``compare`` that depend on step times."""
METRICS = [*(metric for metric in COMPARED if metric.name in TIMED), MAKESPAN]


@dataclass(frozen=True)
class DecidedMetric:
    """Figure that scheduling determines, computed from a timeline and one trial's steps."""

    name: str
    unit: str
    higher_is_better: bool | None
    of: Callable[[Timeline, pl.DataFrame], float]
    is_sum: bool = True
    """Whether the figure is a sum over the ranks of a run; otherwise it is a mean over the steps of all
    ranks."""


def _preemptions(timeline: Timeline, steps: pl.DataFrame) -> float:
    return float(timeline.preemptions.join(steps.select("step"), on="step", how="semi").height)


DECIDED = (
    DecidedMetric("steps", "", None, lambda _, steps: steps.height),
    DecidedMetric("requests a step", "", None, lambda _, steps: _mean(steps, "total_requests"), False),
    DecidedMetric("waiting requests", "", False, lambda _, steps: _mean(steps, "num_waiting_after"), False),
    DecidedMetric("preemptions", "", False, _preemptions),
    DecidedMetric(
        "recomputed tokens", "", False, lambda _, steps: float(steps["recomputed_tokens"].sum() or 0)
    ),
)


def decided_figures(before: Sequence[Timeline], after: Sequence[Timeline]) -> list[Figure]:
    """Return the figures that scheduling determines, as means over trials, of two runs (lists of ranks)."""
    figures = []
    for metric in DECIDED:
        was, value = (
            statistics.fmean(_over_ranks(metric, ranks, trial) for trial in run_trials(ranks))
            for ranks in (before, after)
        )
        figures.append(_figure(metric, was, value, decided=True))
    return figures


def run_trials(ranks: Sequence[Timeline]) -> list[int | None]:
    """Return the trials that any rank of a run contains."""
    return sorted({trial for rank in ranks for trial in rank.trials()}, key=lambda trial: trial or 0)


def _over_ranks(metric: DecidedMetric, ranks: Sequence[Timeline], trial: int | None) -> float:
    steps = [rank.trial_rows(rank.steps, trial) for rank in ranks]
    if metric.is_sum:
        return sum(metric.of(rank, of_rank) for rank, of_rank in zip(ranks, steps, strict=True))
    return metric.of(ranks[0], pl.concat(steps, how="diagonal_relaxed"))


def baseline_figures(recorded: Sequence[TrialReport], replayed: Sequence[TrialReport]) -> list[Figure]:
    """Return the timing figures of the unchanged replay, compared with the recording."""
    figures = []
    for metric in METRICS:
        was, values = (trial_values(metric.value, trials) for trials in (recorded, replayed))
        if values:
            before = statistics.fmean(was) if was else None
            figures.append(_figure(metric, before, statistics.fmean(values)))
    return figures


def timing_figures(
    recorded: Sequence[TrialReport],
    replayed: Sequence[TrialReport],
    changed: Sequence[TrialReport],
    spread: Mapping[str, list[float]],
    bound: Sequence[TrialReport] | None = None,
    leaned: Sequence[Sequence[TrialReport]] = (),
) -> list[Figure]:
    """Return the timing figures of a change, compared with the unchanged replay.

    Args:
        recorded: Trials as recorded.
        replayed: Trials as replayed.
        changed: Trials as replayed with the change.
        spread: Ratios of each metric that resampled step times predict.
        bound: Trials as replayed with the change, without economies of scale in steps larger than recorded.
            The change lies between the two ratios, and its value is their middle on a logarithmic scale.
        leaned: Trials as replayed with the change, with the time of steps outside the recorded range at
            either end of that time's interval.
    """
    figures = []
    for metric in METRICS:
        was, before, after = (trial_values(metric.value, trials) for trials in (recorded, replayed, changed))
        if not before or not after:
            continue
        mean = statistics.fmean(before)
        ratio = statistics.fmean(after) / mean
        resampled = ratio_interval(ratio, spread.get(metric.name, []), was, before)
        ends = [
            statistics.fmean(values) / mean
            for trials in leaned
            if (values := trial_values(metric.value, trials))
        ]
        low, high = with_leaned(ratio, resampled, ends)
        if bounds := trial_values(metric.value, bound or ()):
            bound_ratio = statistics.fmean(bounds) / mean
            resampled_ends = [ratio - 1 if end is None else end for end in resampled]
            all_ends = [*resampled_ends, *((1 + end) * bound_ratio / ratio - 1 for end in resampled_ends)]
            low, high = (
                pick(all_ends if end is None else [end, *all_ends]) for pick, end in ((min, low), (max, high))
            )
            ratio = math.sqrt(ratio * bound_ratio)
        figure = _figure(metric, mean, ratio * mean)
        figure.change_frac, figure.low_frac, figure.high_frac = ratio - 1, low, high
        figures.append(figure)
    return figures


def _figure(
    metric: Metric | DecidedMetric, before: float | None, value: float, *, decided: bool = False
) -> Figure:
    return Figure(
        name=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        decided=decided,
        value=value,
        before=before,
        change_frac=value / before - 1 if before else None,
    )


def trial_values(value: Callable[[TrialReport], Any], trials: Sequence[TrialReport]) -> list[float]:
    """Return a figure for each trial that has it."""
    return [float(figure) for trial in trials if (figure := value(trial))]


Composition = list[tuple[str, int, int]]
"""Requests of a step, with their computed and scheduled tokens."""


def compositions(ranks: Sequence[Timeline]) -> dict[tuple[int, int | None, int], Composition]:
    """Return compositions by rank, trial and number of the step within the trial."""
    by_step: dict[tuple[int, int | None, int], Composition] = {}
    for number, timeline in enumerate(ranks):
        steps = timeline.steps.sort("step").select(
            "step", "trial", at=pl.col("step") - pl.col("step").min().over("trial")
        )
        columns = ("step", "request_id", "computed_tokens", "scheduled_tokens")
        rows = timeline.requests.select(*columns).lazy().collect()
        by_step |= {(number, trial, at): [] for _, trial, at in steps.iter_rows()}
        joined = rows.join(steps, on="step", maintain_order="left")
        for _, request, computed, scheduled, trial, at in joined.iter_rows():
            by_step[number, trial, at].append((request, computed, scheduled))
    return by_step


def _mean(steps: pl.DataFrame, column: str) -> float:
    return float(steps.filter(pl.col("total_requests") > 0)[column].mean() or 0.0)  # type: ignore[arg-type]  # a column of numbers


REPRODUCES_WITHIN = 0.05
"""Maximum misfit, as a share, that needs no explanation."""
MOST_FRAC = 1 / 3
"""Maximum misfit, as a share, that allows a prediction; beyond it the replay does not reproduce the load."""
EXPLAINS_FRAC = 0.5
"""Minimum share of the misfit that interruptions must account for to be its likely cause."""


def likely_causes(base: "RecordedLoad", off_frac: float) -> list[str]:
    """Return the recorded events that a replay cannot reproduce, as clauses of a sentence.

    Args:
        base: Recorded load.
        off_frac: Misfit of the load's replay, as a share.
    """
    causes = []
    if starved := sum(timeline.starved_steps.len() for timeline in base.timelines):
        causes.append(f"in {starved:,} steps the engine waited for a processor")
    interrupted_us = sum(int(timeline.events.select(LENGTH_US.sum()).item()) for timeline in base.timelines)
    busy_us = sum(timeline.busy_us for timeline in base.timelines)
    if busy_us and interrupted_us / busy_us >= EXPLAINS_FRAC * abs(off_frac):
        causes.append(f"interruptions took {interrupted_us / busy_us:.0%} of the engine's time")
    external = pl.LazyFrame(schema={"external_tokens": pl.Int64})
    brought = sum(
        timeline.lists.get("admitted", external)
        .select((pl.col("external_tokens").fill_null(0) > 0).sum())
        .collect()
        .item()
        for timeline in base.timelines
    )
    if brought:
        causes.append(f"{brought:,} requests got tokens from a KV connector")
    return causes
