"""Figures of a prediction: those that scheduling determines, and times with intervals.

An interval covers the error of the fit, the drift between trials, another start of the engine, and steps
outside the recorded range. This module also bounds the output rate by the processor time that front end and
clients used in the recording, and judges the misfit of the unchanged replay.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl
from scipy import stats

from schedtrace.compare.metric_changes import METRICS as COMPARED
from schedtrace.compare.metric_changes import Metric
from schedtrace.diagnose.rules.front_end import STARVED_FRAC, is_offline
from schedtrace.model.report import TrialReport
from schedtrace.model.trace import Header
from schedtrace.model.what_if import Figure
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.timeline.step_time import FEWEST_STEPS
from schedtrace.timeline.timeline import Timeline

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


DECIDED = (
    DecidedMetric("steps", "", None, lambda _, steps: steps.height),
    DecidedMetric("requests a step", "", None, lambda _, steps: _mean(steps, "total_requests"), False),
    DecidedMetric("waiting requests", "", False, lambda _, steps: _mean(steps, "num_waiting_after"), False),
    DecidedMetric(
        "preemptions",
        "",
        False,
        lambda timeline, steps: timeline.preemptions.join(steps, on="step", how="semi").height,
    ),
    DecidedMetric(
        "recomputed tokens", "", False, lambda _, steps: float(steps["recomputed_tokens"].sum() or 0)
    ),
)


def decided_figures(before: Sequence[Timeline], after: Sequence[Timeline]) -> list[Figure]:
    """Return the figures of two runs (lists of ranks) that scheduling determines, as means over trials."""
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
        spread: Ratios that resampled step times predict, by metric.
        bound: Trials as replayed with the change, without economies of scale in steps larger than recorded.
            The true ratio lies between those of ``changed`` and ``bound``; the estimate is their geometric
            mean.
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
    """Return the composition of each step, by rank, trial and number of the step within the trial."""
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


COVERAGE = 0.9
RESTARTED_CPU = 0.1
"""Standard deviation of log(a / b), where a and b are times of the same steps in two starts of a CPU engine.

This value was measured. On an H100, it is 0.002, which is left out: ``docs/what-if.md``, "Another start of
the engine".
"""


def restart_factor(header: Header, seed: int) -> float:
    """Return the factor of step times after another start of the engine: a deviation up or down, in turn.

    A recording of a single start cannot show this factor.

    Args:
        header: Header of the engine's trace.
        seed: Number of the replay.
    """
    if header.device != "cpu" or header.clock == "virtual":
        return 1.0
    return math.exp(RESTARTED_CPU if seed % 2 else -RESTARTED_CPU)


def ratio_interval(
    ratio: float, resampled: list[float], was: list[float], replayed: list[float]
) -> tuple[float | None, float | None]:
    """Return the 90 % interval of a ratio minus 1.

    The variance of the ratio's logarithm is that of the resampled fits, plus twice that of the drift: the
    spread over trials of log(recorded / replayed). The changed run will be another start of the engine, which
    differs at least as much as one trial from another; more trials do not reduce this. The interval uses
    Student's t with the trials' degrees of freedom. The drift includes the square of the replays' mean error.
    """
    trials = min(len(was), len(replayed))
    if len(resampled) < 2 or not trials:  # noqa: PLR2004  # for a spread
        return None, None
    variance = statistics.variance(map(math.log, resampled)) + 2 * drift(was, replayed)
    deviation = math.sqrt(variance)
    width = float(stats.t.ppf((1 + COVERAGE) / 2, max(trials - 1, 3))) * deviation
    return ratio * math.exp(-width) - 1, ratio * math.exp(width) - 1


def drift(recorded: Sequence[float], replayed: Sequence[float]) -> float:
    """Return the variance of the trials' misfits (log ratios) plus the square of their mean."""
    off = [math.log(was / ours) for was, ours in zip(recorded, replayed, strict=False)]
    spread = statistics.variance(off) if len(off) > 1 else 0.0
    return spread + statistics.fmean(off) ** 2


def with_leaned(
    ratio: float, interval: tuple[float | None, float | None], leaned: Sequence[float]
) -> tuple[float | None, float | None]:
    """Return the interval of a ratio minus 1, widened by the error of steps outside the recorded range.

    On either side, the widths add as independent errors do: as the root of the sum of their squares.

    Args:
        ratio: Ratio that the fit gives.
        interval: Interval of the ratio from all other errors.
        leaned: Ratios if the steps outside the recorded range take the shortest and the longest time within
            their interval.
    """
    high = interval[1]
    if high is None:
        return interval
    width = math.log((1 + high) / ratio)
    below, above = (
        math.hypot(width, max([0.0, *(sign * math.log(end / ratio) for end in leaned)])) for sign in (-1, 1)
    )
    return ratio * math.exp(-below) - 1, ratio * math.exp(above) - 1


