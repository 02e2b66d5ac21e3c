"""A run as flat tables in files, for one's own notebook."""

from pathlib import Path

import polars as pl
from polars import selectors as cs

from schedtrace.export import Kind
from schedtrace.export.cells import safe_cells
from schedtrace.model import private
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from schedtrace.timeline.timeline import make_timeline


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


def write_table(table: pl.LazyFrame, kind: Kind, file: Path) -> int:
    """Write one as Parquet or CSV, streamed, as a large trace's table does not fit memory; gives its rows.

    Raises:
        OSError: the file cannot be written.
    """
    private.create(file)
    if kind is Kind.CSV:
        safe_cells(table).sink_csv(file)
    else:
        table.sink_parquet(file)
    return int(table.select(pl.len()).collect().item())


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


def _of_engine(rank: int, table: pl.LazyFrame) -> pl.LazyFrame:
    return table.select(pl.lit(rank, dtype=pl.Int64).alias("engine_rank"), pl.all())
