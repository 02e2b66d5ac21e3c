"""The waiting queue, reconstructed from the trace alone: who waited in which steps, and for how many tokens.

A request waits from the step in whose line it arrived until the step that schedules it, and again from the
step that preempts it, or that finds it set aside. Checked against the counts that the recorder took from
vLLM: ``mismatches``.
"""

import polars as pl

from schedtrace.timeline.frames import Frames, computed_once
from schedtrace.timeline.spans import at_steps, level

NEVER = 2**62
"""``left_step`` of a wait that lasts to the end of the trace."""


@computed_once
def waits(frames: Frames) -> pl.DataFrame:
    """One row per time that a request waited.

    Columns: ``request_id``, ``trial``, ``since_step`` (the first step after which it still waited, if it was
    not scheduled in that step at once), ``left_step`` (the step that scheduled it, or the first one after it
    was aborted; it waits after every step ``since_step <= n < left_step``), ``wanted_tokens``, ``preempted``
    (it waited because it had lost its blocks), ``set_aside`` (its scheduler had taken it out of the running
    ones, its blocks kept), ``priority`` and ``order``, its place among those who wait: preempted requests
    come before new ones, the last victim first; under priority, priority comes first. A queue that is not
    vLLM's has an order of its own (``Header.foreign_queues``).
    """
    came = _arrivals(frames)
    entries = pl.concat([came, _preemptions(frames, came), _set_aside(frames, came)]).sort(
        "request_id", "since_step", maintain_order=True
    )
    ran = pl.col("step").is_in(after_gaps(frames).implode())
    scheduled = (
        pl.concat([frames.admitted, frames.requests_of(ran & (pl.col("phase") == "running"))])
        .select("request_id", pl.col("step").cast(pl.Int64).alias("scheduled_step"))
        .sort("scheduled_step")
    )
    ended = _ends(frames)
    joined = (
        entries.sort("since_step")
        .join_asof(
            scheduled,
            left_on="since_step",
            right_on="scheduled_step",
            by="request_id",
            strategy="forward",
            allow_exact_matches=True,
            check_sortedness=False,
        )
        .join(ended, on="request_id", how="left", maintain_order="left")
    )
    left = pl.min_horizontal(pl.col("scheduled_step"), pl.col("ended_step")).fill_null(NEVER)
    by_priority = frames.header.scheduler_config.get("policy") == "priority"
    first = pl.col("priority") if by_priority else pl.col("preempted").not_()
    return (
        joined.with_columns(left_step=left)
        .filter(pl.col("left_step") > pl.col("since_step"))
        .sort(first, "place", "request_id")
        .with_row_index("order")
        .select(
            "request_id",
            "trial",
            "since_step",
            "left_step",
            "wanted_tokens",
            "preempted",
            "set_aside",
            "priority",
            "order",
        )
    )


def after_gaps(frames: Frames) -> pl.Series:
    """Numbers of the steps before which one is missing: who runs in them may have been admitted before."""
    number = frames.steps["step"].cast(pl.Int64)
    follows = number == number.shift(1) + 1
    return number.filter(~follows.fill_null(frames.header.first_step == 0))


def waiting_after(waited: pl.DataFrame, step: int) -> pl.DataFrame:
    """Those of ``timeline.waits`` who still waited after a step, in the order of the queue."""
    return waited.filter((pl.col("since_step") <= step) & (step < pl.col("left_step"))).sort("order")


def mismatches(frames: Frames) -> pl.DataFrame:
    """Steps after which another number waited: ``step``, ``recorded``, ``reconstructed``."""
    counted = level(waits(frames), "since_step", "left_step", reconstructed=1)
    recorded = frames.steps.select("step", recorded="num_waiting_after")
    return at_steps(counted, recorded).filter(pl.col("recorded") != pl.col("reconstructed"))


