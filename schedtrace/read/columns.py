"""Structs as columns: a Polars frame a kind of struct."""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
import polars as pl

from schedtrace.model.trace import Step
from schedtrace.read.schema import schema_of
from schedtrace.read.tables import NESTED, OF_STEP

FLAT = {name: dtype for name, dtype in schema_of(Step).items() if name not in NESTED}


def frame_of(rows: Sequence[Any], schema: dict[str, Any]) -> pl.DataFrame:
    """One row per struct, one column per field that ``schema`` names."""
    return pl.DataFrame(
        [pl.Series(name, list(map(attrgetter(name), rows)), dtype) for name, dtype in schema.items()]
    )


def steps_of(steps: Sequence[Any]) -> pl.DataFrame:
    """Steps without their lists."""
    return frame_of(steps, FLAT)


def entries_of(steps: Sequence[Any], column: str) -> pl.DataFrame:
    """One row per entry of a list, with the step it belongs to."""
    lists = list(map(attrgetter(column), steps))
    told = frame_of(steps, dict.fromkeys(OF_STEP, pl.Int64))
    of_step = told.select(pl.all().repeat_by(pl.Series(map(len, lists), dtype=pl.Int64)).explode())
    return pl.concat(
        [of_step, frame_of(list(chain.from_iterable(lists)), schema_of(NESTED[column]))], how="horizontal"
    )


def between_steps(column: str, idle: Sequence[tuple[int | None, msgspec.Struct]]) -> pl.DataFrame:
    """Entries that no step told, with their trial."""
    trials = pl.Series("trial", [trial for trial, _ in idle], pl.Int64)
    return frame_of([entry for _, entry in idle], schema_of(NESTED[column])).insert_column(0, trials)
