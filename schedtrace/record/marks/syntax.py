"""Queries of syntax trees, for the marks and for the code that finds why an allocation failed."""

import ast
import copy
from collections.abc import Iterator
from itertools import zip_longest
from typing import TypeVar

from schedtrace.model.trace import Loop

_Node = TypeVar("_Node", bound=ast.AST)

QUEUES = frozenset(
    {"waiting", "skipped_waiting", "kv_holding_waiting", "request_queue", "peek_request", "pop_request"}
)
"""Names that identify a waiting queue."""

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_PURE = (
    ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.IfExp,
    ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop, ast.operator,
)  # fmt: skip


def names_in(node: ast.AST) -> frozenset[str]:
    """Return all names, attribute names and numbers (without 0) in a piece of code."""
    texts: set[str] = set()
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                texts.add(name)
            case ast.Constant(value=int() | float() as number) if number and number is not True:
                texts.add(str(number))
            case _:
                pass
    return frozenset(texts)


def binds(node: ast.AST) -> frozenset[str]:
    """Return the names that are certainly bound after a statement."""
    match node:
        case ast.Assign(targets=targets):
            parts: list[ast.expr] = targets
        case ast.AnnAssign(target=target) if node.value is None:
            parts = []
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            parts = [target]
        case ast.If(body=body, orelse=orelse):
            leaves = ast.Break | ast.Continue | ast.Return | ast.Raise
            # Control passes the end of a side unless its last statement leaves it.
            sides = [side for side in (body, orelse) if not (side and isinstance(side[-1], leaves))]
            bound = [frozenset[str]().union(*map(binds, side)) for side in sides]
            return frozenset.intersection(*bound) if bound else frozenset()
        case _:
            parts = []
    return frozenset[str]().union(*map(stores, parts))


def stores(target: ast.expr) -> frozenset[str]:
    """Return the names that an assignment to ``target`` binds."""
    names_in = (part for part in ast.walk(target) if isinstance(part, ast.Name))
    return frozenset(part.id for part in names_in if isinstance(part.ctx, ast.Store))


def rebinds(node: ast.AST) -> frozenset[str]:
    """Return the names whose value may change, or vanish, in a statement."""
    touched = (part for part in ast.walk(node) if isinstance(part, ast.Name))
    return frozenset(part.id for part in touched if not isinstance(part.ctx, ast.Load))


def unbinds(function: ast.FunctionDef) -> frozenset[str]:
    """Return the names that the function unbinds anywhere."""
    deleted = {
        part.id
        for part in own_nodes(function)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Del)
    }
    handlers = (part for part in own_nodes(function) if isinstance(part, ast.ExceptHandler))
    return frozenset(deleted | {handler.name for handler in handlers if handler.name})


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function's own code, without nested functions and classes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _SCOPES):
            yield child
            yield from own_nodes(child)


def loops(statements: list[ast.stmt]) -> Iterator[ast.While | ast.For]:
    """Yield the loops among these statements in order, outer loops first."""
    for node in own_nodes(ast.Module(statements, [])):
        if isinstance(node, ast.While | ast.For):
            yield node


