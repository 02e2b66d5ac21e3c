"""Has a condition tell which part of it decided, and what was compared there.

Nothing is evaluated a second time, since a queue may change by being asked. The condition itself is
rewritten: each part is evaluated where and when it always was, and its truth kept in a local variable.

    while (self.waiting or self.skipped) and token_budget > 0:
    while not (part_0 := not (self.waiting or self.skipped)) and token_budget > 0:
"""

import ast
import copy
from collections.abc import Sequence

PREFIX = "_schedtrace_"


class Decided:
    """A condition, and the parts of it of which one decides.

    Args:
        condition: Stays as it is; ``test`` is the one to put in its place.
        number: Of this condition among those of its function.
        holds: Whether it was true: then one part of an ``or`` decided, else one of an ``and``.
    """

    def __init__(self, condition: ast.expr, number: int, *, holds: bool) -> None:
        self._name = f"{PREFIX}{number}"
        self.holds = holds
        self.parts = _parts(condition, holds=holds)
        """As the source has them."""
        self._flagged = [copy.deepcopy(part) for part in self.parts]
        self._operands: list[list[tuple[str, str]]] = [[] for _ in self.parts]
        """Of each part: the text of what it compares, and the variable that keeps it."""

    def keep_values(self, place: int) -> None:
        """Have a part keep what it compares, where no part of it may be left out."""
        part, negated = _without_not(self._flagged[place])
        kept: ast.expr
        match part:
            case ast.Compare(left, [operator], [right]):
                operands = [self._kept(place, left), self._kept(place, right)]
                kept = ast.Compare(operands[0], [operator], [operands[1]])
            case ast.BoolOp() | ast.IfExp() | ast.Compare() | ast.NamedExpr():
                return
            case _:
                kept = self._kept(place, part)
        self._flagged[place] = ast.UnaryOp(ast.Not(), kept) if negated else kept

    def _kept(self, place: int, operand: ast.expr) -> ast.expr:
        if isinstance(operand, ast.Constant | ast.NamedExpr):
            return operand
        name = f"{self._name}_{place}_{len(self._operands[place])}"
        self._operands[place].append((ast.unparse(operand), name))
        return ast.NamedExpr(ast.Name(name, ast.Store()), operand)

    @property
    def test(self) -> ast.expr:
        """The condition that keeps what is to be told; its truth and its effects are the same."""
        *before, last = self._flagged
        kept = [self._with_flag(place, part) for place, part in enumerate(before)]
        if not kept:
            return last
        return ast.BoolOp(ast.Or() if self.holds else ast.And(), [*kept, last])

    def _with_flag(self, place: int, part: ast.expr) -> ast.expr:
        false = ast.UnaryOp(ast.Not(), part)
        return ast.UnaryOp(ast.Not(), ast.NamedExpr(ast.Name(self._flag(place), ast.Store()), false))

    def _flag(self, place: int) -> str:
        """The variable that is true where this part was false."""
        return f"{self._name}_{place}"

    @property
    def tests(self) -> list[ast.expr]:
        """The parts one by one, for who evaluates each by itself."""
        return self._flagged

    @property
    def kept(self) -> list[ast.Tuple]:
        """What each part compared: the values of ``operands``."""
        return [
            ast.Tuple([ast.Name(name, ast.Load()) for _, name in operands], ast.Load())
            for operands in self._operands
        ]

    @property
    def which(self) -> ast.expr:
        """The number of the part that decided."""
        return self._of_part([ast.Constant(place) for place in range(len(self.parts))])

    @property
    def values(self) -> ast.expr:
        """What the part that decided compared."""
        return self._of_part(self.kept)

    @property
    def operands(self) -> tuple[tuple[str, ...], ...]:
        """Of each part, the texts of what it compares."""
        return tuple(tuple(text for text, _ in operands) for operands in self._operands)

    def _of_part(self, choices: Sequence[ast.expr]) -> ast.expr:
        chosen = choices[-1]
        for place in reversed(range(len(choices) - 1)):
            flag = ast.Name(self._flag(place), ast.Load())
            this, others = choices[place], chosen
            chosen = ast.IfExp(flag, others, this) if self.holds else ast.IfExp(flag, this, others)
        return chosen


def held(part: ast.expr, *, holds: bool) -> ast.expr:
    """What was true of a part that was true, or false: without a ``not`` too many."""
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
    """A part without its leading ``not``, and whether there was one (of two, none)."""
    negated = False
    while isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
        part, negated = part.operand, not negated
    return part, negated
