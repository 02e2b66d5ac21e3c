"""How an allocation ends: what says that it succeeded, and who is preempted where it did not."""

import ast
from collections.abc import Iterator
from itertools import zip_longest

from schedtrace.record.syntax import own_nodes


def allocated_blocks(function: ast.FunctionDef) -> str:
    """The variable that holds what ``allocate_slots`` returned."""
    for node in own_nodes(function):
        match node:
            case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(attr="allocate_slots"))):
                return name
            case _:
                pass
    return "new_blocks"


def is_there(test: ast.expr, name: str, *, negated: bool = False) -> bool:
    """Whether it says that ``name`` is there: ``name is not None``, ``name``, the opposite if ``negated``."""
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
    """Flags that tell how a loop of allocations ended: true behind a success, false behind a failure.

    Args:
        function: Where the loop stands.
        loop: All values of such a flag are set in it, each right before a ``break``.
        blocks: The variable that holds what ``allocate_slots`` returned.
    """
    told = list(_told_before_breaks([loop], blocks, succeeded=None))
    stored = [part.id for part in own_nodes(function) if isinstance(part, ast.Name) and _stored(part)]
    names_told = [name for name, _ in told]
    liars = {name for name, true in told if not true}
    return frozenset(name for name in names_told if stored.count(name) == names_told.count(name)) - liars


def _told_before_breaks(
    statements: list[ast.stmt], blocks: str, *, succeeded: bool | None
) -> Iterator[tuple[str, bool]]:
    """The flags that are set to a constant right before a ``break``, and whether they tell what happened.

    Where nobody has looked whether there are blocks (``succeeded`` is None) no flag can tell.
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
                yield from _told_before_breaks(body, blocks, succeeded=inside)
                yield from _told_before_breaks(orelse, blocks, succeeded=otherwise)
            case ast.While(body=body) | ast.With(body=body):
                yield from _told_before_breaks(body, blocks, succeeded=succeeded)
            case _:
                pass


def _stored(part: ast.Name) -> bool:
    return not isinstance(part.ctx, ast.Load)


def preempted(function: ast.FunctionDef) -> frozenset[str]:
    """The variables that hold a victim: their status becomes ``PREEMPTED`` here, not in a method."""
    victims = set()
    for node in own_nodes(function):
        match node:
            case ast.Assign([ast.Attribute(ast.Name(name), "status")], ast.Attribute(attr="PREEMPTED")):
                victims.add(name)
            case _:
                pass
    return frozenset(victims)
