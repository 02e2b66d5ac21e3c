"""Nothing that is printed is parsed for markup, and all of it is printed where it is made visible first."""

import ast

import pytest

from tests.unit.sources import modules, nodes

PARSES = {"from_markup", "render_markup", "render_str", "from_ansi", "log", "rule", "status", "input"}
"""Calls by which rich takes text for markup, or for colours."""
PRINTS = {"print", "echo", "secho"}
MAY_PRINT = {
    "cli/options.py": {"echo"},
    "present/renderers/text.py": {"print"},  # to a console that is captured
    "present/progress.py": {"print"},
}
STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}
OF_MARKUP = {"markup", "emoji", "highlight"}
MAY_USE_STREAMS = {"cli/options.py", "cli/main.py"}


def calls(module):
    """Name of the function or method, and the call."""
    for node in module:
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", "")), node


def breaks(where, module):
    """What a module does that only others may: each as a word."""
    made = {name for name, _ in calls(module)}
    if where.startswith(("cli/", "present/")):
        yield from PARSES & made
    yield from PRINTS & made - MAY_PRINT.get(where, set())
    if where != "present/renderers/text.py":
        yield from {"Console"} & made
    if where not in MAY_USE_STREAMS:
        streams = (
            ast.unparse(node) for node in module if isinstance(node, ast.Attribute) and node.attr in STREAMS
        )
        yield from (stream for stream in streams if stream.startswith("sys."))
    for name, call in calls(module):
        said = {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg in OF_MARKUP}
        must = {"TextColumn": ("markup",), "Console": ("markup", "emoji", "highlight")}.get(name, ())
        wrong = [word for word in ("markup", "emoji") if said.get(word, "False") != "False"]
        yield from (f"{name}({word})" for word in (*wrong, *must) if said.get(word) != "False")


def test_no_module_parses_markup_or_prints_by_itself():
    broken = {where: list(breaks(where, module)) for where, module in modules().items()}
    assert {where: words for where, words in broken.items() if words} == {}


@pytest.mark.parametrize(
    ("source", "broken"),
    [
        ("print(x)", ["print"]),
        ("Text.from_markup(x)", ["from_markup"]),
        ("sys.stdout.write(x)", ["sys.stdout"]),
        ("TextColumn(x)", ["TextColumn(markup)"]),
        ("Table(x, emoji=True)", ["Table(emoji)"]),
        ("Table(x, emoji=False)", []),
    ],
)
def test_a_break(source, broken):
    assert list(breaks("present/pages/x.py", nodes(source))) == broken


def test_only_these_modules_of_rich_are_used():
    used = set()
    for module in modules().values():
        for node in module:
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            used |= {name for name in names if name and name.split(".")[0] == "rich"}
    assert used == {"rich.console", "rich.padding", "rich.progress", "rich.table", "rich.text"}
