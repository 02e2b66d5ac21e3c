"""Every moment of an engine: what it did, whether it was idle, and when it was starved.

With asynchronous scheduling, an engine does several things at a time. In that case the device takes
precedence, because host work that overlaps with it costs nothing.

An engine is starved while the threads that make a step are ready to run but have no processor. Once a second,
a trace records how long each thread ran and how long it waited for a processor (``cpu`` lines). A wait alone
costs nothing: vLLM's engine and workers poll for each other's messages, so one waits while the other works.
The lost time is the time in which the thread whose turn it was did not run: the worker's thread while the
device executed a batch, the engine's between two batches. It never exceeds the time that the thread waited.
"""

from collections.abc import Iterable
from typing import NamedTuple

import polars as pl

from schedtrace.timeline.frames import NOT_RECORDED, EngineFrames
from schedtrace.timeline.spans import LENGTH_US, level, overlap_us, time_within, total_us

DEVICE = "device"
"""State of the engine in which the worker's thread should run; in all others, the engine's thread should."""
BUSY = (DEVICE, "schedule", "update", "dummy", "host_gap")
STATES = (NOT_RECORDED, *BUSY, "idle")
"""States in order of precedence."""
LEAST_FRAC = 0.2
"""Least share of the busy time that is lost in a starved period; the work then takes a quarter longer."""
MOST_OF_IT = 0.5
"""Share of a step that must lie in starved periods for the step to count as starved."""
FEWEST = 30
"""Fewest unstarved steps, at least half of all steps, to which a model of step times is fitted without the
starved ones.
"""


SCHEMA = {
    "engine_rank": pl.Int64,
    "trial": pl.Int64,
    "begin_us": pl.Int64,
    "end_us": pl.Int64,
    "state": pl.String,
}

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


def make_engine_states(frames: EngineFrames, requests: pl.DataFrame) -> pl.DataFrame:
    """Return one row per period in which the engine was in one state, from the first step to the trace's end.

    Args:
        frames: Frames of one engine.
        requests: ``request_states``.

    Columns, in order of time: ``engine_rank``, ``trial`` (of the step before), ``begin_us``, ``end_us``,
    ``state``:

    * ``device``: a worker executed a batch. If the trace lacks the worker's clock, this is the time from the
      moment at which the batch could begin (``schedule()`` had returned, the previous output was back) to its
      output,
    * ``schedule`` and ``update``: vLLM's ``schedule()`` and ``update_from_output()`` ran,
    * ``dummy``: a dummy batch ran, only because other data-parallel ranks have work. A trace records how long
      these took but not when, so they are placed right before the step that reports them,
    * ``host_gap``: requests were in the scheduler, and none of the above ran,
    * ``idle``: no request was in the scheduler,
    * ``not_recorded``: steps or parts of the trace are missing.
    """
    began = frames.steps.select(pl.col("start_us").min()).item()
    if began is None:
        return pl.DataFrame(schema=SCHEMA)
    unknown = _spans(frames.gaps, NOT_RECORDED, pl.col("from_us"), pl.col("to_us"))
    doing = (
        pl.concat([unknown, *_work(frames), _presence(requests)])
        .filter(LENGTH_US > 0)
        .with_columns(pl.col("begin_us", "end_us").clip(began, frames.end_us))
    )
    counts = level(doing, **{kind: (pl.col("kind") == kind).cast(pl.Int64) for kind in STATES[:-1]})
    state = pl.lit("idle")
    for kind in reversed(STATES[:-1]):
        state = pl.when(pl.col(kind) > 0).then(pl.lit(kind)).otherwise(state)
    spans = (
        counts.select(begin_us="at", end_us=pl.col("until").fill_null(frames.end_us), state=state)
        .filter(LENGTH_US > 0)
        .group_by(pl.col("state").rle_id().alias("run"), maintain_order=True)
        .agg(pl.col("begin_us", "state").first(), pl.col("end_us").last())
    )
    trials = frames.steps[["start_us", "trial"]].sort("start_us")
    return (
        spans.sort("begin_us")
        .join_asof(trials, left_on="begin_us", right_on="start_us")
        .select(pl.lit(frames.rank, pl.Int64).alias("engine_rank"), "trial", "begin_us", "end_us", "state")
    )


def _work(frames: EngineFrames) -> list[pl.DataFrame]:
    """Return the periods of each ``kind`` of the engine's work: ``begin_us`` and ``end_us``."""
    steps, done = frames.steps, pl.col("start_us") + pl.col("schedule_us")
    return [
        device_spans(steps).select("begin_us", "end_us", kind=pl.lit(DEVICE)),
        _spans(steps, "schedule", pl.col("start_us"), done),
        _spans(steps, "update", pl.col("output_us"), pl.col("output_us") + pl.col("update_us")),
        _spans(steps, "dummy", pl.col("start_us") - pl.col("dummy_us"), pl.col("start_us")),
    ]


def device_spans(steps: pl.DataFrame) -> pl.DataFrame:
    """Return ``step``, ``begin_us`` and ``end_us`` of each batch on the device; batches may overlap."""
    done = pl.col("start_us") + pl.col("schedule_us")
    before = pl.col("output_us").cum_max().shift(1).fill_null(0)
    executed = pl.col("start_us") + pl.col("execute_after_us")
    begin = pl.coalesce(executed, pl.max_horizontal(done, before))
    end = pl.coalesce(executed + pl.col("execute_us"), "output_us")
    spans = steps.with_columns(begin_us=begin.cast(pl.Int64), end_us=end.cast(pl.Int64))
    return spans.filter((pl.col("total_requests") > 0) & (LENGTH_US > 0))[["step", "begin_us", "end_us"]]


