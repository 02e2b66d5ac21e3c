"""Text for the cells of a CSV file: a spreadsheet takes some of it for formulas, a terminal for commands."""

import re

import polars as pl

from schedtrace.model.printable import visible

_FORMULA = r"(^|[;,|])([=+@\-\uff1d\uff0b\uff20\uff0d])"
"""What a spreadsheet evaluates: also behind what it may take for a separator, and in full width."""
_SUSPECT = rf"[^\x20-\x5b\x5d-\x7e]|{_FORMULA}"


def safe_cells(table: pl.LazyFrame) -> pl.LazyFrame:
    """The table with its texts fit for a CSV file; numbers stay."""
    texts = [name for name, dtype in table.collect_schema().items() if dtype == pl.String]
    return table.with_columns(
        pl.col(name).map_batches(_safe, return_dtype=pl.String, is_elementwise=True) for name in texts
    )


def safe_cell(text: str) -> str:
    """The text with everything visible, and an apostrophe before what would begin a formula."""
    return re.sub(_FORMULA, r"\1'\2", visible(text))


def _safe(cells: pl.Series) -> pl.Series:
    suspect = cells.filter(cells.str.contains(_SUSPECT)).unique()
    if suspect.is_empty():
        return cells
    return cells.replace(suspect, pl.Series([safe_cell(text) for text in suspect], dtype=pl.String))
