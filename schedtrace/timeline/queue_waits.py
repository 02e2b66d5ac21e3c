"""The waiting queue, reconstructed from the trace alone: who waited in which steps, and for how many tokens.

A request waits from the step in whose line it arrived until the step that schedules it, and again from the
step that preempts it, or that finds it set aside. Checked against the counts that the recorder took from
vLLM: ``mismatches``.
"""

import polars as pl

from schedtrace.timeline.timeline import Timeline

NEVER = 2**62
"""``left_step`` of a wait that lasts to the end of the trace."""


def waits(timeline: Timeline) -> pl.DataFrame:
    """One row per time that a request waited.

    Columns: ``request_id``, ``trial``, ``since_step`` (the first step after which it still waited, if it was
    not scheduled in that step at once), ``left_step`` (the step that scheduled it, or the first one after it
    was aborted; it waits after every step ``since_step <= n < left_step``), ``wanted_tokens``, ``preempted``
    (it waited because it had lost its blocks), ``set_aside`` (its scheduler had taken it out of the running
    ones, its blocks kept), ``priority`` and ``order``, its place among those who wait: preempted requests
    come before new ones, the last victim first; under priority, priority comes first. A queue that is not
    vLLM's has an order of its own (``Header.foreign_queues``).
    """
    came = _arrivals(timeline)
    entries = pl.concat([came, _preemptions(timeline, came), _set_aside(timeline, came)]).sort(
        "request_id", "since_step", maintain_order=True
    )
    ran = pl.col("step").is_in(after_gaps(timeline).implode())
    scheduled = (
        pl.concat([timeline.admitted, timeline.requests_of(ran & (pl.col("phase") == "running"))])
        .select("request_id", pl.col("step").cast(pl.Int64).alias("scheduled_step"))
        .sort("scheduled_step")
    )
    ended = _ends(timeline)
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
    by_priority = timeline.header.scheduler_config.get("policy") == "priority"
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


def after_gaps(timeline: Timeline) -> pl.Series:
    """Numbers of the steps before which one is missing: who runs in them may have been admitted before."""
    number = timeline.steps["step"].cast(pl.Int64)
    follows = number == number.shift(1) + 1
    return number.filter(~follows.fill_null(timeline.header.first_step == 0))


def waiting_after(waited: pl.DataFrame, step: int) -> pl.DataFrame:
    """Those of ``timeline.waits`` who still waited after a step, in the order of the queue."""
    return waited.filter((pl.col("since_step") <= step) & (step < pl.col("left_step"))).sort("order")


def mismatches(timeline: Timeline) -> pl.DataFrame:
    """Steps after which another number waited: ``step``, ``recorded``, ``reconstructed``."""
    changes = pl.concat(
        [
            timeline.waits.select(pl.col("since_step").alias("step"), pl.lit(1).alias("change")),
            timeline.waits.select(pl.col("left_step").alias("step"), pl.lit(-1).alias("change")),
        ]
    )
    counted = (
        changes.group_by("step")
        .agg(pl.col("change").sum())
        .sort("step")
        .with_columns(n=pl.col("change").cum_sum())
    )
    return (
        timeline.steps.select(pl.col("step").cast(pl.Int64), pl.col("num_waiting_after").alias("recorded"))
        .sort("step")
        .join_asof(counted.select("step", pl.col("n").alias("reconstructed")), on="step")
        .with_columns(pl.col("reconstructed").fill_null(0).cast(pl.Int64))
        .filter(pl.col("recorded") != pl.col("reconstructed"))
    )


def _arrivals(timeline: Timeline) -> pl.DataFrame:
    """Requests that came, with the first step that could have scheduled them."""
    began = timeline.steps.select("start_us", pl.col("step").cast(pl.Int64).alias("next_step")).sort(
        "start_us"
    )
    by_arrival = timeline.header.scheduler_config.get("policy") == "priority"
    return (
        timeline.arrivals.filter(~pl.col("streaming_update"))
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


def _preemptions(timeline: Timeline, came: pl.DataFrame) -> pl.DataFrame:
    """Requests that were put back: they want all they had computed and the token sampled after it."""
    about = came.select("request_id", pl.col("wanted_tokens").alias("prompt"), "priority", "place")
    by_arrival = timeline.header.scheduler_config.get("policy") == "priority"
    return (
        timeline.preemptions.with_row_index("at")
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


def _set_aside(timeline: Timeline, came: pl.DataFrame) -> pl.DataFrame:
    """Requests that their scheduler took out of the running ones: what they had computed is not lost."""
    about = came.select("request_id", "priority", "place").unique("request_id", keep="first")
    return timeline.set_aside.join(about, on="request_id", how="left", maintain_order="left").select(
        "request_id",
        "trial",
        pl.col("step").alias("since_step"),
        "wanted_tokens",
        pl.lit(value=False).alias("preempted"),
        pl.lit(value=True).alias("set_aside"),
        pl.col("priority").fill_null(0),
        pl.col("place").fill_null(0),
    )


def overtakings(timeline: Timeline) -> int:
    """How many requests were first scheduled before an earlier arrival that had not left either."""
    came = timeline.arrivals.filter(~pl.col("streaming_update")).unique("request_id", keep="first")
    scheduled = timeline.admitted.group_by("request_id").agg(first=pl.col("step").cast(pl.Int64).min())
    left = pl.min_horizontal("first", "ended_step").fill_null(NEVER)
    rows = (
        came.select("request_id", "queued_us")
        .join(scheduled, on="request_id", how="left")
        .join(_ends(timeline), on="request_id", how="left")
        .sort("queued_us", maintain_order=True)
        .with_columns(earlier_left=left.cum_max().shift(1).fill_null(0))
    )
    return rows.filter(pl.col("first") < pl.col("earlier_left")).height


def _ends(timeline: Timeline) -> pl.DataFrame:
    """The first step after each request was gone."""
    began = timeline.steps.select("start_us", pl.col("step").cast(pl.Int64).alias("next_step")).sort(
        "start_us"
    )
    return (
        timeline.finishes.sort("finished_us")
        .join_asof(
            began, left_on="finished_us", right_on="start_us", strategy="forward", check_sortedness=False
        )
        .select("request_id", pl.coalesce(pl.col("step").cast(pl.Int64), "next_step").alias("ended_step"))
        .unique("request_id", keep="last")
    )


def _place(at: pl.Expr) -> pl.Expr:
    return at.cast(pl.Int64).alias("place")
