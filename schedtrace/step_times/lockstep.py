"""Whose batch a pass of ranks in lock-step waited for."""

import polars as pl

from schedtrace.step_times.fitting import Source, fit_rows

ROUNDS = 4
"""Of choosing the slowest rank by a fit, and fitting to those chosen."""


def of_slowest(rows: pl.DataFrame, source: Source) -> pl.DataFrame:
    """The rows of all ranks, with ``device_us`` of each pass's slowest rank only; null for the others.

    A pass takes as long as its slowest rank, so the time that the others see belongs to a batch of which
    their own rows know nothing. Which rank that was follows from the fit, and the fit from that: they are
    found in turns, beginning with the rank that has most tokens. Ranks of one trial become one part: whoever
    draws neighbouring steps draws whole passes.

    Args:
        rows: Of ``observed``, of all ranks of one run.
        source: Of the rows.

    Raises:
        InputError: too few steps have an output and requests that are known.
    """
    passes = ("trial", "wave", "step_counter")
    rows = rows.sort(passes, maintain_order=True).with_columns(
        part=pl.col("trial").rank("dense").fill_null(1) - 1
    )
    took = pl.col("device_us")
    work = pl.col("prefill_tokens") + pl.col("decode_tokens")
    slowest = _slowest(rows, work)
    chosen = rows.with_columns(device_us=pl.when(slowest).then(took))
    for _ in range(ROUNDS):
        fitted = fit_rows(chosen, source).device.expr()
        tokens = rows.with_columns(batch_tokens=work)
        again = _slowest(tokens, fitted)
        following = rows.with_columns(device_us=pl.when(again).then(took))
        if following.equals(chosen):
            break
        chosen = following
    return chosen


def _slowest(rows: pl.DataFrame, cost: pl.Expr) -> pl.Series:
    """Whether a row's cost is the largest of its pass; of equal ones the first."""
    named = ("trial", "wave", "step_counter")
    costs = rows.with_columns(cost=cost.fill_null(-1.0)).with_row_index("row")
    best = (
        costs.filter(pl.col("total_requests") > 0)
        .sort("cost", descending=True, maintain_order=True)
        .group_by(named, maintain_order=True)
        .first()
    )
    return costs["row"].is_in(best["row"].implode())
