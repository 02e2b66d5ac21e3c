"""Trace of one engine as frames."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from polars.io.plugins import register_io_source

from schedtrace.errors import UsageError
from schedtrace.model.manifest import is_in_parts
from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import ALL_FACTS, Fact
from schedtrace.read.cache import read_by_files
from schedtrace.read.lines import READ, ReadOptions, WholeLines, file_size
from schedtrace.read.parse import Parsed, parse
from schedtrace.read.part_files import files_for
from schedtrace.read.tables import OF_STEP, ROWS_AT_ONCE, STRETCH_SCHEMA, STRETCHES, Tables

COLUMNS = {
    **dict.fromkeys(OF_STEP, pl.Int64),
    **{
        name: dtype
        for name, dtype in STRETCH_SCHEMA.items()
        if name not in {"step", "last_step", "trial", "order"}
    },
}
"""Schema of a table of rows."""


def rows_of(stretches: pl.LazyFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return all rows of these stretches, in the order of the steps.

    Args:
        stretches: Stretches of a trace.
        steps: Steps that contain at least those of the stretches.
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
    """Return the rows of the steps from ``first`` to ``last``."""
    begin, end = pl.max_horizontal("step", first), pl.min_horizontal("last_step", last)
    into = begin - pl.col("step")
    cut = stretches.filter((pl.col("step") <= last) & (pl.col("last_step") >= first)).with_columns(
        step=begin,
        last_step=end,
        computed_tokens=pl.col("computed_tokens") + into * pl.col("scheduled_tokens").fill_null(0),
    )
    return rows_of(cut, steps.filter(pl.col("step").is_between(first, last)))


def all_rows(stretches: pl.LazyFrame, steps: pl.DataFrame) -> pl.LazyFrame:
    """Yield the rows of all steps in pieces, so that they are never all in memory."""

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
    """Yield the first and last step of groups that together have this many rows."""
    at = pl.col("total_requests").fill_null(1).clip(1, ROWS_AT_ONCE).cum_sum() // ROWS_AT_ONCE
    windows = steps.group_by(at.alias("at"), maintain_order=True).agg(
        pl.col("step").first(), pl.col("step").last().alias("last")
    )
    yield from windows.select("step", "last").iter_rows()


@dataclass(kw_only=True)
class Trace(Parsed):
    """An engine's trace."""

    path: Path
    large: dict[str, pl.LazyFrame]
    """Tables of what requests got (``stretches``) and of the entries of each list of a step. Large tables
    are on disk, so they are never collected as a whole.
    """
    facts: frozenset[Fact] = ALL_FACTS
    """Facts that the record contains. A foreign log's reader states what its kind of log contains; facts that
    the recorder could not see are removed.
    """
    record: str = "trace of schedtrace"
    """Kind of record from which it was read."""

    def __post_init__(self) -> None:
        """Remove the facts that the recorder could not see."""
        self.facts -= {*_unseen(self.header, self.steps)}

    def require(self, fact: Fact, what: str) -> None:
        """Raise UsageError if the record lacks a fact that the caller needs."""
        if fact not in self.facts:
            msg = f"{self.path} ({self.record}) does not record {fact}, which {what} needs"
            raise UsageError(msg)

    def stretches(self) -> pl.LazyFrame:
        """Return the tokens that every request got, as stretches of steps (``read/tables.py``)."""
        return self.large[STRETCHES]

    def requests(self) -> pl.LazyFrame:
        """Return the tokens that every request got: one row per step and request, in step order."""
        return all_rows(self.stretches(), self.steps)

    def exits(self) -> pl.LazyFrame:
        """Return all recorded exits, one row each, in the order in which they were taken."""
        return self.large["exits"]

    def caps(self) -> pl.LazyFrame:
        """Return all limits that reduced a chunk, one row each, in the order of their application."""
        return self.large["caps"]

    def preemptions(self) -> pl.LazyFrame:
        """Return all preemptions, one row each."""
        return self.large["preempted"]


def _unseen(header: Header, steps: pl.DataFrame) -> Iterator[Fact]:
    """Yield the facts that cannot be recorded because a part of vLLM's scheduler is of another class."""
    if not header.preemptions_recorded:
        yield Fact.PREEMPTIONS
        if steps["num_resumed"].sum():  # requests waited again, and nobody knows since when
            yield Fact.LIVES
    if steps.height and steps["kv_blocks_free_after"].is_null().all():
        yield Fact.BLOCKS


EXPANDS = 8
"""Approximate ratio of a part's decompressed size to its file size."""


def read_trace(path: Path, options: ReadOptions = READ) -> Trace:
    """Read and check one trace, a file or its parts.

    A large trace is converted to Parquet files, which the next command uses.

    Raises:
        InputError: If the file does not exist, is empty, is no trace of schedtrace, or has a newer schema.
    """
    size = sum(map(file_size, files_for(path, options.last_us)))
    if size * (EXPANDS if is_in_parts(path) else 1) > options.memory_bytes:
        parsed, large = read_by_files(path, options)
    else:
        tables = Tables()
        parsed = parse(WholeLines(path, options), tables)
        large = tables.scan(in_order=parsed.in_order)
    return Trace(path=path, large=large, **vars(parsed))
