"""Stretches exploded: a row for every step and request, as they stand in the trace's lines."""

from collections.abc import Iterator

import polars as pl
from polars.io.plugins import register_io_source

from schedtrace.read.stretches import ROWS_AT_ONCE, SCHEMA
from schedtrace.read.tables import OF_STEP

COLUMNS = {
    **dict.fromkeys(OF_STEP, pl.Int64),
    **{name: dtype for name, dtype in SCHEMA.items() if name not in {"step", "last_step", "trial", "order"}},
}
"""Of a table of rows."""


def rows_of(stretches: pl.LazyFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """All rows of these stretches, in the order of the steps.

    Args:
        stretches: Some of a trace.
        steps: At least those that the stretches are in.
    """
    into = pl.col("at") - pl.col("step")
    return (
        stretches.with_columns(at=pl.int_ranges("step", pl.col("last_step") + 1))
        .explode("at")
        .with_columns(
            step="at",
            computed_tokens=pl.col("computed_tokens") + into * pl.col("scheduled_tokens").fill_null(0),
        )
        .sort("step", "order")
        .join(steps.lazy().select("step", "start_us"), on="step", how="left", maintain_order="left")
        .select(list(COLUMNS))
        .set_sorted("step")
        .collect()
    )


def rows_between(stretches: pl.LazyFrame, steps: pl.DataFrame, first: int, last: int) -> pl.DataFrame:
    """The rows of the steps from ``first`` to ``last``."""
    begin, end = pl.max_horizontal("step", first), pl.min_horizontal("last_step", last)
    into = begin - pl.col("step")
    cut = stretches.filter((pl.col("step") <= last) & (pl.col("last_step") >= first)).with_columns(
        step=begin,
        last_step=end,
        computed_tokens=pl.col("computed_tokens") + into * pl.col("scheduled_tokens").fill_null(0),
    )
    return rows_of(cut, steps.filter(pl.col("step").is_between(first, last)))


def all_rows(stretches: pl.LazyFrame, steps: pl.DataFrame) -> pl.LazyFrame:
    """The rows of all steps; made bit by bit, so that they need never be in memory as a whole."""

    def source(
        with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        left = n_rows
        for first, last in _windows(steps):
            rows = rows_between(stretches, steps, first, last)
            if predicate is not None:
                rows = rows.filter(predicate)
            if left is not None:
                rows = rows.head(left)
                left -= rows.height
            yield rows if with_columns is None else rows.select(with_columns)
            if left == 0:
                return

    return register_io_source(source, schema=COLUMNS).set_sorted("step")


def _windows(steps: pl.DataFrame) -> Iterator[tuple[int, int]]:
    """First and last steps that have so many rows together."""
    at = pl.col("total_requests").fill_null(1).clip(1, ROWS_AT_ONCE).cum_sum() // ROWS_AT_ONCE
    windows = steps.group_by(at.alias("at"), maintain_order=True).agg(
        pl.col("step").first(), pl.col("step").last().alias("last")
    )
    yield from windows.select("step", "last").iter_rows()
