"""Judgements of engines that are made once a worker, for tests that only read what follows from them.

Half of an analysis is spent here, and the tests of commands, comparisons and ``watch`` have few timelines. The
key is all that a timeline holds, so another trace, manifest or window is judged anew.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from pickle import dumps, loads
from typing import Any, ParamSpec, TypeVar

import polars as pl

from schedtrace.diagnose import one_engine

P = ParamSpec("P")
T = TypeVar("T")


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


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it computes once for equal arguments; each caller gets a copy of its own."""
    results: dict[bytes, bytes] = {}

    @wraps(function)
    def computed_once(*args: P.args, **options: P.kwargs) -> T:
        key = dumps(comparable([args, options]))
        if key not in results:
            results[key] = dumps(function(*args, **options))
        return loads(results[key])  # type: ignore[no-any-return]  # noqa: S301  # of this process

    return computed_once


one_engine_once, judge_once = once(one_engine.one_engine), once(one_engine.judge)
