"""Frames of a trace: a table of the steps, and one for each list in them; large ones may be on disk.

The schemas of all tables are derived from the structs of trace lines, so tables and lines always agree.

A *stretch* is a series of consecutive steps of a trial in each of which one request got the same number of
tokens, and its computed tokens rose by exactly that number. A step in which the request was new, resumed or
had draft tokens is a stretch of its own. All stretches are cut after a number of rows, so that the rows of
one table fit into memory.
"""

import enum
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import polars as pl
from msgspec import UNSET
from msgspec.structs import astuple
from polars.io.plugins import register_io_source

from schedtrace.model import safe_files
from schedtrace.model.delta import BEFORE_FIELDS, CARRIED_FIELDS, OUTPUT_FIELDS, Delta
from schedtrace.model.trace import Events, Present, ScheduledRequest, Step, one_by_one
from schedtrace.model.trace_facts import Stalled, ThreadTime

FOLDED = frozenset({"also"})
"""Fields of a line that become additional rows of the line's table, not columns."""


@cache
def schema_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the Polars type of each column that ``struct`` has in its table, by name.

    A free-form dict has no column.
    """
    hints = {field.name: field.type for field in msgspec.structs.fields(struct) if field.name not in FOLDED}
    return {name: _dtype(hint) for name, hint in hints.items() if get_origin(hint) is not dict}


def _dtype(hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {types.UnionType, Union}:
        return _dtype(next(argument for argument in arguments if argument is not type(None)))
    if origin is Literal:
        return pl.String
    if origin is list:
        return pl.List(_dtype(arguments[0]))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return pl.Struct(schema_of(hint))
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return pl.String
    return {int: pl.Int64, float: pl.Float64, bool: pl.Boolean, str: pl.String}[hint]


ROWS_AT_ONCE = 2**18
"""Approximate number of rows after which all stretches are cut."""
STRETCH_SCHEMA: dict[str, Any] = {
    "step": pl.Int64,
    "last_step": pl.Int64,
    "trial": pl.Int64,
    **schema_of(ScheduledRequest),
    "order": pl.Int64,
}
"""Schema of a table of stretches. ``step`` is the first step, and
``computed_tokens`` the number of tokens computed before it. In a step's list, the request with the lowest
``order`` comes first.
"""
DETAILS = {field.name: field.default for field in msgspec.structs.fields(ScheduledRequest)[3:]}
"""Fields of a row other than id and tokens, with the values that they have in a stretch of several steps."""
ORDINARY = tuple(DETAILS.values())


NESTED = {
    field.name: entry
    for field in msgspec.structs.fields(Step)
    if get_origin(field.type) is list
    for entry in get_args(field.type)
    if isinstance(entry, type) and issubclass(entry, msgspec.Struct)
}
"""Lists of a step, with the types of their entries."""
EVENTS = tuple(name for name in NESTED if name in Events.__struct_fields__)
"""Nested fields whose entries also occur between steps."""
LISTS = tuple(name for name in NESTED if name not in EVENTS and name != "requests")
"""Nested fields that have a table with one row per entry."""
STRETCHES = "stretches"
"""Name of the table of stretches."""
LARGE = (STRETCHES, *LISTS)
"""Names of the tables that grow with the number of steps."""
OF_STEP = ("step", "trial", "start_us")
"""Columns that every entry of a list takes from its step."""
ROWS_A_FILE = 2**17


class CannotWriteError(Exception):
    """Error: a table cannot be written, because there is no room or no permission."""


class Tables:
    """The large tables of a trace, filled chunk by chunk.

    Args:
        folder: Folder for Parquet files; None to keep the tables in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._frames: dict[str, list[pl.DataFrame]] = defaultdict(list)
        self._files = 0

    def put(self, tables: dict[str, pl.DataFrame]) -> None:
        """Add rows to tables.

        Raises:
            CannotWriteError: If the disk is full, for example.
        """
        for name, rows in tables.items():
            self._frames[name].append(rows)
            if self._folder is not None and sum(frame.height for frame in self._frames[name]) > ROWS_A_FILE:
                self._write(name)

    def scan(self, *, in_order: bool) -> dict[str, pl.LazyFrame]:
        """Return lazy frames of the tables by name, in the order of the steps.

        Args:
            in_order: Whether the rows were already added in that order.
        """
        if self._folder is None:
            return {
                name: _sorted(
                    pl.concat(self._frames[name] or [empty_table(name)]).lazy(), name, in_order=in_order
                )
                for name in LARGE
            }
        return scan(self._folder, in_order=in_order)

    def write_rest(self) -> None:
        """Write the remaining rows.

        Raises:
            CannotWriteError: If the disk is full, for example.
        """
        for name in list(self._frames) if self._folder is not None else ():
            self._write(name)

    def _write(self, name: str) -> None:
        rows = pl.concat(self._frames.pop(name))
        if rows.height and self._folder is not None:
            write_table(rows, self._folder / f"{name}-{self._files:06}.parquet")
            self._files += 1


