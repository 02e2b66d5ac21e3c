"""What a request waited for, time by time that it was in the queue."""

import polars as pl

from schedtrace.explain.rows import RequestRows, Row
from schedtrace.model.causes import Cause
from schedtrace.model.life import Wait, WaitedFor
from schedtrace.timeline.waits import NEVER


def life_waits(rows: RequestRows) -> list[Wait]:
    """Every wait, its parts adding up; the first one also where the first possible step scheduled it."""
    found = [_wait(rows, row) for row in rows.waits]
    first = rows.scheduled[0] if rows.scheduled else None
    queued = rows.queued_us
    if first and queued is not None and (not rows.waits or rows.waits[0]["preempted"]):
        wait_ms = (first["start_us"] - queued) / 1e3
        at_once = Wait(
            since_step=None,
            left_step=first["step"],
            preempted=False,
            wait_ms=wait_ms,
            before_step_ms=wait_ms,
            causes=[],
        )
        return [at_once, *found]
    return found


def _wait(rows: RequestRows, wait: Row) -> Wait:
    steps = rows.timeline.steps.with_columns(next_us=pl.col("start_us").shift(-1)).filter(
        (pl.col("step") >= wait["since_step"]) & (pl.col("step") < wait["left_step"])
    )
    scheduled = next((row for row in rows.scheduled if row["step"] == wait["left_step"]), None)
    end = scheduled["start_us"] if scheduled else rows.end_us
    last = pl.col("next_us").fill_null(pl.col("end_us"))
    until = last if end is None else pl.min_horizontal(last, end)
    skips = rows.timeline.exits.filter(
        (pl.col("request_id") == rows.request_id)
        & (pl.col("loop") == "waiting")
        & (pl.col("kind") == "continue")
    ).select("step", pl.col("cause").alias("own_cause"))
    cause = pl.coalesce("own_cause", "waiting_cause")
    unexplained = cause == str(Cause.QUEUE_EMPTY)  # it waited: an empty queue cannot be why
    timed = (
        steps.join(skips.unique("step", keep="first"), on="step", how="left", maintain_order="left")
        .with_columns(cause=pl.when(unexplained).then(pl.lit(str(Cause.OTHER))).otherwise(cause))
        .with_columns(us=pl.max_horizontal(until - pl.col("start_us"), 0))
    )
    by_cause = (
        timed.group_by("cause", maintain_order=True)
        .agg(pl.len().alias("steps"), (pl.col("us").sum() / 1e3).alias("wait_ms"))
        .sort("wait_ms", descending=True, maintain_order=True)
    )
    before = (
        0 if wait["preempted"] or rows.queued_us is None else max(0, steps["start_us"][0] - rows.queued_us)
    )
    return Wait(
        since_step=wait["since_step"],
        left_step=wait["left_step"] if scheduled and wait["left_step"] != NEVER else None,
        preempted=wait["preempted"],
        wait_ms=before / 1e3 + float(by_cause["wait_ms"].sum()),
        before_step_ms=before / 1e3,
        causes=[WaitedFor(**row) for row in by_cause.to_dicts()],
    )
