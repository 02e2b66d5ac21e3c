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


def rows_between(stretches: pl.LazyFrame, steps: pl.DataFrame, first: int, last: int) -> pl.DataFrame:
    """The rows of the steps from ``first`` to ``last``, in the order of the steps.

    Args:
        stretches: Of the trace.
        steps: Its steps.
        first: Number of a step.
        last: Number of a step.
    """
    of_steps = (pl.col("step") <= last) & (pl.col("last_step") >= first)
    times = steps.lazy().filter(pl.col("step").is_between(first, last)).select("step", "start_us")
    begin, end = pl.max_horizontal("step", first), pl.min_horizontal("last_step", last)
    into = pl.col("at") - pl.col("step")
    return (
        stretches.filter(of_steps)
        .with_columns(at=pl.int_ranges(begin, end + 1))
        .explode("at")
        .with_columns(
            step="at", computed_tokens=pl.col("computed_tokens") + into * pl.col("scheduled_tokens")
        )
        .sort("step", "order")
        .join(times, on="step", how="left", maintain_order="left")
        .select(list(COLUMNS))
        .collect()
    )


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