def call_of(node: ast.AST, method: str) -> ast.Call | None:
    """Return the first call ``....method(...)`` in the node."""
    for part in own_nodes(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == method:
            return part
    return None


def counted_tokens(function: ast.FunctionDef) -> str:
    """Return the variable whose value is stored as a request's ``num_scheduled_tokens``."""
    for node in own_nodes(function):
        match node:
            case ast.Assign([target], ast.Name(name)) if _counts_tokens(target):
                return name
            case _:
                pass
    return "num_new_tokens"


def _counts_tokens(target: ast.expr) -> bool:
    """Return whether the node is ``num_scheduled_tokens[...]``."""
    match target:
        case ast.Subscript(ast.Name("num_scheduled_tokens") | ast.Attribute(attr="num_scheduled_tokens")):
            return True
        case _:
            return False


def allocated_request(function: ast.FunctionDef) -> str:
    """Return the variable with the request in question, which is the first argument of ``allocate_slots``."""
    match call_of(function, "allocate_slots"):
        case ast.Call(args=[ast.Name(name), *_]):
            return name
        case _:
            return "request"


def repeated_arguments(call: ast.Call | None) -> ast.expr | None:
    """Return the arguments of a call for a second evaluation, as ``((positional), {keyword: value})``.

    Keyword arguments that are not safe to evaluate twice are left out. Return None if a positional argument
    is not safe.
    """
    if call is None or not all(map(is_pure, call.args)):
        return None
    repeatable = [
        (keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg and is_pure(keyword.value)
    ]
    keywords = ast.Dict([ast.Constant(name) for name, _ in repeatable], [value for _, value in repeatable])
    return copy.deepcopy(ast.Tuple([ast.Tuple(call.args, ast.Load()), keywords], ast.Load()))


def is_pure(node: ast.AST) -> bool:
    """Return whether a second evaluation has no effect: names, attributes, arithmetic, ``len(self.running)``.

    A queue may change when it is called. An expression with a queue is therefore not pure, unless it is only
    the queue's name.
    """
    if isinstance(node, ast.Name | ast.Attribute):
        return isinstance(node, ast.Name) or is_pure(node.value)
    if not QUEUES.isdisjoint(names_in(node)):
        return False
    if isinstance(node, ast.Call):
        plain = isinstance(node.func, ast.Name) and node.func.id in {"len", "bool", "min", "max"}
        return plain and not node.keywords and all(map(is_pure, node.args))
    return isinstance(node, _PURE) and all(map(is_pure, ast.iter_child_nodes(node)))


def flags(test: ast.expr) -> list[str]:
    """Return the variables whose truth a condition tests, even within ``not``, ``and`` or ``or``."""
    match test:
        case ast.Name(name):
            return [name]
        case ast.UnaryOp(ast.Not(), operand):
            return flags(operand)
        case ast.BoolOp(values=parts):
            return list(dict.fromkeys(flag for part in parts for flag in flags(part)))
        case _:
            return []


def next_in_line(part: ast.expr) -> tuple[ast.expr, ast.expr]:
    """Return the queue and the index of ``index < len(queue)``; for any other test, None and None."""
    match part:
        case ast.Compare(ast.Name() as index, [ast.Lt()], [ast.Call(ast.Name("len"), [queue])]) if is_pure(
            queue
        ):
            return copy.deepcopy(queue), copy.deepcopy(index)
        case _:
            return ast.Constant(None), ast.Constant(None)


def assigned_from(function: ast.FunctionDef, method: str) -> list[str]:
    """Return the variables to which only results of ``....method()`` are assigned."""
    stored = stored_names(function)
    assigned: list[str] = []
    for node in own_nodes(function):
        match node:
            case ast.Assign([ast.Name(name), *_], ast.Call(ast.Attribute(attr=called))) if called == method:
                assigned.append(name)
            case _:
                pass
    return [name for name in dict.fromkeys(assigned) if stored.count(name) == assigned.count(name)]


def stored_names(function: ast.FunctionDef) -> list[str]:
    """Return the names that the function's own code binds or unbinds, once per occurrence."""
    names_in = (part for part in own_nodes(function) if isinstance(part, ast.Name))
    return [part.id for part in names_in if not isinstance(part.ctx, ast.Load)]


def on_line_of(place: ast.AST, node: _Node) -> _Node:
    """Return ``node`` with the line of ``place`` in all its parts, so that tracebacks show vLLM's lines."""
    for part in ast.walk(node):
        if isinstance(part, ast.expr | ast.stmt) and not hasattr(part, "lineno"):
            ast.copy_location(part, place)
    return node


def is_min_of(node: ast.stmt, name: str) -> bool:
    """Return whether the statement is ``name = min(..., name, ...)``, which never raises the value."""
    match node:
        case ast.Assign([ast.Name(target)], ast.Call(ast.Name("min"), arguments, [])) if target == name:
            return any(isinstance(argument, ast.Name) and argument.id == name for argument in arguments)
        case _:
            return False


_TAKES = frozenset({"peek_request", "pop_request"})


def loop_of(node: ast.While | ast.For) -> Loop | None:
    """Return which of the scheduler's two loops this is; None for any other loop."""
    # It schedules requests if it allocates blocks or stores numbers of tokens.
    stores_tokens = any(
        isinstance(part, ast.Assign) and _counts_tokens(part.targets[0]) for part in own_nodes(node)
    )
    if not stores_tokens and call_of(node, "allocate_slots") is None:
        return None
    condition = names_in(node.test if isinstance(node, ast.While) else node.iter)
    body = names_in(ast.Module(node.body, []))
    if not QUEUES.isdisjoint(condition) or not _TAKES.isdisjoint(body):
        return "waiting"
    if "running" in condition:
        return "running"
    return None if QUEUES.isdisjoint(body) else "waiting"


def first_loop(statements: list[ast.stmt]) -> Loop | None:
    """Return the first of the scheduler's loops among these statements."""
    return next(filter(None, map(loop_of, loops(statements))), None)


def goes_on_to_waiting(function: ast.FunctionDef) -> bool:
    """Return whether every call that returns has passed the waiting loop or the condition before it."""
    own = list(own_nodes(function))
    returns = [node for node in own if isinstance(node, ast.Return)]
    return (
        returns in ([], function.body[-1:])
        and not any(isinstance(node, ast.Try | ast.TryStar | ast.Match) for node in own)
        and any(loop_of(loop) == "waiting" for loop in loops(function.body))
    )


def allocated_blocks(function: ast.FunctionDef) -> str:
    """Return the variable that holds the result of ``allocate_slots``."""
    for node in own_nodes(function):
        match node:
            case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(attr="allocate_slots"))):
                return name
            case _:
                pass
    return "new_blocks"


