"""Times in which the threads that make a step were ready to run and had no processor.

Once a second a trace has how long each thread ran and how long it waited for a processor (``cpu`` lines). A
wait alone costs nothing: vLLM's engine and workers poll for each other's messages, so that one of them waits
while the other works. What is lost is the time in which the thread whose turn it was did not run: the
worker's while the device executed a batch, the engine's between two batches, and never more than it waited.
"""

from collections.abc import Iterable
from typing import NamedTuple

import polars as pl

from schedtrace.timeline.engine_states import BUSY
from schedtrace.timeline.frames import Frames
from schedtrace.timeline.spans import LENGTH_US, overlap_us, time_within

LEAST_FRAC = 0.2
"""Share of the engine's busy time in a second: what is left takes a quarter longer than it needs."""
MOST_OF_IT = 0.5
"""A step is starved if more than half of it lies in such a time."""
FEWEST = 30
"""Steps with processors, and half of all, that it takes to leave the others out of a model of step times."""
DEVICE = "device"
"""The state of ``engine_states`` in which a worker has its turn."""

THREADS = {
    "role": pl.String,
    "pid": pl.Int64,
    "begin_us": pl.Int64,
    "end_us": pl.Int64,
    "ran_us": pl.Int64,
    "waited_us": pl.Int64,
    "lost_us": pl.Int64,
}
STARVED = {"begin_us": pl.Int64, "end_us": pl.Int64, "device_frac": pl.Float64, "host_frac": pl.Float64}


class _Turn(NamedTuple):
    """Times of a thread between two ``cpu`` lines."""

    begin_us: int
    end_us: int
    ran_us: int
    waited_us: int


def thread_times(frames: Frames, engine: pl.DataFrame) -> pl.DataFrame:
    """Return a row per thread of the engine or a worker, and time between two ``cpu`` lines: ``THREADS``.

    ``lost_us``: how much of its turn the thread waited for a processor, at least.

    Args:
        frames: One engine's.
        engine: Its ``engine_states``.
    """
    cpu = frames.cpu.filter(pl.col("role") != "front_end").sort("at_us")
    turns = [
        (role, pid, turn)
        for (role, pid, _), rows in cpu.group_by("role", "pid", "tid", maintain_order=True)
        for turn in _turns(rows.select("at_us", "ran_us", "waited_us").rows())
    ]
    rows = pl.DataFrame(
        [(role, pid, *turn) for role, pid, turn in turns], schema=list(THREADS.items())[:-1], orient="row"
    )
    busy = engine.filter(pl.col("state").is_in(BUSY))
    worked = rows.filter((pl.col("role") == "worker") & (pl.col("ran_us") > 0)).height > 0
    own = pl.when(pl.col("role") == "worker").then("device").otherwise("host" if worked else "all")
    device = pl.col("state") == DEVICE
    mine = time_within(rows, busy, {"device": device, "host": ~device, "all": pl.lit(value=True)})
    missed = rows.hstack(mine).select((own - pl.col("ran_us")).clip(0).alias("us"))["us"]
    return rows.with_columns(lost_us=pl.min_horizontal("waited_us", missed))


def _turns(seen: list[tuple[int, int, int]]) -> Iterable[_Turn]:
    """The times between two lines, in order.

    Linux counts a wait when it is over: what is longer than the time left belongs to the times before.
    """
    later, turns = 0, []
    for (begin, ran, waited), (end, ran_then, waited_then) in zip(seen[-2::-1], seen[:0:-1], strict=True):
        ran_us = min(ran_then - ran, end - begin)
        wait = waited_then - waited + later
        waited_us = min(wait, end - begin - ran_us)
        later = wait - waited_us
        turns.append(_Turn(begin, end, ran_us, waited_us))
    return reversed(turns)


