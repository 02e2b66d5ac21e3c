"""Bounds on a predicted output rate, from the recorded use of processors by front end and clients.

Front end and clients are not replayed. A server's front end detokenizes and streams every token, and its
clients receive them; on a small machine, both take processors from the engine.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from schedtrace.diagnose.rules.front_end import STARVED_FRAC, is_offline
from schedtrace.model.what_if import Figure
from schedtrace.timeline.step_time import FEWEST_STEPS
from schedtrace.timeline.timeline import Timeline


@dataclass(frozen=True)
class Processors:
    """Usage of processors beside a server's engine."""

    most_output: int
    """Maximum number of output tokens in a second."""
    waited_frac: float | None = None
    """Largest share of its ready time in which a front end's main thread waited for a processor; None: not
    recorded."""
    ran_frac: float | None = None
    """Largest share of the time in which a front end's main thread ran; None: not recorded."""

    @property
    def are_short(self) -> bool:
        """Whether the front end waited long for a processor."""
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
    threads = pl.concat(_front_end_threads(timeline) for timeline in timelines)
    if threads.is_empty():
        return Processors(most_output)
    waited, ran = threads.select(
        (pl.col("waited_us") / (pl.col("ran_us") + pl.col("waited_us"))).max(),
        (pl.col("ran_us") / pl.col("at_us")).max().alias("ran"),
    ).row(0)
    return Processors(most_output, waited, ran)


def _front_end_threads(timeline: Timeline) -> pl.DataFrame:
    """Return each interval of front ends' main threads in which a step of the engine ended."""
    outputs = timeline.steps.filter(pl.col("total_requests") > 0)["output_us"].drop_nulls().sort()
    seen = timeline.cpu.filter(pl.col("role") == "front_end").sort("at_us")
    seen = seen.with_columns(outputs=outputs.search_sorted(seen["at_us"]).cast(pl.Int64))
    passed = (pl.col(name).diff().over("pid", "tid") for name in ("at_us", "ran_us", "waited_us", "outputs"))
    return (
        seen.select("pid", "tid", *passed)
        .filter(pl.col("outputs") > 0)
        .group_by("pid", "tid", maintain_order=True)
        .sum()
        .filter((pl.col("outputs") >= FEWEST_STEPS) & (pl.col("ran_us") > 0))
    )


def bound_output(figures: Iterable[Figure], processors: Processors) -> None:
    """Bound the output and the makespan of a change, and their intervals.

    If processors were short, there may be none for more output, so the interval begins at most at the highest
    output that front end and clients handled in any second of the recording. It ends at the output at which
    the front end's main thread would run all the time, if each step's output takes as much of its time as
    recorded (with more requests in a step, it takes more).
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
    """Bound a figure and the ends of its interval, by ratios to its present value."""
    if figure.low_frac is not None:
        figure.low_frac = pick(figure.low_frac, low - 1)
    if figure.high_frac is not None:
        figure.high_frac = pick(figure.high_frac, high - 1)
    if figure.change_frac is not None and figure.before is not None:
        figure.change_frac = pick(figure.change_frac, middle - 1)
        figure.value = figure.before * (1 + figure.change_frac)
