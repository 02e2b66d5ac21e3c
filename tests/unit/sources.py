"""Syntax trees of the package, parsed and walked once for all tests about its sources."""

import ast
import gc
from functools import cache
from pathlib import Path

import schedtrace

PACKAGE = Path(schedtrace.__file__).parent


@cache
def modules() -> dict[str, list[ast.AST]]:
    """Return all nodes of each module, by its path in the package."""
    gc.disable()  # a million nodes that stay: each collection meanwhile, and later, would visit all of them
    trees = {
        str(path.relative_to(PACKAGE)): nodes(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    gc.freeze()
    gc.enable()
    return trees


def nodes(source: str) -> list[ast.AST]:
    """Return all nodes of a syntax tree."""
    return list(ast.walk(ast.parse(source)))
