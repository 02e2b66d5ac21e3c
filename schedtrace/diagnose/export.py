"""A run as flat tables in files, for one's own notebook, or as a trace with every step in full."""

from collections.abc import Iterable
from enum import StrEnum
from functools import partial
from pathlib import Path

import polars as pl
from polars import selectors as cs

from schedtrace.diagnose.cells import safe_cells
from schedtrace.errors import InputError, UsageError
from schedtrace.model import private
from schedtrace.model.facts import ALL_FACTS
from schedtrace.model.printable import encodable, visible_json
from schedtrace.read.expand import expanded
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from schedtrace.timeline.timeline import make_timeline


class Kind(StrEnum):
    """Formats of a table's file."""

    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"
    """No tables: the trace itself, every step in full."""


def tables(run: Run) -> dict[str, pl.LazyFrame]:
    """Name to table, the warm-up (trial 0) included; all engines, told apart by ``engine_rank``.

    Columns are those of the trace format; ``steps`` is without its lists, which are tables of their own.
    ``request_states`` and ``engine_states`` divide the time (``timeline/``).
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
    timeline = make_timeline(trace, whole=True)
    return {
        "steps": trace.steps.lazy().select(~cs.nested()),
        "requests": trace.requests(),
        "exits": trace.exits(),
        "caps": trace.caps(),
        "preemptions": trace.preemptions(),
        "arrivals": trace.arrivals.lazy(),
        "finishes": trace.finishes.lazy(),
        "request_states": timeline.request_states.lazy().drop("engine_rank"),
        "engine_states": timeline.engine_states.lazy().drop("engine_rank"),
    }


def export(run: Run, folder: Path, *, kind: Kind, force: bool = False) -> dict[Path, int]:
    """Write one file per table, or per trace for ``Kind.JSONL``, into ``folder``.

    Args:
        run: A run.
        folder: Made if need be.
        kind: Format of the files.
        force: Replace files that are there.

    Returns:
        Each file with its number of rows or lines.

    Raises:
        UsageError: a file is there already, a log of another kind has no trace to write, or Polars cannot
            write to a folder of this name.
        InputError: the folder cannot be written to.
    """
    if encodable(str(folder)) != str(folder):
        msg = f"{folder}: its name is not UTF-8, which Polars needs; --output names another folder"
        raise UsageError(msg)
    if kind is Kind.JSONL:
        files = {folder / trace.path.name: partial(_expand, trace) for trace in run.traces}
        _require_traces(run, files)
    else:
        files = {
            folder / f"{name}.{kind}": partial(_write, table, kind) for name, table in tables(run).items()
        }
    there = [file for file in files if file.exists()]
    if there and not force:
        msg = f"{there[0]} is there already; --force replaces it, --output names another folder"
        raise UsageError(msg)
    try:
        private.make_folder(folder)
        return {file: write(file) for file, write in files.items()}
    except OSError as error:
        msg = f"{folder}: cannot be written to ({error.strerror or error})"
        raise InputError(msg) from error


def _require_traces(run: Run, files: Iterable[Path]) -> None:
    """Raises UsageError unless each file can be written from a trace of its own."""
    foreign = [trace for trace in run.traces if trace.facts != ALL_FACTS]
    if foreign:
        msg = f"{foreign[0].path}: --to jsonl expands traces of schedtrace, and this is a {foreign[0].record}"
        raise UsageError(msg)
    sources = {trace.path.resolve() for trace in run.traces}
    if over := [file for file in files if file.resolve() in sources]:
        msg = f"{over[0]}: --output names the folder of the trace itself, which would be lost"
        raise UsageError(msg)


def _expand(trace: Trace, file: Path) -> int:
    """Line by line, as a large trace in full does not fit memory."""
    count = 0
    with private.writable(file) as target:
        for line in expanded(trace.path):
            target.write(visible_json(line) + b"\n")
            count += 1
    return count


def _write(table: pl.LazyFrame, kind: Kind, file: Path) -> int:
    """Streamed, as a large trace's table does not fit memory."""
    private.create(file)
    if kind is Kind.CSV:
        safe_cells(table).sink_csv(file)
    else:
        table.sink_parquet(file)
    return int(table.select(pl.len()).collect().item())


def _of_engine(rank: int, table: pl.LazyFrame) -> pl.LazyFrame:
    return table.select(pl.lit(rank, dtype=pl.Int64).alias("engine_rank"), pl.all())
