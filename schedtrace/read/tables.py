"""What is nested in the steps, as flat tables of their own; on disk where they do not fit memory."""

from collections import defaultdict
from pathlib import Path

import msgspec
import polars as pl

from schedtrace.model import private
from schedtrace.model.trace import Arrival, ChunkCap, Exit, Finish, Preemption, ScheduledRequest
from schedtrace.read.schema import defaults_of, schema_of

NESTED: dict[str, type[msgspec.Struct]] = {
    "requests": ScheduledRequest,
    "exits": Exit,
    "caps": ChunkCap,
    "preempted": Preemption,
    "arrived": Arrival,
    "finished": Finish,
}
"""Lists of a step, and what is in them."""
LARGE = ("requests", "exits", "caps", "preempted")
"""Those of them that grow with the steps."""
OF_STEP = ("step", "trial", "start_us")
"""Columns that every entry has from its step."""


class CannotWriteError(Exception):
    """There is no room for a table, or it is not allowed there."""


def flat(steps: pl.DataFrame) -> pl.DataFrame:
    """Steps without their lists."""
    return steps.drop(NESTED)


def entries(steps: pl.DataFrame, column: str) -> pl.DataFrame:
    """One row per entry of a list, with the step it belongs to; defaults filled in."""
    struct = NESTED[column]
    rows = (
        steps.select(*OF_STEP, pl.col(column).alias("entry"))
        .filter(pl.col("entry").list.len() > 0)
        .explode("entry")
        .unnest("entry")
    )
    return rows.with_columns(pl.col(name).fill_null(value) for name, value in defaults_of(struct).items())


class Tables:
    """The large tables of a trace, filled chunk by chunk.

    Args:
        folder: Where they are written, a Parquet file a chunk and table; None: they stay in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._frames: dict[str, list[pl.DataFrame]] = defaultdict(list)
        self._chunks = 0

    def add(self, steps: pl.DataFrame) -> None:
        """Add what is nested in these steps."""
        self.put({name: entries(steps, name) for name in LARGE})

    def put(self, tables: dict[str, pl.DataFrame]) -> None:
        """Add the rows of a chunk to every table.

        Raises:
            CannotWriteError: the disk is full, for instance.
        """
        for name, rows in tables.items():
            if self._folder is None:
                self._frames[name].append(rows)
            elif rows.height:
                write(rows, self._folder / f"{name}-{self._chunks:06}.parquet")
        self._chunks += 1

    def scan(self, *, in_order: bool) -> dict[str, pl.LazyFrame]:
        """Name to table, in the order of the steps.

        Args:
            in_order: They were added in that order.
        """
        if self._folder is not None:
            return scan(self._folder, in_order=in_order)
        return {name: _sorted(pl.concat(self._frames[name]).lazy(), in_order=in_order) for name in LARGE}


def scan(folder: Path, *, in_order: bool) -> dict[str, pl.LazyFrame]:
    """The large tables in a folder."""
    return {name: _sorted(_scan_one(folder, name), in_order=in_order) for name in LARGE}


def write(table: pl.DataFrame, file: Path) -> None:
    """Write a Parquet file.

    Raises:
        CannotWriteError: the disk is full, for instance.
    """
    try:
        private.create(file)
        table.write_parquet(file, compression="lz4")
    except (OSError, pl.exceptions.PolarsError) as error:
        raise CannotWriteError(str(error)) from error


def _scan_one(folder: Path, name: str) -> pl.LazyFrame:
    files = sorted(folder.glob(f"{name}-*.parquet"))
    if files:
        return pl.scan_parquet(files)
    return pl.LazyFrame(schema=dict.fromkeys(OF_STEP, pl.Int64) | schema_of(NESTED[name]))


def _sorted(table: pl.LazyFrame, *, in_order: bool) -> pl.LazyFrame:
    return (table if in_order else table.sort("step", maintain_order=True)).set_sorted("step")
