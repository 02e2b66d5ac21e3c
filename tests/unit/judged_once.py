"""Tables and judgements of engines, made once a worker for tests that only read what follows from them.

Most of an analysis is spent here, and the tests of commands, comparisons and ``watch`` have few timelines.
The key is all that a timeline holds, so another trace or window is judged anew.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from pickle import dumps, loads
from typing import Any, ParamSpec, TypeVar

import polars as pl

from schedtrace.diagnose.analyze import OneEngine, judge, one_engine
from schedtrace.diagnose.run_statistics import trial_reports
from schedtrace.model.manifest import Manifest
from schedtrace.timeline import timeline as timeline_module
from schedtrace.timeline.timeline import Timeline

P = ParamSpec("P")
T = TypeVar("T")


def comparable(value: Any) -> Any:
    """Return what has the same pickle if the value is the same: rows of tables, and sets in order."""
    match value:
        case pl.LazyFrame():
            return comparable(value.collect())
        case pl.DataFrame():
            result: Any = [*map(str, value.schema.items()), value.rows()]
        case frozenset():
            result = sorted(map(str, value))
        case list() | tuple() | pl.Series():
            result = [comparable(part) for part in value]
        case dict():
            result = [(name, comparable(part)) for name, part in value.items()]
        case _ if is_dataclass(value):
            result = [comparable(getattr(value, field.name)) for field in fields(value)]
        case _:
            result = repr(value)
    return result


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


judge_once, make_tables_once = once(judge), once(timeline_module.make_tables)
engine_once = once(lambda timeline: one_engine(timeline, None, engines=1))


def one_engine_once(timeline: Timeline, manifest: Manifest | None, *, engines: int) -> OneEngine:
    """Return what ``one_engine`` returns; only the trials' figures depend on more than the timeline."""
    trials = trial_reports(timeline, manifest, engines=engines)
    return replace(engine_once(timeline), trials=trials)
