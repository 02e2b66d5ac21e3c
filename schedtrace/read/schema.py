"""The Polars schema of a trace line, derived from its struct so that the two cannot drift apart."""

import enum
import types
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import polars as pl


def schema_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Column name to Polars type, for every field of ``struct`` that is not a free-form dict."""
    hints = {field.name: field.type for field in msgspec.structs.fields(struct)}
    return {name: _dtype(hint) for name, hint in hints.items() if get_origin(hint) is not dict}


def defaults_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Fields that a line leaves out at their default, where that is a scalar other than None."""
    return {
        field.name: field.default
        for field in msgspec.structs.fields(struct)
        if isinstance(field.default, bool | int | float | str)
    }


def required_of(struct: type[msgspec.Struct]) -> list[str]:
    """Fields that a line must have and that may not be null."""
    return [
        field.name
        for field in msgspec.structs.fields(struct)
        if field.required and type(None) not in get_args(field.type)
    ]


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
