"""Spans of time that viewers draw: ``begin_us``, ``end_us``, ``name``, and facts in further columns.

Times are microseconds of the trace's clock.
"""

from collections.abc import Iterator

import polars as pl

from schedtrace.read.trace import Trace
from schedtrace.timeline.chart import per_step
from schedtrace.timeline.timeline import Timeline


def step_spans(timeline: Timeline) -> pl.DataFrame:
    """One row per step, with all of ``chart.per_step``; named by its number and the cause of its end."""
    cause = pl.concat_str(pl.lit(": "), "cause").fill_null("")
    name = pl.concat_str(pl.lit("step "), pl.col("step").cast(pl.String), cause)
    return _whole(per_step(timeline).with_columns(name=name))


def engine_spans(timeline: Timeline, trace: Trace) -> pl.DataFrame:
    """What the thread of vLLM's ``EngineCore`` did, in order of time.

    ``schedule()`` and ``update_from_output()`` of each step; of a rank in lock-step also its dummy batches
    and the all-reduces in which ranks agree on going on.
    """
    steps = timeline.steps
    passes = ("wave", "step_counter")
    spans = pl.concat(
        [
            _spans(steps, "schedule()", pl.col("start_us"), pl.col("schedule_us"), "step"),
            _spans(steps, "update_from_output()", pl.col("output_us"), pl.col("update_us"), "step"),
            _spans(trace.dummies, "dummy batch", pl.col("began_us"), pl.col("took_us"), *passes),
            _spans(trace.syncs, "ranks agree", pl.col("began_us"), pl.col("took_us"), *passes, "wave_ended"),
        ],
        how="diagonal_relaxed",
    ).sort("begin_us", maintain_order=True)
    # A thread does one thing at a time, but times are rounded to microseconds. In a simulation's virtual time
    # a dummy batch may last beyond the all-reduce after it: that is no rounding, and gets a track of its own.
    after = pl.col("begin_us").shift(-1)
    return spans.with_columns(end_us=pl.when(pl.col("end_us") - after == 1).then(after).otherwise("end_us"))


def execution_spans(timeline: Timeline) -> pl.DataFrame:
    """When the worker that answers executed each step; no row where the record has no clock of it."""
    began = pl.col("start_us") + pl.col("execute_after_us")
    tokens = ("decode_tokens", "prefill_tokens")
    return _spans(timeline.steps, "execute", began, pl.col("execute_us"), "step", *tokens).sort("begin_us")


def request_spans(timeline: Timeline) -> pl.DataFrame:
    """``timeline.request_states``, requests in order of arrival; named by state and cause."""
    state = pl.col("state").replace({"front_end": "front end"})
    cause = pl.concat_str(pl.lit(": "), "cause").fill_null("")
    return (
        timeline.request_states.with_columns(came_us=pl.col("begin_us").min().over("request_id"))
        .sort("came_us", "request_id", "begin_us", maintain_order=True)
        .with_columns(name=pl.concat_str(state, cause))
        .drop("came_us", "engine_rank", "state")
    )


def in_lanes(spans: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Spans in as few parts as needed so that none of a part overlap; at least one part.

    Steps overlap under asynchronous scheduling. On one track viewers would nest one in the other.
    """
    free_us: list[int] = []
    lanes: list[int] = []
    for begin_us, end_us in spans.select("begin_us", "end_us").iter_rows():
        lane = next((lane for lane, us in enumerate(free_us) if us <= begin_us), len(free_us))
        free_us[lane : lane + 1] = [end_us]
        lanes.append(lane)
    of_lane = pl.Series(lanes, dtype=pl.Int64)
    for lane in range(max(1, len(free_us))):
        yield spans.filter(of_lane == lane)


def _spans(frame: pl.DataFrame, name: str, begin: pl.Expr, took: pl.Expr, *facts: str) -> pl.DataFrame:
    return _whole(frame.select(*facts, name=pl.lit(name), begin_us=begin, end_us=begin + took))


def _whole(spans: pl.DataFrame) -> pl.DataFrame:
    """Those that have both times: a foreign log or a damaged line may lack one."""
    return spans.filter(pl.col("end_us") >= pl.col("begin_us"))
