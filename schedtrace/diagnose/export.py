"""A run as flat tables in files, for one's own notebook."""

from enum import StrEnum
from pathlib import Path

import polars as pl
from polars import selectors as cs

from schedtrace.diagnose.cells import safe_cells
from schedtrace.errors import InputError, UsageError
from schedtrace.model import private
from schedtrace.model.printable import encodable
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace


class Kind(StrEnum):
    """Formats of a table's file."""

    PARQUET = "parquet"
    CSV = "csv"


def tables(run: Run) -> dict[str, pl.LazyFrame]:
    """Name to table, the warm-up (trial 0) included; all engines, told apart by ``engine_rank``.

    Columns are those of the trace format; ``steps`` is without its lists, which are the other tables.
    """
    of_traces = [(trace.header.engine_rank, _tables(trace)) for trace in run.traces]
    first = of_traces[0][1]
    return {
        name: pl.concat(
            [_of_engine(rank, frames[name]) for rank, frames in of_traces], how="diagonal_relaxed"
        )
        for name in first
    }


def _tables(trace: Trace) -> dict[str, pl.LazyFrame]:
    return {
        "steps": trace.steps.lazy().select(~cs.nested()),
        "requests": trace.requests(),
        "exits": trace.exits(),
        "caps": trace.caps(),
        "preemptions": trace.preemptions(),
        "arrivals": trace.arrivals.lazy(),
        "finishes": trace.finishes.lazy(),
    }


def write_tables(run: Run, folder: Path, *, kind: Kind, force: bool = False) -> dict[Path, int]:
    """Write one file per table into ``folder``.

    Args:
        run: A run.
        folder: Made if need be.
        kind: Format of the files.
        force: Replace files that are there.

    Returns:
        Each file with its number of rows.

    Raises:
        UsageError: a file is there already, or Polars cannot write to a folder of this name.
        InputError: the folder cannot be written to.
    """
    if encodable(str(folder)) != str(folder):
        msg = f"{folder}: its name is not UTF-8, which Polars needs; --output names another folder"
        raise UsageError(msg)
    files = {folder / f"{name}.{kind}": table for name, table in tables(run).items()}
    there = [file for file in files if file.exists()]
    if there and not force:
        msg = f"{there[0]} is there already; --force replaces it, --output names another folder"
        raise UsageError(msg)
    try:
        private.make_folder(folder)
        return {file: _write(table, file, kind) for file, table in files.items()}
    except OSError as error:
        msg = f"{folder}: cannot be written to ({error.strerror or error})"
        raise InputError(msg) from error


def _write(table: pl.LazyFrame, file: Path, kind: Kind) -> int:
    """Streamed, as a large trace's table does not fit memory."""
    private.create(file)
    if kind is Kind.CSV:
        safe_cells(table).sink_csv(file)
    else:
        table.sink_parquet(file)
    return int(table.select(pl.len()).collect().item())


def _of_engine(rank: int, table: pl.LazyFrame) -> pl.LazyFrame:
    return table.select(pl.lit(rank, dtype=pl.Int64).alias("engine_rank"), pl.all())