@dataclass(frozen=True)
class Processors:
    """Usage of processors by the front end and the clients of a server's engine.

    Front end and clients are not replayed. A server's front end detokenizes and streams every token, and its
    clients receive them; on a small machine, both take processors from the engine.
    """

    most_output: int
    """Maximum number of output tokens in a second."""
    waited_frac: float | None = None
    """Largest share of its ready time in which a front end's main thread waited for a processor; None: not
    recorded."""
    ran_frac: float | None = None
    """Largest share of the time in which a front end's main thread ran; None: not recorded."""

    @property
    def are_short(self) -> bool:
        """Whether the front end waited for a processor in a large share of its ready time."""
        return self.waited_frac is not None and self.waited_frac >= STARVED_FRAC


def recorded_processors(timelines: Sequence[Timeline]) -> Processors | None:
    """Return the recorded usage of processors; None without an API server, or in virtual time."""
    if timelines[0].header.clock == "virtual" or any(is_offline(timeline) for timeline in timelines):
        return None
    second = (pl.col("output_us") // 1_000_000).alias("second")
    steps = pl.concat(timeline.steps["output_us", "decode_tokens"] for timeline in timelines)
    each = steps.drop_nulls("output_us").group_by(second).agg(pl.col("decode_tokens").sum())
    most_output = int(each["decode_tokens"].max() or 0)  # type: ignore[arg-type]  # of integers
    if not most_output:
        return None
    main_threads = []
    for timeline in timelines:
        outputs = timeline.steps.filter(pl.col("total_requests") > 0)["output_us"].drop_nulls().sort()
        seen = timeline.cpu.filter(pl.col("role") == "front_end").sort("at_us")
        seen = seen.with_columns(outputs=outputs.search_sorted(seen["at_us"]).cast(pl.Int64))
        columns = ("at_us", "ran_us", "waited_us", "outputs")
        passed = (pl.col(name).diff().over("pid", "tid") for name in columns)
        main_threads.append(
            seen.select("pid", "tid", *passed)
            .filter(pl.col("outputs") > 0)  # intervals in which a step of the engine ended
            .group_by("pid", "tid", maintain_order=True)
            .sum()
            .filter((pl.col("outputs") >= FEWEST_STEPS) & (pl.col("ran_us") > 0))
        )
    threads = pl.concat(main_threads)
    if threads.is_empty():
        return Processors(most_output)
    waited, ran = threads.select(
        (pl.col("waited_us") / (pl.col("ran_us") + pl.col("waited_us"))).max(),
        (pl.col("ran_us") / pl.col("at_us")).max().alias("ran"),
    ).row(0)
    return Processors(most_output, waited, ran)


def bound_output(figures: Iterable[Figure], processors: Processors) -> None:
    """Bound the output and the makespan of a change, and their intervals.

    If processors were short, none may be left for more output, so the lower end of the interval is at most
    the highest output that front end and clients handled in any second of the recording. The upper end is at
    most the output at which the front end's main thread would run all the time, if each step's output took as
    much of that thread's time as recorded (with more requests in a step, it takes more).
    """
    by_name = {figure.name: figure for figure in figures}
    output, makespan, steps = (by_name.get(name) for name in ("output", "makespan", "steps"))
    if output is None or not output.before:
        return
    shown = most = math.inf
    if processors.are_short:
        shown = max(1.0, processors.most_output / output.before)
    if processors.ran_frac:
        fewer = steps.value / steps.before if steps and steps.value and steps.before else 1.0
        most = max(1.0, 1 / (processors.ran_frac * min(fewer, 1.0)))
    least = min(shown, most)
    _bound(output, min, least, most, most)
    if makespan is not None:
        _bound(makespan, max, 1 / most, 1 / most, 1 / least)


def _bound(
    figure: Figure, pick: Callable[[float, float], float], low: float, middle: float, high: float
) -> None:
    """Bound a figure and the ends of its interval, by ratios to its value before the change."""
    if figure.low_frac is not None:
        figure.low_frac = pick(figure.low_frac, low - 1)
    if figure.high_frac is not None:
        figure.high_frac = pick(figure.high_frac, high - 1)
    if figure.change_frac is not None and figure.before is not None:
        figure.change_frac = pick(figure.change_frac, middle - 1)
        figure.value = figure.before * (1 + figure.change_frac)


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
