"""Conditions that record which part decided, the values that it compared, and the origin of flags.

Nothing is evaluated twice, because a queue may change when it is called. The condition itself is rewritten:
each part is evaluated at the same place and time as before, and a local variable keeps its truth.

    while (self.waiting or self.skipped) and token_budget > 0:
    while not (part_0 := not (self.waiting or self.skipped)) and token_budget > 0:

``if balance_flag: break`` does not explain itself, but ``balance_flag = max(...) == limit`` above it does. An
analysis of the function's flow determines which assignments can have set a flag that a guard reads.
"""

import ast
import copy
from collections.abc import Iterable, Sequence

from schedtrace.record.marks import syntax

PREFIX = "_schedtrace_"


class DecidedCondition:
    """Condition with its parts, one of which decides the outcome.

    Args:
        condition: The original condition, which is not changed; ``test`` replaces it.
        number: Number of this condition within its function.
        holds: Whether the condition was true. If so, a part of an ``or`` decided; otherwise a part of an
            ``and``.
    """

    def __init__(self, condition: ast.expr, number: int, *, holds: bool) -> None:
        self._name = f"{PREFIX}{number}"
        self.holds = holds
        self.parts = _parts(condition, holds=holds)
        """Parts as they are in the source."""
        self.tests = [copy.deepcopy(part) for part in self.parts]
        """Parts rewritten to keep the values that they compare, for callers that evaluate each separately."""
        self._operands: list[list[tuple[str, str]]] = [[] for _ in self.parts]
        """Operands of each part: the text, and the variable that keeps the value."""

    def keep_values(self, place: int) -> None:
        """Make a part keep the values that it compares, unless any of its operands may be skipped."""
        part, negated = _without_not(self.tests[place])
        with_values: ast.expr
        match part:
            case ast.Compare(left, [operator], [right]):
                operands = [self._kept(place, left), self._kept(place, right)]
                with_values = ast.Compare(operands[0], [operator], [operands[1]])
            case ast.BoolOp() | ast.IfExp() | ast.Compare() | ast.NamedExpr():
                return
            case _:
                with_values = self._kept(place, part)
        self.tests[place] = ast.UnaryOp(ast.Not(), with_values) if negated else with_values

    def _kept(self, place: int, operand: ast.expr) -> ast.expr:
        if isinstance(operand, ast.Constant | ast.NamedExpr):
            return operand
        name = f"{self._name}_{place}_{len(self._operands[place])}"
        self._operands[place].append((ast.unparse(operand), name))
        return ast.NamedExpr(ast.Name(name, ast.Store()), operand)

    @property
    def test(self) -> ast.expr:
        """Condition that keeps which part decided and what it compared; truth and effects are the same."""
        *before, last = self.tests
        if not before:
            return last
        with_flags = []
        for place, part in enumerate(before):
            flag = ast.Name(self._flag(place), ast.Store())
            false = ast.NamedExpr(flag, ast.UnaryOp(ast.Not(), part))
            with_flags.append(ast.UnaryOp(ast.Not(), false))
        return ast.BoolOp(ast.Or() if self.holds else ast.And(), [*with_flags, last])

    def _flag(self, place: int) -> str:
        """Return the name of the variable that is true if this part was false."""
        return f"{self._name}_{place}"

    @property
    def kept(self) -> list[ast.Tuple]:
        """Expressions for the values of ``operands``, as one tuple per part."""
        return [
            ast.Tuple([ast.Name(name, ast.Load()) for _, name in operands], ast.Load())
            for operands in self._operands
        ]

    @property
    def which(self) -> ast.expr:
        """Expression for the number of the part that decided."""
        return self._choice([ast.Constant(place) for place in range(len(self.parts))])

    @property
    def values(self) -> ast.expr:
        """Expression for the values that the deciding part compared."""
        return self._choice(self.kept)

    @property
    def operands(self) -> tuple[tuple[str, ...], ...]:
        """Texts of the operands of each part."""
        return tuple(tuple(text for text, _ in operands) for operands in self._operands)

    def _choice(self, choices: Sequence[ast.expr]) -> ast.expr:
        chosen = choices[-1]
        for place in reversed(range(len(choices) - 1)):
            flag = ast.Name(self._flag(place), ast.Load())
            this, rest = choices[place], chosen
            chosen = ast.IfExp(flag, rest, this) if self.holds else ast.IfExp(flag, this, rest)
        return chosen


def as_true(part: ast.expr, *, holds: bool) -> ast.expr:
    """Return the expression that was true: the part if ``holds``, otherwise its negation (no ``not not``)."""
    inner, negated = _without_not(part)
    return ast.UnaryOp(ast.Not(), inner) if negated is holds else inner


