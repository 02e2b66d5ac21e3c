"""What is nested in the steps, as flat tables of their own; on disk where they do not fit memory."""

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import get_args, get_origin

import msgspec
import polars as pl

from schedtrace.model import safe_files
from schedtrace.model.trace import Events, Step
from schedtrace.read.columns import schema_of
from schedtrace.read.stretches import SCHEMA


def _lists_of(line: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """Name of each list of structs to what is in it."""
    lists = {
        field.name: get_args(field.type)[0]
        for field in msgspec.structs.fields(line)
        if get_origin(field.type) is list
    }
    return {
        name: entry
        for name, entry in lists.items()
        if isinstance(entry, type) and issubclass(entry, msgspec.Struct)
    }


NESTED = _lists_of(Step)
"""Lists of a step, and what is in them."""
EVENTS = tuple(name for name in NESTED if name in Events.__struct_fields__)
"""Those of them that happen between steps, too."""
LISTS = tuple(name for name in NESTED if name not in EVENTS and name != "requests")
"""Those of them that are tables of a trace, entry by entry."""
STRETCHES = "stretches"
"""The table of what requests got."""
LARGE = (STRETCHES, *LISTS)
"""Tables that grow with the steps."""
OF_STEP = ("step", "trial", "start_us")
"""Columns that every entry has from its step."""
ROWS_A_FILE = 2**17


class CannotWriteError(Exception):
    """There is no room for a table, or it is not allowed there."""


class Tables:
    """The large tables of a trace, filled chunk by chunk.

    Args:
        folder: Where they are written, in Parquet files; None: they stay in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._frames: dict[str, list[pl.DataFrame]] = defaultdict(list)
        self._files = 0

    def put(self, tables: dict[str, pl.DataFrame]) -> None:
        """Add rows to tables.

        Raises:
            CannotWriteError: the disk is full, for instance.
        """
        for name, rows in tables.items():
            self._frames[name].append(rows)
            if self._folder is not None and sum(frame.height for frame in self._frames[name]) > ROWS_A_FILE:
                self._write(name)

    def scan(self, *, in_order: bool) -> dict[str, pl.LazyFrame]:
        """Name to table, in the order of the steps.

        Args:
            in_order: They were added in that order.
        """
        if self._folder is None:
            return {
                name: _sorted(pl.concat(self._frames[name] or [empty(name)]).lazy(), name, in_order=in_order)
                for name in LARGE
            }
        return scan(self._folder, in_order=in_order)

    def finish(self) -> None:
        """There are no more rows.

        Raises:
            CannotWriteError: the disk is full, for instance.
        """
        for name in list(self._frames) if self._folder is not None else ():
            self._write(name)

    def _write(self, name: str) -> None:
        rows = pl.concat(self._frames.pop(name))
        if rows.height and self._folder is not None:
            write(rows, self._folder / f"{name}-{self._files:06}.parquet")
            self._files += 1


def scan(folder: Path, *, in_order: bool) -> dict[str, pl.LazyFrame]:
    """The large tables in a folder."""
    return {name: _sorted(_scan_one(folder, name), name, in_order=in_order) for name in LARGE}


def write(table: pl.DataFrame, file: Path) -> None:
    """Write a Parquet file.

    Raises:
        CannotWriteError: the disk is full, for instance.
    """
    try:
        safe_files.create(file)
        table.write_parquet(file, compression="lz4")
    except (OSError, pl.exceptions.PolarsError) as error:
        raise CannotWriteError(str(error)) from error


def _scan_one(folder: Path, name: str) -> pl.LazyFrame:
    files = sorted(folder.glob(f"{name}-*.parquet"))
    return pl.scan_parquet(files) if files else empty(name).lazy()


@cache
def empty(name: str) -> pl.DataFrame:
    """A table without rows, ``STRETCHES`` or that of a list."""
    return pl.DataFrame(
        schema=SCHEMA if name == STRETCHES else dict.fromkeys(OF_STEP, pl.Int64) | schema_of(NESTED[name])
    )


def _sorted(table: pl.LazyFrame, name: str, *, in_order: bool) -> pl.LazyFrame:
    by = ["step", "order"] if name == STRETCHES else ["step"]
    return (table if in_order else table.sort(by, maintain_order=True)).set_sorted("step")
