"""What a run is limited by: the time that requests waited, divided among the causes they waited for.

After a step everybody in the waiting queue was refused by something: by the skip that passed over them, or by
the exit that ended the loop before it came to them. Each of them waits from this step to the next one.
"""

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.model.report import LimitShare
from schedtrace.timeline.timeline import Timeline

STRIP_CELLS = 40


def refused_demand(timeline: Timeline) -> pl.DataFrame:
    """One row per step and cause: how many requests waited for it, and how long until the next step.

    Columns: ``step``, ``trial``, ``start_us``, ``cause``, ``requests``, ``wait_us`` (``requests`` times the
    time to the next step's start; to the output for the last step of a trial), ``tokens``
    (``waiting_tokens_after`` divided evenly among those who wait). Per step the ``requests`` add up to
    ``num_waiting_after``.
    """
    steps = timeline.steps.filter(pl.col("num_waiting_after") > 0)
    period = pl.col("start_us").shift(-1).over("trial") - pl.col("start_us")
    to_output = pl.col("output_us") - pl.col("start_us")
    periods = timeline.steps.select("step", pl.coalesce(period, to_output, 0).alias("period_us"))
    skipped = (
        timeline.exits.filter((pl.col("loop") == "waiting") & (pl.col("kind") == "continue"))
        .group_by("step", "cause", maintain_order=True)
        .agg(pl.col("count").sum().cast(pl.Int64).alias("requests"))
        .join(steps.select("step", "num_waiting_after"), on="step", maintain_order="left")
        # Never more than wait: a request skipped in this step may have been aborted within it.
        .with_columns(before=pl.col("requests").cum_sum().over("step") - pl.col("requests"))
        .with_columns(pl.min_horizontal("requests", pl.col("num_waiting_after") - pl.col("before")).clip(0))
        .select("step", "cause", "requests")
    )
    passed = skipped.group_by("step").agg(pl.col("requests").sum().alias("skipped"))
    ended = steps.join(passed, on="step", how="left", maintain_order="left").select(
        "step",
        _end_cause().alias("cause"),
        (pl.col("num_waiting_after") - pl.col("skipped").fill_null(0)).alias("requests"),
    )
    share = pl.col("requests") / pl.col("num_waiting_after")
    return (
        pl.concat([skipped, ended])
        .filter(pl.col("requests") > 0)
        .join(
            steps.select("step", "trial", "start_us", "num_waiting_after", "waiting_tokens_after"),
            on="step",
            maintain_order="left",
        )
        .join(periods, on="step", maintain_order="left")
        .group_by("step", "trial", "start_us", "cause", maintain_order=True)
        .agg(
            pl.col("requests").sum(),
            (pl.col("requests") * pl.col("period_us")).sum().alias("wait_us"),
            (share * pl.col("waiting_tokens_after")).sum().alias("tokens"),
        )
        .sort("step", "cause")
    )


def limit_shares(timeline: Timeline) -> list[LimitShare]:
    """The causes of all waiting, the largest first; the shares add up to 1."""
    demand = refused_demand(timeline)
    total = int(demand["wait_us"].sum() or 0)
    if total <= 0:
        return []
    cells = min(STRIP_CELLS, timeline.steps.height)
    cell = (pl.col("at") * cells // timeline.steps.height).alias("cell")
    placed = demand.join(timeline.steps.select("step").with_row_index("at"), on="step").with_columns(cell)
    rows = (
        demand.group_by("cause")
        .agg(
            pl.col("wait_us").sum(),
            pl.col("requests").sum().alias("request_steps"),
            pl.col("step").n_unique().alias("steps"),
        )
        .sort("wait_us", "cause", descending=[True, False])
    )
    of_cell = placed.group_by("cause", "cell").agg(pl.col("wait_us").sum())
    most = dict(placed.group_by("cell").agg(pl.col("wait_us").sum()).iter_rows())
    return [
        LimitShare(
            engine_rank=timeline.rank,
            cause=row["cause"],
            wait_ms=row["wait_us"] / 1e3,
            share_frac=row["wait_us"] / total,
            steps=row["steps"],
            request_steps=row["request_steps"],
            strip=_strip(of_cell.filter(pl.col("cause") == row["cause"]), most, cells),
        )
        for row in rows.iter_rows(named=True)
    ]


def _end_cause() -> pl.Expr:
    """Whoever was not skipped was refused by the end of the loop; that it was empty cannot be the reason."""
    unexplained = pl.col("waiting_cause").is_in([str(Cause.QUEUE_EMPTY)])
    return pl.when(unexplained).then(pl.lit(str(Cause.OTHER))).otherwise(pl.col("waiting_cause"))


def _strip(waited: pl.DataFrame, most: dict[int, int], cells: int) -> list[float]:
    """Share of each part of the run's waiting that had this cause; 0 where nobody waited."""
    found = dict(waited.select("cell", "wait_us").iter_rows())
    return [found.get(cell, 0) / (most.get(cell) or 1) for cell in range(cells)]
