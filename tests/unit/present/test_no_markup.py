"""Nothing that is printed is parsed for markup, and all of it is printed where it is made visible first."""

import ast
from pathlib import Path

import pytest

import schedtrace

ROOT = Path(schedtrace.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
PARSES = {"from_markup", "render_markup", "render_str", "from_ansi", "log", "rule", "status", "input"}
"""Calls by which rich takes text for markup, or for colours."""
PRINTS = {"print", "echo", "secho"}
MAY_PRINT = {
    "cli/options.py": {"echo"},
    "present/renderers/text.py": {"print"},  # to a console that is captured
    "present/progress.py": {"print"},
}
STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}
MAY_USE_STREAMS = {"cli/options.py", "cli/main.py"}


def calls(tree):
    """Name of the function or method, and the call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", "")), node


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_neither_parses_markup_nor_prints_by_itself(path):
    where = str(path.relative_to(ROOT))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    made = {name for name, _ in calls(tree)}
    if where.startswith(("cli/", "present/")):
        assert not PARSES & made
    assert PRINTS & made <= MAY_PRINT.get(where, set())
    assert "Console" not in made or where == "present/renderers/text.py"
    streams = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in STREAMS and ast.unparse(node.value) == "sys"
    ]
    assert not streams or where in MAY_USE_STREAMS
    for name, call in calls(tree):
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given.get("markup", "False") == "False"
        assert given.get("emoji", "False") == "False"
        if name == "TextColumn":
            assert given["markup"] == "False"
        if name == "Console":
            assert {name: given[name] for name in ("markup", "emoji", "highlight")} == dict.fromkeys(
                ("markup", "emoji", "highlight"), "False"
            )


def test_only_these_modules_of_rich_are_used():
    used = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            used |= {name for name in names if name and name.split(".")[0] == "rich"}
    assert used == {"rich.console", "rich.padding", "rich.progress", "rich.table", "rich.text"}
