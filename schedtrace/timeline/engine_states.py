"""Every moment of an engine, once: what it did, or that it had nothing to do.

An engine that runs ahead (asynchronous scheduling) does several things at a time. Then the device counts
first: host work that hides behind it costs nothing.
"""

import polars as pl

from schedtrace.timeline.frames import Frames
from schedtrace.timeline.spans import LENGTH_US, level, time_within
from schedtrace.timeline.unrecorded import NOT_RECORDED

BUSY = ("device", "schedule", "update", "dummy", "host_gap")
STATES = (NOT_RECORDED, *BUSY, "idle")
"""In the order in which they count."""
SCHEMA = {
    "engine_rank": pl.Int64,
    "trial": pl.Int64,
    "begin_us": pl.Int64,
    "end_us": pl.Int64,
    "state": pl.String,
}


def engine_states(frames: Frames, requests: pl.DataFrame) -> pl.DataFrame:
    """Return one row per time that the engine was in one state, from the first step to the trace's end.

    Args:
        frames: One engine's.
        requests: ``request_states``.

    Columns, in order of time: ``engine_rank``, ``trial`` (of the step before), ``begin_us``, ``end_us``,
    ``state``:

    * ``device``: a worker executed a batch; without its clock in the trace, from when the batch could begin
      (``schedule()`` was done, the output before was back) to its output,
    * ``schedule`` and ``update``: vLLM's ``schedule()`` and ``update_from_output()`` ran,
    * ``dummy``: a batch only to keep other data-parallel ranks company. A trace tells how long these took,
      not when, so they stand right before the step that reports them,
    * ``host_gap``: requests were in the scheduler and nothing of this ran,
    * ``idle``: none were,
    * ``not_recorded``: steps or parts of the trace are missing.
    """
    began = frames.steps.select(pl.col("start_us").min()).item()
    if began is None:
        return pl.DataFrame(schema=SCHEMA)
    unknown = _spans(frames.gaps, NOT_RECORDED, pl.col("from_us"), pl.col("to_us"))
    doing = pl.concat([unknown, _work(frames), _presence(requests)]).with_columns(
        pl.col("begin_us", "end_us").clip(began, frames.end_us)
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
    trials = frames.steps.select("start_us", "trial").sort("start_us")
    return (
        spans.sort("begin_us")
        .join_asof(trials, left_on="begin_us", right_on="start_us")
        .select(pl.lit(frames.rank, pl.Int64).alias("engine_rank"), "trial", "begin_us", "end_us", "state")
    )


def _work(frames: Frames) -> pl.DataFrame:
    """When the engine did each ``kind`` of work: ``begin_us`` and ``end_us``."""
    done = pl.col("start_us") + pl.col("schedule_us")
    before = pl.col("output_us").cum_max().shift(1).fill_null(0)
    executed = pl.col("start_us") + pl.col("execute_after_us")
    steps = frames.steps.with_columns(could_us=pl.coalesce(executed, pl.max_horizontal(done, before)))
    over = pl.coalesce(executed + pl.col("execute_us"), "output_us")
    return pl.concat(
        [
            _spans(steps.filter(pl.col("total_requests") > 0), "device", pl.col("could_us"), over),
            _spans(steps, "schedule", pl.col("start_us"), done),
            _spans(steps, "update", pl.col("output_us"), pl.col("output_us") + pl.col("update_us")),
            _spans(steps, "dummy", pl.col("start_us") - pl.col("dummy_us"), pl.col("start_us")),
        ]
    )


def _presence(requests: pl.DataFrame) -> pl.DataFrame:
    """From when to when each request was in the scheduler: without other work that is ``host_gap``."""
    states = requests.filter(pl.col("state") != "front_end")
    lives = states.group_by("request_id").agg(pl.col("begin_us").min(), pl.col("end_us").max())
    return _spans(lives, "host_gap", pl.col("begin_us"), pl.col("end_us"))


def _spans(frame: pl.DataFrame, kind: str, begin: pl.Expr, end: pl.Expr) -> pl.DataFrame:
    """Of each row whose two ends are known and apart: ``begin_us``, ``end_us`` and this ``kind``."""
    spans = frame.select(begin_us=begin.cast(pl.Int64), end_us=end.cast(pl.Int64), kind=pl.lit(kind))
    return spans.filter(LENGTH_US > 0)


def engine_busy_us(engine: pl.DataFrame) -> int:
    """Return the time of ``engine_states`` without what it was idle, in microseconds."""
    return int(engine.filter(pl.col("state").is_in(BUSY)).select(LENGTH_US.sum()).item())


def with_engine_time(states: pl.DataFrame, engine: pl.DataFrame) -> pl.DataFrame:
    """Rows of ``request_states`` with the engine's time in each: ``device_us``, ``host_us`` and ``idle_us``.

    ``host_us`` is all that is neither the device's nor idle. What lies before the first step is in none of
    them.
    """
    kinds = {"device_us": ["device"], "idle_us": ["idle"], "host_us": [*set(BUSY) - {"device"}]}
    spent = time_within(states, engine, {name: pl.col("state").is_in(of) for name, of in kinds.items()})
    return states.with_columns(spent)
