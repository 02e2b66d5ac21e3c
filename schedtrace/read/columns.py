"""Fields of a step, from its own line or the step before, and structs as columns of Polars frames."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

import msgspec
import polars as pl
from msgspec import UNSET

from schedtrace.model.trace import BEFORE_FIELDS, CARRIED_FIELDS, Delta, Present, Step, one_by_one
from schedtrace.model.trace_facts import Stalled, ThreadTime
from schedtrace.read.tables import NESTED, OF_STEP, empty_table, schema_of

FIELDS = tuple(
    name for name in Step.__struct_fields__ if name in Delta.__struct_fields__ and name != "changes"
)
"""Fields of a step without its requests."""
_AT = {name: at for at, name in enumerate(FIELDS)}
_NOTHING = len(FIELDS)
_IF_ABSENT = [
    _AT[name] if name in CARRIED_FIELDS else _AT[BEFORE_FIELDS[name]] if name in BEFORE_FIELDS else _NOTHING
    for name in FIELDS
]
"""Index, in the step before, of the value that an absent field has; an index past the end if that value is
null.
"""

Values = Sequence[Any]
"""Values of ``FIELDS``, in their order."""
_values_in = attrgetter(*FIELDS)


def values_of(line: Any) -> Values:
    """Return the ``Values`` of a full line, with each exit as a separate entry."""
    values: Values = _values_in(line)
    if not any(exit_.also for exit_ in line.exits):
        return values
    return (*values[: _AT["exits"]], one_by_one(line.exits), *values[_AT["exits"] + 1 :])


def rebuilt(delta: Any, before: Values) -> Values:
    """Return the values of a delta's step.

    Args:
        delta: As read.
        before: Of the step before.
    """
    carried = (*before, None)
    written = _values_in(delta)
    values = [carried[at] if value is UNSET else value for value, at in zip(written, _IF_ABSENT, strict=True)]
    if delta.exits is not UNSET:
        values[_AT["exits"]] = one_by_one(delta.exits)
    if delta.output_tokens is UNSET and values[_AT["output_us"]] is not None:
        values[_AT["output_tokens"]] = values[_AT["total_requests"]]
    return values


def value(values: Values, name: str) -> Any:
    """Return the value of a field."""
    return values[_AT[name]]


FLAT = {name: dtype for name, dtype in schema_of(Step).items() if name in FIELDS and name not in NESTED}
"""Schema of a step without its lists."""

Columns = Mapping[str, Sequence[Any]]


def columns_of(steps: Sequence[Values]) -> Columns:
    """Return the name of a field to its values in these steps."""
    return dict(zip(FIELDS, zip(*steps, strict=True) if steps else [()] * len(FIELDS), strict=True))


def frame_of(columns: Columns, schema: dict[str, Any]) -> pl.DataFrame:
    """Return the columns that ``schema`` names."""
    return pl.DataFrame([pl.Series(name, columns[name], dtype) for name, dtype in schema.items()])


def structs_of(rows: Sequence[Any], struct: type[msgspec.Struct]) -> pl.DataFrame:
    """Make a frame with a row per struct and a column per field."""
    schema = schema_of(struct)
    return frame_of({name: list(map(attrgetter(name), rows)) for name in schema}, schema)


def entries_of(steps: Columns, column: str) -> pl.DataFrame:
    """Make a frame with a row per entry of a list, with its step."""
    lists = steps[column]
    if not any(lists):  # most lists of most chunks of a growing trace
        return empty_table(column)
    lengths = pl.Series(map(len, lists), dtype=pl.Int64)
    of_step = frame_of(steps, dict.fromkeys(OF_STEP, pl.Int64)).select(pl.all().repeat_by(lengths).explode())
    rows = structs_of(list(chain.from_iterable(lists)), NESTED[column])
    return pl.concat([of_step, rows], how="horizontal")


def between_steps(column: str, lines: Sequence[Any]) -> pl.DataFrame:
    """Return the entries that are only in ``events`` lines and in no step, with their trials."""
    entries = [(line.trial, entry) for line in lines for entry in getattr(line, column)]
    trials = pl.Series("trial", [trial for trial, _ in entries], pl.Int64)
    return structs_of([entry for _, entry in entries], NESTED[column]).insert_column(0, trials)


def present_in(lines: Sequence[Any], keep: Literal["first", "all"] = "first") -> pl.DataFrame:
    """Return the requests present when a trace began, or after a gap, in their order: rows of ``Present``.

    Each request appears once, or, with ``all``, once for each line.

    The first columns are ``at_us`` and ``trial`` of the ``events`` line.
    """
    entries = [(line, entry) for line in lines for entry in line.present]
    of_line = {name: [getattr(line, name) for line, _ in entries] for name in ("at_us", "trial")}
    present = structs_of([entry for _, entry in entries], Present)
    columns = (pl.Series(name, values, pl.Int64) for name, values in of_line.items())
    rows = present.select(*columns, pl.all())
    once = ["request_id"] if keep == "first" else ["request_id", "at_us"]
    return rows.unique(once, keep="first", maintain_order=True)


def cpu_times(lines: Sequence[Any]) -> pl.DataFrame:
    """Make a frame with a row per ``cpu`` line and thread: the line's ``at_us`` and ``ThreadTime``.

    ``ran_us`` and ``waited_us`` count from the start of the thread.
    """
    threads = structs_of([thread for line in lines for thread in line.threads], ThreadTime)
    at_us = pl.Series("at_us", [line.at_us for line in lines for _ in line.threads], pl.Int64)
    return threads.insert_column(0, at_us)


STALLS = {"at_us": pl.Int64, **schema_of(Stalled)}


def stalls_in(lines: Sequence[Any]) -> pl.DataFrame:
    """Return a row per stall that the watchdog saw: ``at_us`` (time of the notice), fields of ``Stalled``.

    Args:
        lines: ``notice`` lines, others among them.
    """
    stalls: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line.stalled is None:
            continue
        reported = {name: getattr(line.stalled, name) for name in STALLS if name != "at_us"}
        stall = stalls.setdefault(line.stalled.since_us, {"at_us": line.at_us, **reported})
        stall["until_us"] = reported["until_us"]
    return pl.DataFrame(list(stalls.values()), schema=STALLS)
