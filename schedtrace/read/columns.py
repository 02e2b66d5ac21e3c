"""Structs and the values of steps as columns: a Polars frame a kind."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
import polars as pl

from schedtrace.model.trace import Step
from schedtrace.read.deltas import FIELDS, Values
from schedtrace.read.schema import schema_of
from schedtrace.read.tables import NESTED, OF_STEP

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
    lengths = pl.Series(map(len, lists), dtype=pl.Int64)
    of_step = frame_of(steps, dict.fromkeys(OF_STEP, pl.Int64)).select(pl.all().repeat_by(lengths).explode())
    rows = structs_of(list(chain.from_iterable(lists)), NESTED[column])
    return pl.concat([of_step, rows], how="horizontal")


def between_steps(column: str, idle: Sequence[tuple[int | None, msgspec.Struct]]) -> pl.DataFrame:
    """Entries that no step told, with their trial."""
    trials = pl.Series("trial", [trial for trial, _ in idle], pl.Int64)
    return structs_of([entry for _, entry in idle], NESTED[column]).insert_column(0, trials)