def is_there(test: ast.expr, name: str, *, negated: bool = False) -> bool:
    """Return whether the test checks that ``name`` is set or, if ``negated``, that it is not set."""
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            return is_there(operand, name, negated=not negated)
        case ast.Compare(ast.Name(given), [operator], [ast.Constant(None)]):
            return given == name and isinstance(operator, ast.Is if negated else ast.IsNot)
        case ast.Name(given):
            return given == name and not negated
        case _:
            return False


def outcomes(function: ast.FunctionDef, loop: ast.stmt, blocks: str) -> frozenset[str]:
    """Return flags that record how a loop of allocations ended: true after success, false after failure.

    Args:
        function: The function that contains the loop.
        loop: The loop; it sets such a flag only right before a ``break``.
        blocks: Variable that holds the result of ``allocate_slots``.
    """
    settings = list(_flags_before_breaks([loop], blocks, succeeded=None))
    stored = stored_names(function)
    flags_found = [name for name, _ in settings]
    wrong = {name for name, true in settings if not true}
    return frozenset(name for name in flags_found if stored.count(name) == flags_found.count(name)) - wrong


def _flags_before_breaks(
    statements: list[ast.stmt], blocks: str, *, succeeded: bool | None
) -> Iterator[tuple[str, bool]]:
    """Yield the flags set to a constant right before a ``break``, and whether they record what happened.

    If the code has not tested whether blocks were allocated (``succeeded`` is None), no flag shows the
    outcome.
    """
    for node, following in zip_longest(statements, statements[1:]):
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(bool() as value)) if isinstance(
                following, ast.Break
            ):
                yield name, value is succeeded
            case ast.If(test, body, orelse):
                there, gone = is_there(test, blocks), is_there(test, blocks, negated=True)
                inside, otherwise = (there, gone) if there or gone else (succeeded, succeeded)
                yield from _flags_before_breaks(body, blocks, succeeded=inside)
                yield from _flags_before_breaks(orelse, blocks, succeeded=otherwise)
            case ast.While(body=body) | ast.With(body=body):
                yield from _flags_before_breaks(body, blocks, succeeded=succeeded)
            case _:
                pass


def victim_names(function: ast.FunctionDef) -> frozenset[str]:
    """Return the variables whose request the code itself preempts, by setting its status to ``PREEMPTED``."""
    victims = set()
    for node in own_nodes(function):
        match node:
            case ast.Assign([ast.Attribute(ast.Name(name), "status")], ast.Attribute(attr="PREEMPTED")):
                victims.add(name)
            case _:
                pass
    return frozenset(victims)
