"""A traced scheduler for one small scene, and what its trace then says of a step."""

import ast
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from schedtrace.model.causes import Cause
from schedtrace.model.trace import ChunkCap, Exit, Header, Preemption, Step
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

    def told(self, step: int = -1) -> Told:
        """What the trace says of a step, the last one if not told otherwise; closes the trace."""
        self.scheduler.shutdown()
        header, *lines = next(self._folder.glob("engine-*.jsonl")).read_bytes().splitlines()
        about = msgspec.json.decode(header, type=Header)
        assert (about.exits_via, about.notices) == ("source", [])
        steps = [msgspec.json.decode(line, type=Step) for line in lines if b'"type":"step"' in line]
        line = steps[step]
        return Told(
            exits=[msgspec.structs.replace(taken, location=None) for taken in line.exits],
            guards=[_condition(taken) for taken in line.exits],
            caps=[msgspec.structs.replace(cap, location=None) for cap in line.caps],
            statements=[ast.unparse(_node(cap.location, ast.Assign)) for cap in line.caps],
            preempted=line.preempted,
            tokens={row.request_id: row.scheduled_tokens for row in line.requests},
            header=about,
        )


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
