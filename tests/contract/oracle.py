"""Which loop exits an untouched function takes: an observer that shares no code with the recorder.

The interpreter tells every line of the function right before it runs. Where a loop was left follows from
the lines alone: a ``break`` or ``continue`` runs, or the line after a loop's condition is none of its body.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType, FunctionType
from typing import Any

from tests.contract.lines import WAYS


@dataclass(frozen=True)
class Place:
    """Where a loop can be left."""

    line: int
    kind: str
    """``break``, ``continue``, ``condition``, or ``gate`` (the condition of an ``if`` around a loop)."""
    loop: int
    """Counts the function's outermost ``while`` loops from 0."""
    bound: frozenset[str] = frozenset()
    """Names that every way to here in this turn of that loop assigns."""
    head: range = range(0)
    body: range = range(0)
    """Lines of a condition, and those that it leads to where it holds."""


Note = Callable[[Place, dict[str, Any]], Any]
"""What to keep of an exit, from the function's variables right before it; None: nothing."""


class Oracle:
    """Watches a function while it runs.

    Args:
        function: With its loops in plain sight: no statement shares a line with an exit.
        note: What to keep.
        lines: How to hear of its lines.
    """

    def __init__(self, function: FunctionType, note: Note, lines: Any = WAYS[-1]) -> None:
        self._code, self._note, self._lines = function.__code__, note, lines
        self._exits: dict[int, Place] = {}
        self._conditions: list[Place] = []
        self._loops = 0
        self._find(_definition(function).body)
        self._heads = {line: place for place in self._conditions for line in place.head}
        self._telling = {*self._exits, *self._heads}
        self.places = [*self._exits.values(), *self._conditions]

    @contextmanager
    def watching(self) -> Iterator[list[Any]]:
        """Gives a list that holds, at the end, what was kept of each exit taken, in order."""
        kept: list[Any] = []
        asked: Place | None = None

        def told(line: int, frame: FrameType) -> None:
            nonlocal asked
            if asked is None and line not in self._telling:
                return
            left = asked if asked and line not in asked.head and line not in asked.body else None
            places = [place for place in (left, self._exits.get(line)) if place]
            notes = [self._note(place, frame.f_locals) for place in places]
            kept.extend(note for note in notes if note is not None)
            asked = self._heads.get(line)

        with self._lines(self._code, told):
            yield kept

    def _find(self, body: list[ast.stmt], depth: int = 0, bound: frozenset[str] = frozenset()) -> None:
        for node in body:
            loop = self._loops - (depth > 0)
            match node:
                case ast.While():
                    if not isinstance(node.test, ast.Constant):
                        self._conditions.append(_condition(node, "condition", loop))
                    self._loops += not depth
                    self._find(node.body, depth + 1, bound)
                    self._find(node.orelse, depth, bound)
                case ast.For() | ast.FunctionDef():
                    pass  # leaving a helper's loop stops nothing
                case ast.Break() | ast.Continue():
                    kind = type(node).__name__.lower()
                    self._exits[node.lineno] = Place(node.lineno, kind, loop, bound)
                case ast.If(ast.Compare(ast.Name("new_blocks"), [operator])) if depth == 2:
                    # Where there are blocks the allocation loop ends well.
                    self._find(node.body if isinstance(operator, ast.Is) else node.orelse, depth, bound)
                case ast.Assign([ast.Name(name)]):
                    bound |= {name} if depth == 1 else frozenset()
                case _:
                    if not depth and any(isinstance(part, ast.While) for part in getattr(node, "body", ())):
                        self._conditions.append(_condition(node, "gate", loop))
                    for part in ("body", "orelse", "finalbody"):
                        self._find(getattr(node, part, []), depth, bound)


@cache  # to parse vLLM's scheduler takes as long as half a load
def _definition(function: FunctionType) -> ast.FunctionDef:
    module = ast.parse(inspect.getsource(sys.modules[function.__module__]))
    place = (function.__name__, function.__code__.co_firstlineno)
    functions = (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))
    [found] = [node for node in functions if (node.name, node.lineno) == place]
    return found


def _condition(node: Any, kind: str, loop: int) -> Place:
    head = range(node.lineno, node.test.end_lineno + 1)
    return Place(node.lineno, kind, loop, head=head, body=range(head.stop, node.body[-1].end_lineno + 1))
