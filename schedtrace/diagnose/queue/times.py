"""How long each request waited before it was first scheduled, divided among what it waited for."""

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.timeline.timeline import Timeline
from schedtrace.timeline.waits import waits

NEXT_STEP = "next_step"
"""Not a refusal: until the step began that could see it for the first time."""


def queue_times(timeline: Timeline) -> pl.DataFrame:
    """One row per request that arrived and was scheduled.

    Columns: ``request_id``, ``trial``, ``priority``, ``queued_us``, ``step`` (which scheduled it first) and
    ``queue_us`` (from ``queued_us`` to that step's start).
    """
    first = (
        timeline.admitted.lazy()
        .filter(pl.col("phase") == "new")
        .group_by("request_id")
        .agg(pl.col("step").min())
        .collect()
    )
    return (
        timeline.arrivals.filter(~pl.col("streaming_update"))
        .unique("request_id", keep="first", maintain_order=True)
        .select("request_id", "trial", "priority", "queued_us")
        .join(first, on="request_id", maintain_order="left")
        .join(timeline.steps.select("step", "start_us"), on="step", maintain_order="left")
        .with_columns(queue_us=(pl.col("start_us") - pl.col("queued_us")).clip(0))
        .drop("start_us")
    )


def by_cause(timeline: Timeline, queued: pl.DataFrame) -> pl.DataFrame:
    """One row per request of ``queue_times(timeline)`` and cause: ``request_id``, ``cause``, ``wait_us``.

    Each of a request's waiting steps counts until the next step begins: for the cause with which the step
    skipped it, else for the one that ended the step's waiting loop. What is left, the time before the first
    of these steps, is ``NEXT_STEP``. Per request they add up to ``queue_us``.
    """
    ends = _ends(timeline)
    waited = (
        waits(timeline).filter(~pl.col("preempted")).unique("request_id", keep="first", maintain_order=True)
    )
    spans = queued.join(waited.select("request_id", "since_step"), on="request_id", maintain_order="left")
    refused = _whole_spans(spans, ends)
    moved = _skips(timeline, spans, ends)
    told = pl.concat(
        [
            refused,
            moved.select("request_id", "cause", pl.col("period_us").alias("wait_us")),
            moved.select(
                "request_id", pl.col("end_cause").alias("cause"), (-pl.col("period_us")).alias("wait_us")
            ),
        ]
    )
    rest = (
        queued.join(told.group_by("request_id").agg(pl.col("wait_us").sum()), on="request_id", how="left")
        .with_columns(wait_us=pl.col("queue_us") - pl.col("wait_us").fill_null(0))
        .select("request_id", pl.lit(NEXT_STEP).alias("cause"), "wait_us")
    )
    return (
        pl.concat([told, rest])
        .group_by("request_id", "cause", maintain_order=True)
        .agg(pl.col("wait_us").sum())
        .filter(pl.col("wait_us") != 0)
    )


def _ends(timeline: Timeline) -> pl.DataFrame:
    """Every step's time to the next step, with the cause of whoever it did not skip."""
    unexplained = pl.col("waiting_cause") == str(Cause.QUEUE_EMPTY)
    return timeline.steps.select(
        "step",
        "start_us",
        pl.when(unexplained).then(pl.lit(str(Cause.OTHER))).otherwise("waiting_cause").alias("end_cause"),
        period_us=(pl.col("start_us").shift(-1) - pl.col("start_us")).fill_null(0),
    )


def _whole_spans(spans: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame:
    """The time between two steps, per cause, as the difference of two running sums."""
    rows = []
    for (cause,), of_cause in ends.group_by("end_cause", maintain_order=True):
        running = of_cause.select(pl.col("step").cast(pl.Int64), until_us=pl.col("period_us").cum_sum())
        sums = spans.select("request_id", "since_step", pl.col("step").alias("left_step"))
        for name in ("since_step", "left_step"):
            sums = (
                sums.sort(name)
                .join_asof(
                    running.rename({"until_us": f"{name}_us"}),
                    left_on=name,
                    right_on="step",
                    strategy="backward",
                    allow_exact_matches=False,
                    coalesce=False,
                )
                .drop("step")
            )
        wait_us = pl.col("left_step_us").fill_null(0) - pl.col("since_step_us").fill_null(0)
        rows.append(sums.select("request_id", pl.lit(str(cause)).alias("cause"), wait_us=wait_us))
    empty = pl.DataFrame(schema={"request_id": pl.String, "cause": pl.String, "wait_us": pl.Int64})
    return pl.concat([empty, *rows]).filter(pl.col("wait_us") != 0)


def _skips(timeline: Timeline, spans: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame:
    """Steps that skipped a request by name while it waited to be scheduled first."""
    return (
        timeline.exits.filter((pl.col("loop") == "waiting") & (pl.col("kind") == "continue"))
        .select("step", "request_id", "cause")
        .drop_nulls()
        .unique(["step", "request_id"], keep="last", maintain_order=True)
        .join(spans.select("request_id", "since_step", pl.col("step").alias("left_step")), on="request_id")
        .filter((pl.col("since_step") <= pl.col("step")) & (pl.col("step") < pl.col("left_step")))
        .join(ends, on="step")
    )
