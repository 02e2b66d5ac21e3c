"""Sums over the requests of every step, made from stretches without making the rows.

A stretch adds something to a sum in its first step and takes it away after its last. What changes between is
told by a slope, or step by step where that is seldom.
"""

import polars as pl


def context_tokens(stretches: pl.LazyFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """``step`` and ``context_tokens``: computed tokens of its requests before it."""
    # In step n a request has computed_tokens + (n - step) * scheduled_tokens.
    grows = pl.when(pl.col("last_step") > pl.col("step")).then("scheduled_tokens").otherwise(0)
    told = stretches.with_columns(slope=grows).with_columns(
        at_zero=pl.col("computed_tokens") - pl.col("step") * pl.col("slope")
    )
    sums = sums_by_step(begins_and_ends(told, pl.col("at_zero"), pl.col("slope")), steps)
    return sums.select("step", context_tokens=pl.col("at_zero") + pl.col("step") * pl.col("slope"))


def blocks_needed(stretches: pl.LazyFrame, steps: pl.DataFrame, block_size: int) -> pl.DataFrame:
    """``step``, ``requests`` and ``blocks``: KV blocks that their tokens need when the step is over."""
    length = pl.col("last_step") - pl.col("step") + 1
    first = pl.col("computed_tokens") + pl.col("scheduled_tokens")
    last = pl.col("computed_tokens") + length * pl.col("scheduled_tokens")
    held = stretches.with_columns(
        requests=pl.lit(1), blocks=-(-first // block_size), most=-(-last // block_size)
    )
    # Each further block is taken in the first step whose tokens do not fit into those before it.
    taken = (
        held.filter(pl.col("most") > pl.col("blocks"))
        .with_columns(full=pl.int_ranges("blocks", "most"))
        .explode("full")
        .with_columns(
            at=pl.col("step")
            + (pl.col("full") * block_size - pl.col("computed_tokens")) // pl.col("scheduled_tokens")
        )
        .select("at", requests=pl.lit(0), blocks=pl.lit(1))
    )
    begins = held.select(at="step", requests="requests", blocks="blocks")
    ends = held.select(at=pl.col("last_step") + 1, requests=-pl.col("requests"), blocks=-pl.col("most"))
    return sums_by_step(pl.concat([begins, taken, ends], how="vertical_relaxed"), steps)


def begins_and_ends(stretches: pl.LazyFrame, *values: pl.Expr) -> pl.LazyFrame:
    """What each stretch adds (``values``) in its first step, and takes away after its last."""
    begins = stretches.select(pl.col("step").alias("at"), *values)
    ends = stretches.select((pl.col("last_step") + 1).alias("at"), *(-value for value in values))
    return pl.concat([begins, ends])


def sums_by_step(changes: pl.LazyFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """One row per step: what all changes up to it add up to."""
    of_step = changes.group_by("at").agg(pl.all().sum()).sort("at").with_columns(pl.exclude("at").cum_sum())
    return (
        steps.lazy()
        .select(pl.col("step").set_sorted())
        .join_asof(of_step, left_on="step", right_on="at")
        .drop("at")
        .with_columns(pl.exclude("step").fill_null(0))
        .collect()
    )