def _arrivals(frames: Frames) -> pl.DataFrame:
    """Requests that came, with the first step that could have scheduled them."""
    began = frames.steps.select("start_us", pl.col("step").cast(pl.Int64).alias("next_step")).sort("start_us")
    by_arrival = frames.header.scheduler_config.get("policy") == "priority"
    return (
        frames.arrivals.filter(~pl.col("streaming_update"))
        .sort("queued_us", maintain_order=True)
        .join_asof(
            began, left_on="queued_us", right_on="start_us", strategy="forward", check_sortedness=False
        )
        .with_row_index("at")
        .select(
            "request_id",
            "trial",
            pl.coalesce(pl.col("step").cast(pl.Int64), "next_step").alias("since_step"),
            pl.col("prompt_tokens").alias("wanted_tokens"),
            pl.lit(value=False).alias("preempted"),
            pl.lit(value=False).alias("set_aside"),
            "priority",
            pl.coalesce("arrived_us", "queued_us").alias("place") if by_arrival else _place(pl.col("at")),
        )
        .drop_nulls("since_step")
    )


def _preemptions(frames: Frames, came: pl.DataFrame) -> pl.DataFrame:
    """Requests that were put back: they want all they had computed and the token sampled after it."""
    about = came.select("request_id", pl.col("wanted_tokens").alias("prompt"), "priority", "place")
    by_arrival = frames.header.scheduler_config.get("policy") == "priority"
    return (
        frames.preemptions.with_row_index("at")
        .join(about.unique("request_id", keep="first"), on="request_id", how="left", maintain_order="left")
        .select(
            "request_id",
            "trial",
            pl.col("step").cast(pl.Int64).alias("since_step"),
            pl.max_horizontal(pl.col("lost_tokens") + 1, "prompt").alias("wanted_tokens"),
            pl.lit(value=True).alias("preempted"),
            pl.lit(value=False).alias("set_aside"),
            pl.col("priority").fill_null(0),
            pl.col("place").fill_null(0) if by_arrival else -_place(pl.col("at")),
        )
    )


def _set_aside(frames: Frames, came: pl.DataFrame) -> pl.DataFrame:
    """Requests that their scheduler took out of the running ones: what they had computed is not lost."""
    about = came.select("request_id", "priority", "place").unique("request_id", keep="first")
    return frames.set_aside.join(about, on="request_id", how="left", maintain_order="left").select(
        "request_id",
        "trial",
        pl.col("step").alias("since_step"),
        "wanted_tokens",
        pl.lit(value=False).alias("preempted"),
        pl.lit(value=True).alias("set_aside"),
        pl.col("priority").fill_null(0),
        pl.col("place").fill_null(0),
    )


def overtakings(frames: Frames) -> int:
    """How many requests were first scheduled before an earlier arrival that had not left either."""
    came = frames.arrivals.filter(~pl.col("streaming_update")).unique("request_id", keep="first")
    scheduled = frames.admitted.group_by("request_id").agg(first=pl.col("step").cast(pl.Int64).min())
    left = pl.min_horizontal("first", "ended_step").fill_null(NEVER)
    rows = (
        came.select("request_id", "queued_us")
        .join(scheduled, on="request_id", how="left")
        .join(_ends(frames), on="request_id", how="left")
        .sort("queued_us", maintain_order=True)
        .with_columns(earlier_left=left.cum_max().shift(1).fill_null(0))
    )
    return rows.filter(pl.col("first") < pl.col("earlier_left")).height


def _ends(frames: Frames) -> pl.DataFrame:
    """The first step after each request was gone."""
    began = frames.steps.select("start_us", pl.col("step").cast(pl.Int64).alias("next_step")).sort("start_us")
    return (
        frames.finishes.sort("finished_us")
        .join_asof(
            began, left_on="finished_us", right_on="start_us", strategy="forward", check_sortedness=False
        )
        .select("request_id", pl.coalesce(pl.col("step").cast(pl.Int64), "next_step").alias("ended_step"))
        .unique("request_id", keep="last")
    )


def _place(at: pl.Expr) -> pl.Expr:
    return at.cast(pl.Int64).alias("place")
