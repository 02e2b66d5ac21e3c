"""Rules for docstrings and names (CONTRIBUTING.md, "Write it in English"), checked over the whole package."""

import ast
import re
from collections import defaultdict

import pytest

from tests.unit.sources import modules

BAD_BEGINNING = re.compile(
    r"^(Of|Those|That|Who|Whom|Whose|Which|Likewise|It|They|There|When|Where|How|As|So|No|None|Nothing|Nobody|"
    r"To be|With|For|From|By|Beside|Till|Until|Since|Because|If|Not|Also|Else|Such|One|Some|All of|Each of)\b"
)
"""First words that are neither a verb nor a noun phrase."""
VAGUE = frozenset(
    {
        *("one", "ones", "found", "told", "said", "given", "came", "known", "others", "other"),
        *("kept", "made", "meant", "led", "way", "whom"),
    }
)
"""Names of values that do not say what the value is."""
ANOTHER_PLACE = re.compile(r"As (for|in) |(One|Some) \w|One-")
"""Beginnings of an argument's meaning that refer to another docstring, or count."""
JSON_FIELDS = frozenset({"given"})
"""Names that documents of ``model/`` keep: programs read them."""


def docstrings(module):
    """Yield the line and the text of each docstring, those below fields included."""
    for node in module:
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def arguments(module):
    """Yield the line of each docstring and the meanings of the arguments that it lists."""
    for line, text in docstrings(module):
        listed = re.split(r"\n *(?:Returns|Raises|Yields):\n", text.partition("Args:\n")[2])[0]
        depth = len(listed) - len(listed.lstrip())
        for meaning in re.findall(rf"^ {{{depth}}}\*{{0,2}}\w+: (.+)", listed, re.MULTILINE):
            yield line, meaning


def value_names(module):
    """Yield the line and the name of each local value and parameter."""
    fields = {node.target for node in module if isinstance(node, ast.AnnAssign)}
    for node in module:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if not (node in fields and node.id in JSON_FIELDS):
                yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def function_names(module):
    """Yield the line and the name of each function and method."""
    for node in module:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


BROKEN = {
    "a docstring begins with a verb or a noun": (docstrings, BAD_BEGINNING.match),
    "an argument's meaning begins with a noun": (
        arguments,
        lambda text: BAD_BEGINNING.match(text) and not ANOTHER_PLACE.match(text),
    ),
    "a value is named after what it is": (value_names, VAGUE.__contains__),
    "a function is named after what it returns or does": (
        function_names,
        lambda name: name.lstrip("_").startswith("of_"),
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_package_keeps(rule):
    parts, breaks = BROKEN[rule]
    assert [
        f"{path}:{line}: {text}"
        for path, module in modules().items()
        for line, text in parts(module)
        if breaks(text)
    ] == []


def test_a_class_name_stands_in_a_single_module():
    homes = defaultdict(set)
    for path, module in modules().items():
        for node in module:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(path)
    shared = {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1}
    assert shared == {}


@pytest.mark.parametrize(
    ("text", "breaks"), [("Of the run.", True), ("Offset of the run.", False), ("Return it.", False)]
)
def test_a_beginning(text, breaks):
    assert bool(BAD_BEGINNING.match(text)) is breaks
