"""The fields of a step, of its own line or the step before; these and structs as columns of Polars frames.

The schema of a frame is derived from the struct of a trace line, so that the two cannot drift apart.
"""

import enum
import types
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import polars as pl
from msgspec import UNSET

from schedtrace.model.trace import BEFORE_FIELDS, CARRIED_FIELDS, Delta, Present, Step
from schedtrace.model.trace_facts import ThreadTime
from schedtrace.read.tables import NESTED, OF_STEP, empty

LARGEST = 10**18
"""Nothing that is counted or timed has so many digits, and Polars' integers hold it."""
LONGEST_US = 10**15
"""No time is farther from the begin of its trace: 31 years."""
ANCHOR_US = msgspec.Meta(ge=0, lt=10**16)
"""Times of the machine's clocks; viewers count both in nanoseconds, in 64 bits."""


def schema_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Column name to Polars type, for every field of ``struct`` that is not a free-form dict."""
    hints = {field.name: field.type for field in msgspec.structs.fields(struct)}
    return {name: _dtype(hint) for name, hint in hints.items() if get_origin(hint) is not dict}


def readable(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The struct as a reader takes it.

    A newer version may know more words than a literal names, and no number may be too large for Polars.
    """
    fields: list[Any] = []
    for field in msgspec.structs.fields(struct):
        hint = _readable(field.type, _bounds(field.name))
        if field.required:
            fields.append((field.name, hint))
        elif field.default is msgspec.NODEFAULT:
            fields.append((field.name, hint, msgspec.field(default_factory=field.default_factory)))
        else:
            fields.append((field.name, hint, field.default))
    config = struct.__struct_config__
    return msgspec.defstruct(
        struct.__name__,
        fields,
        tag_field=config.tag_field,
        tag=config.tag,
        kw_only=True,
        gc=False,
        array_like=config.array_like,
        omit_defaults=config.omit_defaults,
    )


def _bounds(name: str) -> msgspec.Meta:
    if name.endswith("_anchor_us"):
        return ANCHOR_US
    largest = LONGEST_US if name.endswith("_us") else LARGEST
    return msgspec.Meta(gt=-largest, lt=largest)


def _readable(hint: Any, bounds: msgspec.Meta) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {types.UnionType, Union}:
        return Union[tuple(_readable(argument, bounds) for argument in arguments)]  # noqa: UP007  # made at run time
    if origin is Literal:
        return str
    if origin is list:
        return list[_readable(arguments[0], bounds)]  # type: ignore[misc]  # made at run time
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return readable(hint)
    return Annotated[int, bounds] if hint is int else hint


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


FIELDS = tuple(
    name for name in Step.__struct_fields__ if name in Delta.__struct_fields__ and name != "changes"
)
"""Of a step, its requests left out."""
_AT = {name: at for at, name in enumerate(FIELDS)}
_NOTHING = len(FIELDS)
_IF_ABSENT = [
    _AT[name] if name in CARRIED_FIELDS else _AT[BEFORE_FIELDS[name]] if name in BEFORE_FIELDS else _NOTHING
    for name in FIELDS
]
"""Place in the step before of what an absent field is; one behind its end for those that are null then."""

Values = Sequence[Any]
"""Of ``FIELDS``, in their order."""
values_of = attrgetter(*FIELDS)
"""``Values`` of a full line."""


def rebuilt(delta: Any, before: Values) -> Values:
    """The values of a delta's step.

    Args:
        delta: As read.
        before: Of the step before.
    """
    known = (*before, None)
    told = values_of(delta)
    values = [known[at] if value is UNSET else value for value, at in zip(told, _IF_ABSENT, strict=True)]
    if delta.output_tokens is UNSET and values[_AT["output_us"]] is not None:
        values[_AT["output_tokens"]] = values[_AT["total_requests"]]
    return values


def value(values: Values, name: str) -> Any:
    """One of them."""
    return values[_AT[name]]


FLAT = {name: dtype for name, dtype in schema_of(Step).items() if name in FIELDS and name not in NESTED}
"""Of a step without its lists."""

Columns = Mapping[str, Sequence[Any]]


def columns_of(steps: Sequence[Values]) -> Columns:
    """Name of a field to its values in these steps."""
    return dict(zip(FIELDS, zip(*steps, strict=True) if steps else [()] * len(FIELDS), strict=True))


def frame_of(columns: Columns, schema: dict[str, Any]) -> pl.DataFrame:
    """The columns that ``schema`` names."""
    return pl.DataFrame([pl.Series(name, columns[name], dtype) for name, dtype in schema.items()])


def structs_of(rows: Sequence[Any], struct: type[msgspec.Struct]) -> pl.DataFrame:
    """One row per struct, one column per field."""
    schema = schema_of(struct)
    return frame_of({name: list(map(attrgetter(name), rows)) for name in schema}, schema)


def entries_of(steps: Columns, column: str) -> pl.DataFrame:
    """One row per entry of a list, with the step it belongs to."""
    lists = steps[column]
    if not any(lists):  # most lists of most chunks of a growing trace
        return empty(column)
    lengths = pl.Series(map(len, lists), dtype=pl.Int64)
    of_step = frame_of(steps, dict.fromkeys(OF_STEP, pl.Int64)).select(pl.all().repeat_by(lengths).explode())
    rows = structs_of(list(chain.from_iterable(lists)), NESTED[column])
    return pl.concat([of_step, rows], how="horizontal")


def between_steps(column: str, lines: Sequence[Any]) -> pl.DataFrame:
    """Entries that no step told but ``events`` lines, with the trials of these."""
    told = [(line.trial, entry) for line in lines for entry in getattr(line, column)]
    trials = pl.Series("trial", [trial for trial, _ in told], pl.Int64)
    return structs_of([entry for _, entry in told], NESTED[column]).insert_column(0, trials)


def present_in(lines: Sequence[Any]) -> pl.DataFrame:
    """One row per request that was there when a trace began, or after a gap, in their order: of ``Present``.

    Before them ``at_us`` and ``trial`` of the ``events`` line that has them.
    """
    told = [(line, entry) for line in lines for entry in line.present]
    of_line = {name: [getattr(line, name) for line, _ in told] for name in ("at_us", "trial")}
    found = structs_of([entry for _, entry in told], Present)
    columns = (pl.Series(name, values, pl.Int64) for name, values in of_line.items())
    return found.select(*columns, pl.all()).unique("request_id", keep="first", maintain_order=True)


def cpu_times(lines: Sequence[Any]) -> pl.DataFrame:
    """One row per ``cpu`` line and thread: the line's ``at_us`` and the fields of ``ThreadTime``.

    ``ran_us`` and ``waited_us`` count from the thread's beginning.
    """
    threads = structs_of([thread for line in lines for thread in line.threads], ThreadTime)
    at_us = pl.Series("at_us", [line.at_us for line in lines for _ in line.threads], pl.Int64)
    return threads.insert_column(0, at_us)
