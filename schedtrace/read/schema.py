"""The Polars schema of a trace line, derived from its struct so that the two cannot drift apart."""

import enum
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import polars as pl

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
