"""Which loops of ``schedule()`` hand out tokens: over those who run, or over those who wait."""

import ast

from schedtrace.model.trace import Loop
from schedtrace.record import syntax

_TAKES = frozenset({"peek_request", "pop_request"})


def loop_of(node: ast.While | ast.For) -> Loop | None:
    """Which of the scheduler's two loops this is; None: a helper's loop."""
    if not syntax.hands_out_tokens(node):
        return None
    condition = syntax.names(node.test if isinstance(node, ast.While) else node.iter)
    body = syntax.names(ast.Module(node.body, []))
    if not syntax.QUEUES.isdisjoint(condition) or not _TAKES.isdisjoint(body):
        return "waiting"
    if "running" in condition:
        return "running"
    return None if syntax.QUEUES.isdisjoint(body) else "waiting"


def first_loop(statements: list[ast.stmt]) -> Loop | None:
    """The first of the scheduler's loops among these statements."""
    return next(filter(None, map(loop_of, syntax.loops(statements))), None)
