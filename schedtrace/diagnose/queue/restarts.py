"""Requests that compute the same tokens again and again."""

import polars as pl

from schedtrace.diagnose.queue.alone import GONE
from schedtrace.timeline.timeline import Timeline

TIMES_OVER = 2
"""So many times its high-water mark has a request computed again that makes no progress."""
FEWEST_FRUITLESS = 2
GAIN_FRAC = 0.1
"""A restart is fruitless if it gained less than this share of what it computed again."""
USUAL_BLOCK = 16
"""Tokens, where the trace does not tell vLLM's block size."""


def no_progress(timeline: Timeline) -> pl.DataFrame:
    """One row per such request, the one that recomputed most first.

    Columns: ``request_id``, ``trial``, ``restarts``, ``fruitless`` (restarts that hardly passed the
    high-water mark before them), ``high_tokens`` (the most that it had computed before its last restart),
    ``recomputed_tokens``, ``first_step`` and ``last_step`` (from its first restart to its last),
    ``unfinished``.

    A restart is an admission, or a fall of its computed tokens by more than a block, after its first tokens.
    Rejected drafts are taken back too, but never so many. Tokens found in a cache are not recomputed.
    """
    block = timeline.header.block_size or USUAL_BLOCK
    steps = pl.col("last_step") - pl.col("step") + 1
    end = pl.col("computed_tokens") + steps * pl.col("scheduled_tokens").fill_null(0) - pl.col("draft_tokens")
    falls = pl.col("computed_tokens") + block < pl.col("end").shift(1).over("request_id")
    again = (pl.col("phase") != "running") | falls
    restarted = pl.col("high").is_not_null()
    attempts = (
        timeline.stretches.sort("request_id", "step", maintain_order=True)
        .with_columns(end=end)
        .with_columns(attempt=again.fill_null(value=False).cum_sum().over("request_id"))
        .group_by("request_id", "attempt", maintain_order=True)
        .agg(
            pl.col("trial", "step", "computed_tokens").first(),
            pl.col("end").max(),
        )
        .with_columns(high=pl.col("end").cum_max().shift(1).over("request_id"))
        .with_columns(
            again=pl.when(restarted).then(pl.min_horizontal("end", "high") - pl.col("computed_tokens"))
        )
    )
    fruitless = restarted & (pl.col("end") - pl.col("high") <= GAIN_FRAC * pl.col("again"))
    left = timeline.finishes.filter(~pl.col("status").is_in(GONE))
    return (
        attempts.group_by("request_id", maintain_order=True)
        .agg(
            pl.col("trial").first(),
            restarted.sum().alias("restarts"),
            fruitless.sum().alias("fruitless"),
            pl.col("high").last().alias("high_tokens"),
            pl.col("again").clip(0).sum().alias("recomputed_tokens"),
            pl.col("step").filter(restarted).first().alias("first_step"),
            pl.col("step").last().alias("last_step"),
        )
        .filter(
            pl.col("recomputed_tokens") >= TIMES_OVER * pl.col("high_tokens"),
            pl.col("fruitless") >= FEWEST_FRUITLESS,
        )
        .collect()
        .with_columns(unfinished=~pl.col("request_id").is_in(left["request_id"].implode()))
        .sort("recomputed_tokens", descending=True, maintain_order=True)
    )
