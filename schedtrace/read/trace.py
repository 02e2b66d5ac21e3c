"""One ``engine-<rank>.jsonl`` as frames."""

from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from schedtrace.errors import InputError, UsageError
from schedtrace.model.facts import ALL_FACTS, Fact
from schedtrace.model.trace import End, Header
from schedtrace.model.trace_facts import Control, DummyBatch, RankSync
from schedtrace.read.cache import read_by_files
from schedtrace.read.cpu_times import cpu_times
from schedtrace.read.options import READ, ReadOptions
from schedtrace.read.parse import parse
from schedtrace.read.problems import Problems
from schedtrace.read.rows import all_rows
from schedtrace.read.schema import schema_of
from schedtrace.read.tables import STRETCHES, Tables
from schedtrace.read.whole_lines import WholeLines


@dataclass
class Trace:
    """One engine's trace. Frames have the columns of ``model.trace``'s structs."""

    path: Path
    header: Header
    steps: pl.DataFrame
    """Without their lists, which are tables of their own."""
    large: dict[str, pl.LazyFrame]
    """What requests got (``stretches``), and the entries of each list of a step; on disk where they are many,
    so never collected as a whole."""
    arrivals: pl.DataFrame
    finishes: pl.DataFrame
    notices: list[str]
    end: End | None
    problems: Problems
    facts: frozenset[Fact] = ALL_FACTS
    """Other records than schedtrace's tell less."""
    record: str = "trace of schedtrace"
    """What kind of record it was read from."""
    cpu: pl.DataFrame = field(default_factory=lambda: cpu_times([]))
    """Processor times of threads (``read/cpu_times.py``)."""
    dummies: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=schema_of(DummyBatch)))
    """Dummy batches of a rank in lock-step, in their order; fewer than are counted in older traces."""
    syncs: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=schema_of(RankSync)))
    """All-reduces among ranks in lock-step, in their order."""
    controls: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=schema_of(Control)))
    """What was asked of the engine beside requests, in order of time."""

    def require(self, fact: Fact, what: str) -> None:
        """Raises UsageError where the record lacks what somebody needs."""
        if fact not in self.facts:
            msg = f"{self.path}: a {self.record} does not tell {fact}, which {what} needs"
            raise UsageError(msg)

    def stretches(self) -> pl.LazyFrame:
        """What every request got, as stretches of steps (``read/stretches.py``)."""
        return self.large[STRETCHES]

    def requests(self) -> pl.LazyFrame:
        """What every request got: one row per step and request, in the order of the steps."""
        return all_rows(self.stretches(), self.steps)

    def exits(self) -> pl.LazyFrame:
        """Every recorded exit: one row each, in the order in which they were taken."""
        return self.large["exits"]

    def caps(self) -> pl.LazyFrame:
        """Every limit that made a chunk smaller: one row each, in the order in which they were applied."""
        return self.large["caps"]

    def preemptions(self) -> pl.LazyFrame:
        """Every preemption: one row each."""
        return self.large["preempted"]


def read_trace(path: Path, options: ReadOptions = READ) -> Trace:
    """Read and check one trace; a large one by way of Parquet files, which serve the next time.

    Raises:
        InputError: missing, empty, no schedtrace trace, or of a newer schema.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror})"
        raise InputError(msg) from error
    if size > options.memory_bytes:
        parsed, large = read_by_files(path, options)
    else:
        tables = Tables()
        parsed = parse(WholeLines(path, options.chunk_bytes, options.progress), tables)
        large = tables.scan(in_order=parsed.in_order)
    return Trace(
        path=path,
        header=parsed.header,
        steps=parsed.steps,
        large=large,
        arrivals=parsed.arrivals,
        finishes=parsed.finishes,
        notices=parsed.notices,
        end=parsed.end,
        problems=parsed.problems,
        cpu=parsed.cpu,
        dummies=parsed.dummies,
        syncs=parsed.syncs,
        controls=parsed.controls,
    )
