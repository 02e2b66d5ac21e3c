"""Pieces of requests' lives: since when each was in which state. ``request_states.py`` puts them together.

A piece has no end: it lasts until the request's next one begins. So the pieces of a request can neither
overlap nor leave a gap.
"""

import polars as pl

SCHEMA = {
    "request_id": pl.String,
    "at": pl.Int64,
    "rank": pl.Int8,
    "us": pl.Int64,
    "state": pl.String,
    "cause": pl.String,
    "begin_step": pl.Int64,
    "end_step": pl.Int64,
    "tokens": pl.Int64,
}
"""Columns of a table of pieces. ``at`` is the place, among the engine's steps, of the step that began it (-1:
none did) and ``rank`` its order among pieces of that step; with several steps in flight these give the order
of events, and ``us`` may not. ``begin_step`` to ``end_step`` are the steps that it is made of, null where no
step knew of the request, and ``tokens`` what these scheduled of it."""

LENGTH_US = pl.col("end_us") - pl.col("begin_us")
"""Of a row of ``request_states`` or ``engine_states``."""

ARRIVES, WAITS, COMPUTES, DECODES = range(4)
"""``rank``: a step first refuses or skips a request, or admits it; its output makes it decode."""


def pieces(frame: pl.DataFrame, **columns: pl.Expr) -> pl.DataFrame:
    """A table of pieces: columns by name; those missing are null, and ``tokens`` 0."""
    missing = {name: pl.lit(None) for name in ("cause", "begin_step", "end_step")} | {"tokens": pl.lit(0)}
    made = missing | columns
    own = {name: made.get(name, pl.col(name)).cast(dtype) for name, dtype in SCHEMA.items()}
    return frame.select(**own)


def placed(steps: pl.DataFrame) -> pl.DataFrame:
    """``step`` (sorted), ``at`` (its place), ``start_us`` and ``output_us`` of each step of an engine."""
    return steps.select("step", "start_us", "output_us").with_row_index("at").cast({"at": pl.Int64})


def place_of(rows: pl.DataFrame, steps: pl.DataFrame, column: str, name: str) -> pl.DataFrame:
    """Rows with the place of the first step numbered ``column`` or higher; the number of steps if none is."""
    numbers = steps["step"]
    return rows.with_columns(pl.Series(name, numbers.search_sorted(rows[column], side="left")).cast(pl.Int64))
