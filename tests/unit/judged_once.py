"""Judgement of an engine's timeline, made once a worker for all tests that only read what follows from it.

Half of an analysis is spent here, and the tests of commands and comparisons have few timelines. The key is all
that a timeline holds, so another trace, manifest or window is judged anew.
"""

from dataclasses import fields, is_dataclass
from pickle import dumps, loads
from typing import Any

import polars as pl

from schedtrace.diagnose.one_engine import OneEngine, one_engine
from schedtrace.model.manifest import Manifest
from schedtrace.timeline.timeline import Timeline

JUDGED: dict[bytes, bytes] = {}


def comparable(value: Any) -> Any:
    """Return what has the same pickle if the value is the same: rows of tables, and sets in order."""
    if isinstance(value, pl.LazyFrame):
        return comparable(value.collect())
    if isinstance(value, pl.DataFrame):
        return [(name, str(dtype)) for name, dtype in value.schema.items()], value.rows()
    if isinstance(value, pl.Series):
        return value.to_list()
    if isinstance(value, frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [comparable(part) for part in value]
    if isinstance(value, dict):
        return [(name, comparable(part)) for name, part in value.items()]
    if is_dataclass(value):
        return [comparable(getattr(value, field.name)) for field in fields(value)]
    return repr(value)


def judged_once(timeline: Timeline, manifest: Manifest | None, *, engines: int) -> OneEngine:
    """Return what ``one_engine`` returns, in a copy of the caller's own."""
    key = dumps(comparable([timeline, manifest, engines]))
    if key not in JUDGED:
        JUDGED[key] = dumps(one_engine(timeline, manifest, engines=engines))
    return loads(JUDGED[key])  # type: ignore[no-any-return]  # noqa: S301  # of this process
