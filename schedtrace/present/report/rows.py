"""Steps as rows of the page: single ones, and several of a very long trace as one."""

from collections.abc import Collection

import polars as pl

DETAIL = 500
"""Steps before and after each step that a finding names which are kept single."""


def merged(steps: pl.DataFrame, named: Collection[int], most: int) -> pl.DataFrame:
    """Steps as at most about ``most`` rows, with ``count``: how many each stands for.

    ``offered_tokens`` is the token budget of those that scheduled anything. Rows of several steps have the
    sum of their tokens and preemptions, the most running, waiting, KV blocks and requests, and the cause
    that the most of them had. Rows do not reach over the end of a trial.

    Args:
        steps: Of ``timeline.chart.per_step``.
        named: Steps that stay single, as ``DETAIL`` on either side of each do, as far as half of the rows
            suffice for them.
        most: Rows.
    """
    steps = steps.with_columns(
        offered_tokens=pl.when(pl.col("requests") > 0).then("token_budget").otherwise(0)
    )
    if steps.height <= most:
        return steps.with_columns(count=pl.lit(1))
    near = steps["step"].is_in(list(named))
    span = max(1, min(2 * DETAIL + 1, most // (2 * max(1, int(near.sum())))))
    single = near.cast(pl.Int8).rolling_max(span, center=True, min_samples=1) > 0
    wide = -(-steps.height // max(1, most - int(single.sum())))
    place = pl.int_range(pl.len())
    rows = steps.with_columns(single=single).with_columns(
        part=pl.when("single").then(place).otherwise(-1 - place // wide),
        run=pl.struct("single", "trial").rle_id(),
    )
    summed = (
        "decode_tokens",
        "prefill_tokens",
        "recompute_tokens",
        "unused_tokens",
        "token_budget",
        "offered_tokens",
        "preempted",
    )
    most_of = ("requests", "running", "waiting", "kv_used", "kv_total")
    return (
        rows.group_by("run", "part", maintain_order=True)
        .agg(
            pl.col("step", "trial", "begin_us").first(),
            pl.col("end_us").max(),
            pl.col(*summed).sum(),
            pl.col(*most_of).max(),
            pl.col("cause").mode().sort().first(),
            count=pl.len(),
        )
        .select(*steps.columns, "count")
    )