def scan(folder: Path, *, in_order: bool) -> dict[str, pl.LazyFrame]:
    """Return the large tables in a folder."""
    files = {name: sorted(folder.glob(f"{name}-*.parquet")) for name in LARGE}
    tables = {name: pl.scan_parquet(own) if own else empty_table(name).lazy() for name, own in files.items()}
    return {name: _sorted(table, name, in_order=in_order) for name, table in tables.items()}


def write_table(table: pl.DataFrame, file: Path) -> None:
    """Write a Parquet file.

    Raises:
        CannotWriteError: If the disk is full, for example.
    """
    try:
        safe_files.create(file)
        table.write_parquet(file, compression="lz4")
    except (OSError, pl.exceptions.PolarsError) as error:
        raise CannotWriteError(str(error)) from error


@cache
def empty_table(name: str) -> pl.DataFrame:
    """Return a table without rows, for ``STRETCHES`` or for a list of a step."""
    if name == STRETCHES:
        return pl.DataFrame(schema=STRETCH_SCHEMA)
    return pl.DataFrame(schema=dict.fromkeys(OF_STEP, pl.Int64) | schema_of(NESTED[name]))


def _sorted(table: pl.LazyFrame, name: str, *, in_order: bool) -> pl.LazyFrame:
    by = ["step", "order"] if name == STRETCHES else ["step"]
    return (table if in_order else table.sort(by, maintain_order=True)).set_sorted("step")


ROW_COLUMNS = {
    **dict.fromkeys(OF_STEP, pl.Int64),
    **{
        name: dtype
        for name, dtype in STRETCH_SCHEMA.items()
        if name not in {"step", "last_step", "trial", "order"}
    },
}
"""Schema of a table of rows, one per request and step."""