def _parts(condition: ast.expr, *, holds: bool) -> list[ast.expr]:
    match condition:
        case ast.BoolOp(ast.Or(), parts) if holds:
            return parts
        case ast.BoolOp(ast.And(), parts) if not holds:
            return parts
        case _:
            return [condition]


def _without_not(part: ast.expr) -> tuple[ast.expr, bool]:
    """Return a part without its leading ``not``, and whether it had one (two cancel out)."""
    negated = False
    while isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
        part, negated = part.operand, not negated
    return part, negated


_State = frozenset[ast.AST] | None
"""Assignments that may have set the current value; None if this point cannot be reached."""
_CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_MAKE_CONTAINERS = frozenset({"list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict"})


def explained(function: ast.FunctionDef, test: ast.expr, part: ast.expr | None = None) -> str:
    """Return the text of a guard, followed by the possible latest assignments of each flag in it.

    Args:
        function: The function that contains the guard.
        test: The condition of an ``if`` or ``while`` of the function.
        part: Part of the condition to describe; None for the whole condition.
    """
    described = test if part is None else part
    assigned = [
        ", or ".join(texts) for flag in syntax.flags(described) if (texts := _assigned(function, test, flag))
    ]
    return ", where ".join(filter(None, (ast.unparse(described), "; ".join(assigned))))


def _assigned(function: ast.FunctionDef, test: ast.expr, flag: str) -> list[str]:
    """Return the possible latest assignments of a flag, in source order.

    Return none if other functions also bind the name, or if it is a container: then the contents decide, and
    they change without an assignment.
    """
    shared = (part for part in ast.walk(function) if isinstance(part, ast.Global | ast.Nonlocal))
    if any(flag in part.names for part in shared):
        return []
    parameters = frozenset(part for part in ast.walk(function.args) if isinstance(part, ast.arg))
    flow = _Flow(flag, test)
    flow.state_after(function.body, frozenset(part for part in parameters if part.arg == flag))
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
    """Search for the assignments of a name that can reach a condition of the function.

    Args:
        name: A local variable.
        test: The condition; ``seen`` collects the assignments that can reach the condition.
    """

    def __init__(self, name: str, test: ast.expr) -> None:
        self.seen: set[ast.AST] = set()
        self._name, self._test = name, test
        self._breaks: list[list[_State]] = []
        self._continues: list[list[_State]] = []

    def state_after(self, statements: list[ast.stmt], state: _State) -> _State:
        """Return the state after these statements."""
        for node in statements:
            state = self._statement(node, state)
        return state

    def _statement(self, node: ast.stmt, state: _State) -> _State:
        if state is None:
            return None
        match node:
            case ast.If():
                state = self._condition(node.test, state)
                behind = _either(self.state_after(node.body, state), self.state_after(node.orelse, state))
            case ast.While() | ast.For():
                behind = self._loop(node, state)
            case ast.With():
                behind = self.state_after(node.body, self._simple(node, node.items, state))
            case ast.Try() | ast.TryStar():
                behind = self._try(node, state)
            case ast.Match(cases=cases):
                branches = [
                    self.state_after(case.body, self._simple(case, [case.pattern], state)) for case in cases
                ]
                behind = _either(state, *branches)
            case _:
                behind = self._step(node, state)
        return behind

    def _step(self, node: ast.stmt, state: frozenset[ast.AST]) -> _State:
        """Return the state after a statement without nested statements, or after a definition."""
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
        """Return the state after a possible assignment: the earlier value remains possible."""
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
            out = self.state_after(node.body, entered)
            breaks = self._breaks.pop()
            head = _either(head, out, *self._continues.pop()) or head
        endless = isinstance(node, ast.While) and isinstance(node.test, ast.Constant)
        return _either(self.state_after(node.orelse, None if endless else head), *breaks)

    def _try(self, node: ast.Try | ast.TryStar, state: frozenset[ast.AST]) -> _State:
        assigning = (part for statement in node.body for part in syntax.own_nodes(statement))
        touched = [*node.body, *(part for part in assigning if isinstance(part, ast.stmt))]
        anywhere = state | {part for part in touched if self._name in syntax.rebinds(part)}
        ways = [self.state_after(node.orelse, self.state_after(node.body, state))]
        ways += [self.state_after(handler.body, anywhere) for handler in node.handlers]
        after = _either(*ways)
        behind = self.state_after(node.finalbody, anywhere if after is None else after)
        return None if after is None else behind


def _either(*states: _State) -> _State:
    """Return the assignments that may have been made by any of these branches."""
    taken = [state for state in states if state is not None]
    return frozenset[ast.AST]().union(*taken) if taken else None