def starved(threads: pl.DataFrame, engine: pl.DataFrame) -> pl.DataFrame:
    """Return the times between two ``cpu`` lines in which the engine lost much of its busy time: ``STARVED``.

    ``device_frac`` and ``host_frac``: what was lost of the device's time and of the host's.

    Args:
        threads: ``thread_times``.
        engine: ``engine_states``.
    """
    if threads.is_empty():
        return pl.DataFrame(schema=STARVED)
    lost = threads.group_by("begin_us", "end_us", maintain_order=True).agg(
        worker=pl.col("lost_us").filter(pl.col("role") == "worker").max().fill_null(0),
        engine=pl.col("lost_us").filter(pl.col("role") == "engine").max().fill_null(0),
    )
    worked = threads.filter((pl.col("role") == "worker") & (pl.col("ran_us") > 0)).height > 0
    busy = engine.filter(pl.col("state").is_in(BUSY))
    device = pl.col("state") == DEVICE
    lost = lost.hstack(time_within(lost, busy, {"device": device, "host": ~device}))
    whole = pl.col("device") + pl.col("host")
    by_engine = pl.col("engine") / ("host" if worked else whole)
    return (
        lost.filter((whole > 0) & (pl.col("worker") + pl.col("engine") >= LEAST_FRAC * whole))
        .select(
            "begin_us",
            "end_us",
            device_frac=pl.col("worker") / pl.col("device") if worked else by_engine,
            host_frac=by_engine,
        )
        .with_columns(pl.col("device_frac", "host_frac").fill_nan(0.0).clip(0.0, 1.0))
        .sort("begin_us")
    )


def starved_steps(frames: Frames, spans: pl.DataFrame) -> pl.Series:
    """Return the numbers of the steps most of which lies in a starved time: they show no usual step time.

    Args:
        frames: One engine's.
        spans: ``starved``.
    """
    if spans.is_empty():
        return pl.Series("step", [], pl.Int64)
    steps = frames.steps.select("step", begin_us="start_us", end_us="output_us").drop_nulls()
    return steps.filter(overlap_us(steps, spans) > MOST_OF_IT * LENGTH_US)["step"]


def unstarved(frames: Frames, starving: pl.Series, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the steps that had processors; all steps where too few of them had.

    Args:
        frames: The engine's trace.
        starving: ``starved_steps``.
        steps: Any rows with a column ``step``.
    """
    if starving.is_empty() or frames.steps.height - starving.len() < max(FEWEST, starving.len()):
        return steps
    return steps.filter(~pl.col("step").is_in(starving.implode()))


def lost_spans(frames: Frames, engine: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the part of each state that was lost, in the columns of ``slow_spans.SCHEMA``.

    Where in a second a thread waited is not recorded: every state of it lost the same share, at its end.

    Args:
        frames: One engine's.
        engine: Its ``engine_states``.
        spans: ``starved``.
    """
    states = engine.filter(pl.col("state").is_in([*BUSY]))
    shares = time_within(states, spans, {"of_device": pl.col("device_frac"), "of_host": pl.col("host_frac")})
    lost = pl.when(pl.col("state") == DEVICE).then("of_device").otherwise("of_host")
    losses = states.hstack(shares).with_columns(lost_us=lost).filter(pl.col("lost_us") > 0)
    starts = frames.steps.select("step", "start_us").sort("start_us")
    return (
        losses.sort("begin_us")
        .join_asof(starts, left_on="begin_us", right_on="start_us")
        .select(
            "trial",
            begin_us=pl.col("end_us") - pl.col("lost_us"),
            end_us="end_us",
            step="step",
            part=pl.col("state").replace("dummy", "host_gap"),
            factor=LENGTH_US / (LENGTH_US - pl.col("lost_us")).clip(1),
        )
        .drop_nulls("step")
    )


def starved_threads(threads: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the threads that lost time in starved times, the one that lost most first.

    Columns: ``role``, ``pid``, ``us`` (how long these times were), ``ran_us``, ``waited_us``, ``lost_us``.

    Args:
        threads: ``thread_times``.
        spans: ``starved``.
    """
    return (
        threads.join(spans, on=["begin_us", "end_us"], how="semi")
        .with_columns(us=LENGTH_US)
        .group_by("role", "pid", maintain_order=True)
        .agg(pl.col("us", "ran_us", "waited_us", "lost_us").sum())
        .filter(pl.col("lost_us") > 0)
        .sort("lost_us", descending=True, maintain_order=True)
    )