def rows_of(stretches: pl.LazyFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return all rows of these stretches, in the order of the steps.

    Args:
        stretches: Stretches of a trace.
        steps: Steps of the trace; at least those of the stretches.
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
        .select(list(ROW_COLUMNS))
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
    """Return the rows of all steps as a lazy frame, read in pieces so that they are never all in memory."""

    def source(
        with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        left = n_rows
        # Windows are consecutive groups of steps with about ``ROWS_AT_ONCE`` rows each.
        at = pl.col("total_requests").fill_null(1).clip(1, ROWS_AT_ONCE).cum_sum() // ROWS_AT_ONCE
        windows = steps.group_by(at.alias("at"), maintain_order=True).agg(
            pl.col("step").first(), pl.col("step").last().alias("last")
        )
        for first, last in windows.select("step", "last").iter_rows():
            rows = rows_between(stretches, steps, first, last)
            if predicate is not None:
                rows = rows.filter(predicate)
            if left is not None:
                rows = rows.head(left)
                left -= rows.height
            yield rows if with_columns is None else rows.select(with_columns)
            if left == 0:
                return

    return register_io_source(source, schema=ROW_COLUMNS).set_sorted("step")


FIELDS = tuple(
    name for name in Step.__struct_fields__ if name in Delta.__struct_fields__ and name != "changes"
)
"""Fields of a step other than ``requests`` and ``changes``."""
FLAT = {name: dtype for name, dtype in schema_of(Step).items() if name in FIELDS and name not in NESTED}
"""Schema of a step without its lists."""

_REQUESTS = Step.__struct_fields__.index("requests")
"""Index of ``requests``, the field of a step that a delta does not have."""
Columns = Mapping[str, Sequence[Any]]
"""Values of each field in ``FIELDS`` over some steps, by the field's name."""


def columns_of(lines: Sequence[Any], before: Mapping[str, Any]) -> Columns:
    """Return the values of each field over some steps, with each exit as a separate entry.

    Args:
        lines: Full lines and deltas as read, each delta after the step that it continues.
        before: Value of each field in the step before the first line, if that line is a delta.
    """
    rows = [
        (*values[:_REQUESTS], *values[_REQUESTS + 1 :]) if hasattr(line, "requests") else values
        for line, values in zip(lines, map(astuple, lines), strict=True)
    ]
    columns = _columns_in(rows, Delta.__struct_fields__)
    del columns["changes"]
    columns["exits"] = [exits and one_by_one(exits) for exits in columns["exits"]]
    for name in CARRIED_FIELDS:
        latest = before.get(name)
        columns[name] = [latest := latest if value is UNSET else value for value in columns[name]]
    absent: dict[str, Iterable[Any]] = dict.fromkeys(OUTPUT_FIELDS, repeat(None))
    for name, source in BEFORE_FIELDS.items():
        absent[name] = chain([before.get(source)], columns[source])
    absent["output_tokens"] = (
        requests if isinstance(output_us, int) else None
        for output_us, requests in zip(columns["output_us"], columns["total_requests"], strict=True)
    )
    for name, defaults in absent.items():
        either = zip(columns[name], defaults, strict=False)
        columns[name] = [default if value is UNSET else value for value, default in either]
    return columns


def _columns_in(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return the columns of rows, by their names."""
    return dict(zip(names, zip(*rows, strict=True) if rows else [()] * len(names), strict=True))


def frame_of(columns: Columns, schema: dict[str, Any]) -> pl.DataFrame:
    """Return a frame with the columns that ``schema`` names."""
    return pl.DataFrame([pl.Series(name, columns[name], dtype) for name, dtype in schema.items()])


def structs_of(rows: Sequence[Any], struct: type[msgspec.Struct]) -> pl.DataFrame:
    """Return a frame with a row per struct and a column per field."""
    schema = schema_of(struct)
    if not rows:
        return pl.DataFrame(schema=schema)
    return frame_of(_columns_in(list(map(astuple, rows)), type(rows[0]).__struct_fields__), schema)


def entries_of(steps: Columns, column: str) -> pl.DataFrame:
    """Return a frame with a row per entry of a list, each with the ``OF_STEP`` columns of its step."""
    lists = steps[column]
    if not any(lists):  # most lists of most chunks of a growing trace
        return empty_table(column)
    lengths = pl.Series(map(len, lists), dtype=pl.Int64)
    of_step = frame_of(steps, dict.fromkeys(OF_STEP, pl.Int64)).select(pl.all().repeat_by(lengths).explode())
    rows = structs_of(list(chain.from_iterable(lists)), NESTED[column])
    return pl.concat([of_step, rows], how="horizontal")


def event_rows(column: str, in_steps: pl.DataFrame, idle: Sequence[Any]) -> pl.DataFrame:
    """Return an ``EVENTS`` table: the entries in steps, then those of ``events`` lines, with their trials."""
    entries = [(line.trial, entry) for line in idle for entry in getattr(line, column)]
    if not entries:
        return in_steps
    trials = pl.Series("trial", [trial for trial, _ in entries], pl.Int64)
    between_steps = structs_of([entry for _, entry in entries], NESTED[column]).insert_column(0, trials)
    return pl.concat([in_steps, between_steps], how="diagonal")


NOBODY_PRESENT = pl.DataFrame(schema={"at_us": pl.Int64, "trial": pl.Int64, **schema_of(Present)})
"""Table of ``present_in`` without rows."""


def present_in(lines: Sequence[Any], keep: Literal["first", "all"] = "first") -> pl.DataFrame:
    """Return the requests present when a trace began or a gap ended: rows of ``Present``, in order of lines.

    Each request appears once or, with ``keep="all"``, once for each line that lists it.

    The first columns are ``at_us`` and ``trial`` of the ``events`` line.
    """
    entries = [(line, entry) for line in lines for entry in line.present]
    if not entries:
        return NOBODY_PRESENT
    of_line = {name: [getattr(line, name) for line, _ in entries] for name in ("at_us", "trial")}
    present = structs_of([entry for _, entry in entries], Present)
    columns = (pl.Series(name, values, pl.Int64) for name, values in of_line.items())
    rows = present.select(*columns, pl.all())
    once = ["request_id"] if keep == "first" else ["request_id", "at_us"]
    return rows.unique(once, keep="first", maintain_order=True)


def cpu_times(lines: Sequence[Any]) -> pl.DataFrame:
    """Return a frame with a row per ``cpu`` line and thread: ``at_us`` and the fields of ``ThreadTime``.

    ``ran_us`` and ``waited_us`` count from the start of the thread.
    """
    threads = structs_of([thread for line in lines for thread in line.threads], ThreadTime)
    at_us = pl.Series("at_us", [line.at_us for line in lines for _ in line.threads], pl.Int64)
    return threads.insert_column(0, at_us)


STALLS = {"at_us": pl.Int64, **schema_of(Stalled)}


def stalls_in(lines: Sequence[Any]) -> pl.DataFrame:
    """Return one row per stall that the watchdog saw: ``at_us`` of the notice and the fields of ``Stalled``.

    Args:
        lines: ``notice`` lines, including those without a stall.
    """
    stalls: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line.stalled is None:
            continue
        reported = {name: getattr(line.stalled, name) for name in STALLS if name != "at_us"}
        stall = stalls.setdefault(line.stalled.since_us, {"at_us": line.at_us, **reported})
        stall["until_us"] = reported["until_us"]
    return pl.DataFrame(list(stalls.values()), schema=STALLS)
