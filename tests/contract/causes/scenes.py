"""A traced scheduler for one small scene, and what its trace then says of a step."""

import ast
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import msgspec
import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.model.trace import ChunkCap, Exit, Header, Preemption, ScheduledRequest
from schedtrace.read.run import read_run
from schedtrace.read.tables import schema_of
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver

waiting = partial(Exit, "waiting", via="source")
running = partial(Exit, "running", via="source")
"""Expected exits: kind, cause, request id, budget left."""

PLACES = {"break": ast.Break, "continue": ast.Continue, "condition": ast.While, "gate": ast.If}


def nobody_is_left(budget_left: int) -> Exit:
    """How most steps end: who is skipped leaves the queue for the rest of the step, too."""
    return waiting("break", Cause.QUEUE_EMPTY, None, budget_left)


@dataclass(frozen=True)
class Told:
    """What one step's line says; locations are replaced by the code that stands there."""

    exits: list[Exit]
    guards: list[str]
    """vLLM's condition for each of the exits."""
    caps: list[ChunkCap]
    statements: list[str]
    """vLLM's statement for each of the caps."""
    preempted: list[Preemption]
    tokens: dict[str, int]
    """What each request got."""
    header: Header


class Scene(Driver):
    """A traced engine that writes to ``folder``."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(options.pop("wrap", traced_class), **options)
        self._folder = folder

    def after(self, *, steps: int = 1, throttled: bool = False, **requests: int | dict[str, Any]) -> Self:
        """Add requests by prompt length or options, and step; return the scene itself."""
        for name, options in requests.items():
            self.add(name, **(options if isinstance(options, dict) else {"prompt": options}))
        for _ in range(steps):
            self.step(*[True] * throttled)
        return self

    def play(self, **requests: Any) -> Told:
        """Do as ``after`` does, and return what the last of the steps says."""
        return self.after(**requests).told()

    def told(self, step: int = -1) -> Told:
        """What the trace says of a step, the last one if not told otherwise; closes the trace."""
        self.scheduler.shutdown()
        [trace] = read_run(self._folder).traces
        about = trace.header
        assert (about.exits_via, about.notices) == ("source", [])
        number = trace.steps["step"][step]
        exits = _entries(trace.exits(), number, Exit)
        caps = _entries(trace.caps(), number, ChunkCap)
        return Told(
            exits=[msgspec.structs.replace(taken, location=None) for taken in exits],
            guards=[_condition(taken) for taken in exits],
            caps=[msgspec.structs.replace(cap, location=None) for cap in caps],
            statements=[ast.unparse(_node(cap.location, ast.Assign)) for cap in caps],
            preempted=_entries(trace.preemptions(), number, Preemption),
            tokens={
                row.request_id: row.scheduled_tokens
                for row in _entries(trace.requests(), number, ScheduledRequest)
            },
            header=about,
        )


def _entries(table: pl.LazyFrame, number: int, struct: type) -> list[Any]:
    """The rows of a step, as the trace format has them."""
    rows = table.filter(step=number).select(schema_of(struct).keys()).collect()
    return [msgspec.convert(row, struct) for row in rows.iter_rows(named=True)]


def _condition(taken: Exit) -> str:
    """The condition of a loop or gate; for ``break`` and ``continue`` the innermost ``if`` around it."""
    node = _node(taken.location, PLACES[taken.kind])
    if isinstance(node, ast.While | ast.If):
        return ast.unparse(node.test)
    ifs = [test for test in _nodes(taken.location) if isinstance(test, ast.If)]
    around = [test for test in ifs if test.lineno < node.lineno <= test.end_lineno]
    return ast.unparse(max(around, key=lambda test: test.lineno).test)


def _node(location: str, kind: type) -> Any:
    """The statement of that kind in that line: there must be one."""
    line = int(location.rpartition(":")[2])
    [node] = [node for node in _nodes(location) if isinstance(node, kind) and node.lineno == line]
    return node


def _nodes(location: str) -> list[ast.AST]:
    return _parsed(location.rpartition(":")[0])


@cache
def _parsed(file: str) -> list[ast.AST]:
    path = find_spec(file.removesuffix(".py").replace("/", ".")).origin
    return list(ast.walk(ast.parse(Path(path).read_text())))
