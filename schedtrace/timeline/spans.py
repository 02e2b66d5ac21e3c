"""Sums over spans of time: how much of each lies in others, and over the states of requests."""

import polars as pl

from schedtrace.timeline.pieces import LENGTH_US
from schedtrace.timeline.request_states import NEXT_STEP, QUEUED
from schedtrace.timeline.timeline import Timeline


def time_within(rows: pl.DataFrame, spans: pl.DataFrame, kinds: dict[str, pl.Expr]) -> pl.DataFrame:
    """One row per row of ``rows``: for each kind the microseconds of it that lie in its spans, rounded.

    The time up to a moment is that of the whole spans before it and of a part of one; a row's time is the
    difference between its two ends. So the cost is that of rows plus spans.

    Args:
        rows: With ``begin_us`` and ``end_us``.
        spans: With ``begin_us`` and ``end_us``, which do not overlap each other, and what ``kinds`` reads.
        kinds: Name of a result's column to a condition on ``spans``, or to the share of a span that counts.
    """
    shares = {name: of.cast(pl.Float64).fill_null(0.0) for name, of in kinds.items()}
    sums = spans.sort("begin_us").select(
        "begin_us",
        *(share.alias(f"in_{name}") for name, share in shares.items()),
        *(
            (LENGTH_US * share).cum_sum().shift(1, fill_value=0.0).alias(name)
            for name, share in shares.items()
        ),
        last_us="end_us",
    )

    def until(column: str) -> pl.DataFrame:
        moments = rows.select(moment_us=pl.col(column)).with_row_index("row").sort("moment_us")
        into = pl.min_horizontal("moment_us", "last_us") - pl.col("begin_us")
        return (
            moments.join_asof(sums, left_on="moment_us", right_on="begin_us", coalesce=False)
            .select(
                "row",
                *((pl.col(name) + pl.col(f"in_{name}") * into).fill_null(0.0).alias(name) for name in kinds),
            )
            .sort("row")
            .drop("row")
        )

    begin, end = until("begin_us"), until("end_us")
    return pl.DataFrame([(end[name] - begin[name]).round().cast(pl.Int64) for name in kinds])


def until(rows: pl.DataFrame, moments: list[int]) -> list[float]:
    """How much of the time of ``rows`` lies before each moment, in microseconds.

    A row adds what of it has passed: the time since its begin, less, once it is over, the time since its end.
    """
    sums = []
    for column in ("begin_us", "end_us"):
        sorted_us = rows[column].sort().cast(pl.Float64)
        total = pl.concat([pl.Series([0.0]), sorted_us.cum_sum()])
        count = sorted_us.search_sorted(pl.Series(moments, dtype=pl.Float64), side="left").cast(pl.Int64)
        sums.append(count * pl.Series(moments, dtype=pl.Float64) - total.gather(count))
    return (sums[0] - sums[1]).to_list()


def refused(timeline: Timeline) -> pl.DataFrame:
    """Rows of ``request_states`` in the waiting queue for a cause, not only until a step began."""
    return timeline.request_states.filter(pl.col("state").is_in(QUEUED) & (pl.col("cause") != NEXT_STEP))


def since_us(timeline: Timeline, moment: int, request_ids: pl.Series) -> pl.DataFrame:
    """``request_id`` and ``since_us``: when each of these last entered the waiting queue before a moment."""
    queued = pl.col("state").is_in(QUEUED)
    states = timeline.request_states.filter(
        (pl.col("begin_us") < moment) & pl.col("request_id").is_in(request_ids.implode())
    )
    enters = queued & ~queued.shift(1).over("request_id").fill_null(value=False)
    return states.filter(enters).group_by("request_id").agg(since_us=pl.col("begin_us").last())


def per_step(timeline: Timeline, rows: pl.DataFrame) -> pl.DataFrame:
    """The steps that these rows are made of: ``step`` and ``requests``, how many of them each step is in.

    Args:
        timeline: One engine's.
        rows: Of ``request_states``, with ``begin_step`` and ``end_step``.
    """
    known = rows.select("begin_step", "end_step").drop_nulls()
    changes = pl.concat(
        [
            known.select(step="begin_step", requests=pl.lit(1)),
            known.select(step=pl.col("end_step") + 1, requests=pl.lit(-1)),
        ]
    )
    running = (
        changes.group_by("step")
        .agg(pl.col("requests").sum())
        .sort("step")
        .with_columns(pl.col("requests").cum_sum())
    )
    steps = timeline.steps.select(pl.col("step").cast(pl.Int64)).sort("step")
    return steps.join_asof(running, on="step").filter(pl.col("requests") > 0)


def queue_times(timeline: Timeline) -> pl.DataFrame:
    """One row per request that was scheduled: how long it waited for that.

    Columns: ``request_id``, ``trial``, ``priority``, ``queued_us``, ``step`` (that admitted it first) and
    ``queue_us``.
    """
    admitted = (
        timeline.request_states.filter(pl.col("tokens") > 0)
        .group_by("request_id")
        .agg(pl.col("begin_us", "begin_step").first())
    )
    return (
        timeline.arrivals.filter(~pl.col("streaming_update"))
        .unique("request_id", keep="first", maintain_order=True)
        .select("request_id", "trial", "priority", "queued_us")
        .join(admitted, on="request_id", maintain_order="left")
        .with_columns(queue_us=(pl.col("begin_us") - pl.col("queued_us")).clip(0))
        .select("request_id", "trial", "priority", "queued_us", "begin_step", "queue_us")
        .rename({"begin_step": "step"})
    )
