"""Requests that are ready, since their grammar is compiled or their KV blocks are there, and stay parked."""

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.timeline.request_states import NEXT_STEP, QUEUED
from schedtrace.timeline.timeline import Timeline

FEWEST_STEPS = 10
"""The step after the news promotes a request; one or two more may be under way."""


def ready_but_parked(timeline: Timeline) -> pl.DataFrame:
    """One row per such request and reason, the longest first.

    Columns: ``request_id``, ``trial``, ``cause`` (``grammar_pending`` or ``remote_kv_pending``),
    ``ready_us``, ``parked_us`` (how long it was still in the queue for that cause, or while the engine
    scheduled nothing at all), ``steps``, ``first_step`` and ``last_step`` of that, ``unended`` (no step
    scheduled it later).
    """
    ready = _ready(timeline)
    scheduled = (
        timeline.stretches.select("request_id", "step")
        .collect()
        .join(timeline.steps.select("step", "start_us"), on="step", maintain_order="left")
        .join(ready, on="request_id", maintain_order="left")
        .filter(pl.col("start_us") >= pl.col("ready_us"))
        .group_by("request_id", "own")
        .agg(pl.col("start_us").min().alias("until_us"))
    )
    own = pl.col("cause") == pl.col("own")
    since = pl.when(own).then("ready_us").otherwise(pl.max_horizontal("ready_us", pl.lit(_idle_us(timeline))))
    waits = timeline.request_states.filter(
        pl.col("state").is_in(QUEUED) & (pl.col("cause") != NEXT_STEP) & pl.col("end_step").is_not_null()
    )
    return (
        waits.join(ready, on="request_id", maintain_order="left")
        .join(scheduled, on=["request_id", "own"], how="left", maintain_order="left")
        .with_columns(unended=pl.col("until_us").is_null())
        .with_columns(begin_us=pl.max_horizontal("begin_us", since))
        .filter(
            own | pl.col("unended"),
            pl.col("unended") | (pl.col("begin_us") < pl.col("until_us")),
            pl.col("begin_us") < pl.col("end_us"),
        )
        .pipe(_with_first_step, timeline)
        .group_by("request_id", "own", maintain_order=True)
        .agg(
            pl.col("trial", "ready_us", "unended").first(),
            (pl.col("end_us") - pl.col("begin_us")).sum().alias("parked_us"),
            (pl.col("end_step") - pl.col("first_step") + 1).sum().alias("steps"),
            pl.col("first_step").min(),
            pl.col("end_step").max().alias("last_step"),
        )
        .rename({"own": "cause"})
        .filter(pl.col("steps") >= FEWEST_STEPS)
        .sort("parked_us", descending=True, maintain_order=True)
    )


def _idle_us(timeline: Timeline) -> int:
    """The start of the first step after which nothing was scheduled any more."""
    steps = timeline.steps.select("start_us", "total_requests").sort("start_us")
    working = steps.filter(pl.col("total_requests") > 0)["start_us"].to_list()
    idle = steps.filter(pl.col("start_us") > working[-1]) if working else steps
    return min(idle["start_us"].to_list(), default=timeline.end_us)


def _with_first_step(rows: pl.DataFrame, timeline: Timeline) -> pl.DataFrame:
    """``first_step``: the first one that began after the request was ready."""
    starts = timeline.steps.select("start_us", pl.col("step").cast(pl.Int64).alias("first_step"))
    return rows.sort("begin_us").join_asof(
        starts.sort("start_us"),
        left_on="begin_us",
        right_on="start_us",
        strategy="forward",
        check_sortedness=False,
    )


def _ready(timeline: Timeline) -> pl.DataFrame:
    """``request_id``, ``own`` (the cause that is over) and ``ready_us``."""
    found = [pl.DataFrame(schema={"request_id": pl.String, "own": pl.String, "ready_us": pl.Int64})]
    if "grammars" in timeline.lists:
        compiled = timeline.lists["grammars"].filter(~pl.col("failed"))
        found.append(_latest(compiled, Cause.GRAMMAR_PENDING, "compiled_us"))
    if "kv_loads" in timeline.lists:
        arrived = timeline.lists["kv_loads"].filter(pl.col("event") == "arrived")
        found.append(_latest(arrived, Cause.REMOTE_KV_PENDING, "at_us"))
    return pl.concat(found)


def _latest(rows: pl.LazyFrame, cause: Cause, ready: str) -> pl.DataFrame:
    own = pl.lit(str(cause)).alias("own")
    latest = rows.group_by("request_id").agg(pl.col(ready).max().alias("ready_us"))
    return latest.select("request_id", own, pl.col("ready_us").cast(pl.Int64)).collect()