def _presence(requests: pl.DataFrame) -> pl.DataFrame:
    """Return each request's time in the scheduler; the parts that no work covers are ``host_gap``."""
    states = requests.filter(pl.col("state") != "front_end")
    lives = states.group_by("request_id").agg(pl.col("begin_us").min(), pl.col("end_us").max())
    return _spans(lives, "host_gap", pl.col("begin_us"), pl.col("end_us"))


def _spans(frame: pl.DataFrame, kind: str, begin: pl.Expr, end: pl.Expr) -> pl.DataFrame:
    """Return ``begin_us``, ``end_us`` and this ``kind`` for each row; an end that is not known is null."""
    return frame.select(begin_us=begin.cast(pl.Int64), end_us=end.cast(pl.Int64), kind=pl.lit(kind))


def engine_busy_us(engine: pl.DataFrame) -> int:
    """Return the total time of all ``engine_states`` except ``idle``, in microseconds."""
    return total_us(engine.filter(pl.col("state").is_in(BUSY)))


def with_engine_time(states: pl.DataFrame, engine: pl.DataFrame) -> pl.DataFrame:
    """Add the engine's time in each row of ``request_states``: ``device_us``, ``host_us`` and ``idle_us``.

    ``host_us`` is the time of the busy states other than ``device``. Time before the first step and time that
    is ``not_recorded`` is in none of the three.
    """
    kinds = {"device_us": ["device"], "idle_us": ["idle"], "host_us": [*set(BUSY) - {"device"}]}
    spent = time_within(states, engine, {name: pl.col("state").is_in(of) for name, of in kinds.items()})
    return states.with_columns(spent)


class _Turn(NamedTuple):
    """Times of a thread between two ``cpu`` lines."""

    begin_us: int
    end_us: int
    ran_us: int
    waited_us: int


def thread_times(frames: EngineFrames, engine: pl.DataFrame) -> pl.DataFrame:
    """Return one row per thread and interval between two ``cpu`` lines, with the columns ``THREADS``.

    Threads are those of the engine and its workers. ``lost_us`` is a lower bound on the time for which the
    thread waited for a processor while it had work to do.

    Args:
        frames: Frames of one engine.
        engine: ``engine_states`` of the engine.
    """
    cpu = frames.cpu
    if not cpu.is_empty():
        cpu = cpu.filter(pl.col("role") != "front_end").sort("at_us")
    if cpu.is_empty():
        return pl.DataFrame(schema=THREADS)
    turns = [
        (rows["role"][0], rows["pid"][0], turn)
        for rows in cpu.partition_by("role", "pid", "tid", maintain_order=True)
        for turn in _turns(rows[["at_us", "ran_us", "waited_us"]].rows())
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
    """Return the periods of a thread between two ``cpu`` lines, in order.

    Linux counts a wait when it is over, so the part of a wait that exceeds the remaining time belongs to
    earlier periods.
    """
    later, turns = 0, []
    for (begin, ran, waited), (end, ran_then, waited_then) in zip(seen[-2::-1], seen[:0:-1], strict=True):
        ran_us = min(ran_then - ran, end - begin)
        wait = waited_then - waited + later
        waited_us = min(wait, end - begin - ran_us)
        later = wait - waited_us
        turns.append(_Turn(begin, end, ran_us, waited_us))
    return reversed(turns)


def make_starved(threads: pl.DataFrame, engine: pl.DataFrame) -> pl.DataFrame:
    """Return the periods in which the engine lost much of its busy time: ``STARVED``.

    ``device_frac`` and ``host_frac``: the lost shares of the device's time and of the host's time.

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


def make_starved_steps(frames: EngineFrames, spans: pl.DataFrame) -> pl.Series:
    """Return the steps that lie mostly in starved periods, and whose times are therefore not typical.

    Args:
        frames: Frames of one engine.
        spans: ``starved``.
    """
    if spans.is_empty():
        return pl.Series("step", [], pl.Int64)
    steps = frames.steps.select("step", begin_us="start_us", end_us="output_us").drop_nulls()
    return steps.filter(overlap_us(steps, spans) > MOST_OF_IT * LENGTH_US)["step"]


def unstarved(frames: EngineFrames, starving: pl.Series, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the steps that were not starved; all steps if these are too few.

    Args:
        frames: The engine's trace.
        starving: ``starved_steps``.
        steps: Any rows with a column ``step``.
    """
    if starving.is_empty() or frames.steps.height - starving.len() < max(FEWEST, starving.len()):
        return steps
    return steps.filter(~pl.col("step").is_in(pl.lit(starving).implode()))


def lost_spans(frames: EngineFrames, engine: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the lost part of each state, in the columns of ``slow_spans.SCHEMA``.

    The trace records only how long a thread waited in each second, not when. The same share of each state in
    that second therefore counts as lost, and is placed at the end of the state. In a window, ``step`` is null
    if the step began before the window.

    Args:
        frames: Frames of one engine.
        engine: ``engine_states`` of the engine.
        spans: ``starved``.
    """
    states = engine.filter(pl.col("state").is_in([*BUSY]))
    shares = time_within(states, spans, {"of_device": pl.col("device_frac"), "of_host": pl.col("host_frac")})
    lost = pl.when(pl.col("state") == DEVICE).then("of_device").otherwise("of_host")
    losses = states.hstack(shares).with_columns(lost_us=lost).filter(pl.col("lost_us") > 0)
    starts = frames.steps[["step", "start_us"]].sort("start_us")
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
    )


def starved_threads(threads: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the threads that lost time in starved periods, in descending order of lost time.

    Columns: ``role``, ``pid``, ``us`` (length of these periods), ``ran_us``, ``waited_us``, ``lost_us``.

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
