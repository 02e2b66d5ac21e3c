"""What a request did in a step: prefill, recompute or decode."""

import polars as pl

from schedtrace.timeline.timeline import Timeline


def with_work(timeline: Timeline, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of ``timeline.requests`` with ``prompt_tokens``, ``lost_tokens`` and ``work``.

    ``lost_tokens`` is the most that a preemption before (or in) that step had thrown away. ``work`` is
    ``recompute`` below it, ``prefill`` below the prompt's length, else ``decode``; null where the trace began
    after the request had come.
    """
    its = pl.col("request_id").is_in(rows["request_id"].unique().implode())
    lost = (
        timeline.preemptions.filter(its)
        .select("request_id", pl.col("step").cast(pl.Int64), "lost_tokens")
        .sort("step", maintain_order=True)
        .with_columns(pl.col("lost_tokens").cum_max().over("request_id"))
        .unique(["request_id", "step"], keep="last", maintain_order=True)
    )
    known = pl.concat(
        [
            timeline.arrivals.filter(its & ~pl.col("streaming_update")).select("request_id", "prompt_tokens"),
            timeline.finishes.filter(its).select("request_id", "prompt_tokens"),
        ]
    )
    computed = pl.col("computed_tokens")
    return (
        rows.with_columns(pl.col("step").cast(pl.Int64))
        .join(known.unique("request_id", keep="first"), on="request_id", how="left", maintain_order="left")
        .sort("step", maintain_order=True)
        .join_asof(lost, on="step", by="request_id", check_sortedness=False)
        .with_columns(pl.col("lost_tokens").fill_null(0))
        .with_columns(
            work=pl.when(computed < pl.col("lost_tokens"))
            .then(pl.lit("recompute"))
            .when(computed < pl.col("prompt_tokens"))
            .then(pl.lit("prefill"))
            .when(pl.col("prompt_tokens").is_not_null())
            .then(pl.lit("decode"))
        )
    )
