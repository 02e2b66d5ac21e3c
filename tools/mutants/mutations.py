"""Small faults to put into a module: each is one edit of its text, so all other lines stay as they are.

A library would do most of this, but not dropped calls and swapped causes, and it would change the text, the
functions or the import of the modules that ``schedtrace.record`` compares with their source.
"""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

FLIPPED = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", ">"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", "<"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
SHIFTED = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
CAUSES = ("Cause", "Cap")
FLIP, SHIFT, DROP, SWAP = "comparison flipped", "off by one", "line dropped", "cause swapped"


@dataclass(frozen=True)
class Mutant:
    """One edit: the bytes of ``path`` from ``start`` to ``end`` become ``after``."""

    path: Path
    line: int
    operator: str
    start: int
    end: int
    before: str
    after: str

    def applied(self, source: bytes) -> bytes:
        """The mutated source."""
        return source[: self.start] + self.after.encode() + source[self.end :]

    def __str__(self) -> str:
        first = self.before.splitlines()[0]
        return f"{self.path}:{self.line}  {self.operator}: {first} -> {self.after}"


def sample(root: Path, package: str, count: int, seed: int) -> list[Mutant]:
    """Mutants of a package, each operator in turn; the same ones for the same code and seed."""
    chosen = random.Random(f"{seed} {package}")  # noqa: S311  # no secret
    found = [
        mutant
        for path in sorted((root / package).rglob("*.py"))
        for mutant in mutants(path.relative_to(root), path.read_bytes())
    ]
    piles = [[one for one in found if one.operator == operator] for operator in (FLIP, SHIFT, DROP, SWAP)]
    for pile in piles:
        chosen.shuffle(pile)
    return [one for turn in zip_longest(*piles) for one in turn if one is not None][:count]


def mutants(path: Path, source: bytes) -> list[Mutant]:
    """Every mutant of a module, in no particular order."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    nodes = list(_mutable(ast.parse(source)))
    causes = sorted({ast.unparse(node) for node in nodes if _is_cause(node)})
    found = []
    for node in nodes:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        if isinstance(node, ast.Compare):  # what is edited is the word behind the first operand
            begin = starts[node.left.end_lineno - 1] + node.left.end_col_offset
        for operator, before, after in _edits(node, source[begin:end].decode(), causes):
            at = source.index(before.encode(), begin)
            line = source.count(b"\n", 0, at) + 1
            found.append(Mutant(path, line, operator, at, at + len(before.encode()), before, after))
    return found


def _edits(node: ast.AST, text: str, causes: list[str]) -> Iterator[tuple[str, str, str]]:
    """Operator, text before and text after of each mutant of a node; of a chain of comparisons the first."""
    if isinstance(node, ast.Compare):
        for operator, words in ((FLIP, FLIPPED), (SHIFT, SHIFTED)):
            if type(node.ops[0]) in words:
                yield operator, *words[type(node.ops[0])]
    elif isinstance(node, ast.Constant):
        yield SHIFT, text, str(node.value + 1)
    elif not _is_cause(node):
        yield DROP, text, "pass"
    elif (other := _other_cause(text, causes)) is not None:
        yield SWAP, text, other


def _other_cause(word: str, causes: list[str]) -> str | None:
    """The next one of the module, in a circle; ``OTHER`` where there is no other."""
    kind = word.split(".", maxsplit=1)[0]
    alike = [one for one in causes if one.split(".", maxsplit=1)[0] == kind]
    following = alike[(alike.index(word) + 1) % len(alike)] if len(alike) > 1 else f"{kind}.OTHER"
    return None if following == word else following


def _mutable(tree: ast.AST) -> Iterator[ast.AST]:
    """What may be mutated: code of functions, without annotations, texts and log lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                yield from _within(statement)


def _within(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.JoinedStr)):
        return  # a nested function comes by itself; positions in f-strings are wrong before Python 3.12
    if isinstance(node, ast.Expr) and ast.unparse(node).startswith("logger."):
        return
    number = isinstance(node, ast.Constant) and type(node.value) is int
    if number or isinstance(node, ast.Compare) or _is_cause(node) or _can_be_dropped(node):
        yield node
    if not _is_cause(node):
        for name, child in ast.iter_fields(node):
            for one in child if isinstance(child, list) else [child]:
                if isinstance(one, ast.AST) and name != "annotation":
                    yield from _within(one)


def _is_cause(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in CAUSES


def _can_be_dropped(node: ast.AST) -> bool:
    """A statement without which the rest still runs: dropping the only binding of a name fails at once."""
    if isinstance(node, ast.Assign):
        return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return called or isinstance(node, (ast.AugAssign, ast.Continue, ast.Break, ast.Raise))
