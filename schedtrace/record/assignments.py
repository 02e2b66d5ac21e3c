"""What the assignments of ``schedule()`` tell of its conditions.

``if balance_flag: break`` says nothing by itself; ``balance_flag = max(...) == limit`` above it does: the
flow through the function tells which assignments can have given a flag the value that a guard sees. Others
tell how an allocation ends: what says that it succeeded, and who is preempted where it did not.
"""

import ast
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from schedtrace.record import syntax

_State = frozenset[ast.AST] | None
"""The assignments whose value may be the current one; None: this point is not reached."""


_CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_MAKE_CONTAINERS = frozenset({"list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict"})


def explained(function: ast.FunctionDef, test: ast.expr, part: ast.expr | None = None) -> str:
    """The text of a guard, and behind it what can have been assigned last to each flag in it.

    Args:
        function: Where it stands.
        test: The condition of an ``if`` or ``while`` of the function.
        part: What to tell of it; the whole if not given.
    """
    told = test if part is None else part
    assigned = [
        ", or ".join(texts) for flag in syntax.flags(told) if (texts := _assigned(function, test, flag))
    ]
    return ", where ".join(filter(None, (ast.unparse(told), "; ".join(assigned))))


def _assigned(function: ast.FunctionDef, test: ast.expr, flag: str) -> list[str]:
    """In the order of the source; nothing for a name that the function does not bind alone.

    Nor for a container: what is in it decides, and nobody has assigned that.
    """
    shared = (part for part in ast.walk(function) if isinstance(part, ast.Global | ast.Nonlocal))
    if any(flag in part.names for part in shared):
        return []
    parameters = frozenset(part for part in ast.walk(function.args) if isinstance(part, ast.arg))
    flow = _Flow(flag, test)
    flow.block(function.body, frozenset(part for part in parameters if part.arg == flag))
    if any(map(_makes_container, flow.seen)):
        return []
    places = sorted(flow.seen, key=lambda node: (node.lineno, node.col_offset))  # type: ignore[attr-defined]  # statements have places
    return list(dict.fromkeys(_text(node, flag) for node in places))


def _makes_container(node: ast.AST) -> bool:
    match getattr(node, "value", None):
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name)):
            return name in _MAKE_CONTAINERS
        case value:
            return isinstance(value, _CONTAINERS)


def _text(node: ast.AST, flag: str) -> str:
    match node:
        case ast.arg():
            return f"{flag} is an argument"
        case ast.For(target=target, iter=iterated):
            return f"for {ast.unparse(target)} in {ast.unparse(iterated)}"
        case _:
            return ast.unparse(node).partition("\n")[0].removesuffix(":")


class _Flow:
    """Follows the values of one name through a function, up to a condition.

    Args:
        name: A local variable.
        test: The condition; ``seen`` has the assignments that it can see.
    """

    def __init__(self, name: str, test: ast.expr) -> None:
        self.seen: set[ast.AST] = set()
        self._name, self._test = name, test
        self._breaks: list[list[_State]] = []
        self._continues: list[list[_State]] = []

    def block(self, statements: list[ast.stmt], state: _State) -> _State:
        """The state behind these statements."""
        for node in statements:
            state = self._statement(node, state)
        return state

    def _statement(self, node: ast.stmt, state: _State) -> _State:
        if state is None:
            return None
        match node:
            case ast.If():
                state = self._condition(node.test, state)
                behind = _either(self.block(node.body, state), self.block(node.orelse, state))
            case ast.While() | ast.For():
                behind = self._loop(node, state)
            case ast.With():
                behind = self.block(node.body, self._simple(node, node.items, state))
            case ast.Try() | ast.TryStar():
                behind = self._try(node, state)
            case ast.Match(cases=cases):
                branches = [
                    self.block(case.body, self._simple(case, [case.pattern], state)) for case in cases
                ]
                behind = _either(state, *branches)
            case _:
                behind = self._step(node, state)
        return behind

    def _step(self, node: ast.stmt, state: frozenset[ast.AST]) -> _State:
        """A statement without statements in it, or a definition."""
        match node:
            case ast.Break():
                self._breaks[-1].append(state)
            case ast.Continue():
                self._continues[-1].append(state)
            case ast.Return() | ast.Raise():
                pass
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return state
            case ast.Assign() | ast.AnnAssign() if self._name in syntax.binds(node):
                return frozenset({node})
            case _:
                return self._simple(node, [node], state)
        return None

    def _condition(self, test: ast.expr, state: frozenset[ast.AST]) -> frozenset[ast.AST]:
        if test is self._test:
            self.seen |= state
        return self._simple(test, [test], state)

    def _simple(
        self, place: ast.AST, parts: Iterable[ast.AST], state: frozenset[ast.AST]
    ) -> frozenset[ast.AST]:
        """Behind something that may assign: the value from before is possible, too."""
        assigns = any(self._name in syntax.rebinds(part) for part in parts)
        return state | {place} if assigns else state

    def _loop(self, node: ast.While | ast.For, state: frozenset[ast.AST]) -> _State:
        head, before = state, None
        breaks: list[_State] = []
        while head != before:  # until one more turn brings nothing new
            before = head
            self._breaks.append([])
            self._continues.append([])
            if isinstance(node, ast.While):
                entered = self._condition(node.test, head)
            else:
                entered = self._simple(node, [node.target], head)
            out = self.block(node.body, entered)
            breaks = self._breaks.pop()
            head = _either(head, out, *self._continues.pop()) or head
        endless = isinstance(node, ast.While) and isinstance(node.test, ast.Constant)
        return _either(self.block(node.orelse, None if endless else head), *breaks)

    def _try(self, node: ast.Try | ast.TryStar, state: frozenset[ast.AST]) -> _State:
        assigning = (part for statement in node.body for part in syntax.own_nodes(statement))
        touched = [*node.body, *(part for part in assigning if isinstance(part, ast.stmt))]
        anywhere = state | {part for part in touched if self._name in syntax.rebinds(part)}
        ways = [self.block(node.orelse, self.block(node.body, state))]
        ways += [self.block(handler.body, anywhere) for handler in node.handlers]
        after = _either(*ways)
        behind = self.block(node.finalbody, anywhere if after is None else after)
        return None if after is None else behind


def _either(*states: _State) -> _State:
    """The assignments that any of these branches can bring."""
    taken = [state for state in states if state is not None]
    return frozenset[ast.AST]().union(*taken) if taken else None


def allocated_blocks(function: ast.FunctionDef) -> str:
    """The variable that holds what ``allocate_slots`` returned."""
    for node in syntax.own_nodes(function):
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
    stored = syntax.stored_names(function)
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


def preempted(function: ast.FunctionDef) -> frozenset[str]:
    """The variables that hold a victim: their status becomes ``PREEMPTED`` here, not in a method."""
    victims = set()
    for node in syntax.own_nodes(function):
        match node:
            case ast.Assign([ast.Attribute(ast.Name(name), "status")], ast.Attribute(attr="PREEMPTED")):
                victims.add(name)
            case _:
                pass
    return frozenset(victims)
