"""docs/causes.md: every word has its scene, and every scene a test that asserts just that."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path

from schedtrace.model.causes import CAPS, CAUSES, WAITING_STATUS_CAUSES, Cap, Cause
from schedtrace.record import inference

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "causes.md").read_text()
SCENES = ROOT / "tests" / "contract" / "causes"

EXIT_ROWS = re.findall(r"^\| `(\w+)` \| (running|waiting|both) \|.*\| `([\w:]+)` \|$", PAGE, re.MULTILINE)
CAP_ROWS = re.findall(r"^\| `(\w+)` \| [^|]+ \| `([\w:]+)` \|$", PAGE, re.MULTILINE)
NAMED = sorted(set(re.findall(r"`(test_\w+::test_\w+)`", PAGE)))


@cache
def functions(file):
    """The functions of a file of scenes, by name."""
    tree = ast.parse((SCENES / f"{file}.py").read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def calls(test):
    """The calls in a test and in the helpers of its file that it calls."""
    file, _, name = test.partition("::")
    own = [node for node in ast.walk(functions(file)[name]) if isinstance(node, ast.Call)]
    helpers = {call.func.id for call in own if isinstance(call.func, ast.Name)} & functions(file).keys()
    return own + [node for helper in helpers for node in calls(f"{file}::{helper}")]


def expects(test, constructors, word):
    """Whether the test expects an exit or a cap with that word: ``waiting("break", Cause.PAUSED, ...)``."""
    return any(
        isinstance(call.func, ast.Name)
        and call.func.id in constructors
        and f"{type(word).__name__}.{word.name}" in map(ast.unparse, call.args)
        for call in calls(test)
    )


def test_every_cause_has_a_scene_and_a_reason_for_the_loop_of_each():
    assert {cause for cause, _, _ in EXIT_ROWS} == set(CAUSES)
    for cause, loop, _ in EXIT_ROWS:
        entry = CAUSES[cause].entry
        assert all(entry.reason(name) for name in (["waiting", "running"] if loop == "both" else [loop]))


def test_every_word_can_be_linked_to():
    anchors = {word: f'<a id="{word.page.partition("#")[2]}"></a>`{word}`' for word in (*Cause, *Cap)}
    assert [word for word, anchor in anchors.items() if PAGE.count(anchor) != 1] == []


def test_every_cap_has_a_scene():
    assert {cap for cap, _ in CAP_ROWS} == set(CAPS)


def test_the_tests_exist():
    assert NAMED
    assert [test for test in NAMED if test.split("::")[1] not in functions(test.split("::")[0])] == []


def test_the_test_of_a_row_expects_that_exit_of_that_loop():
    loops = {"both": {"running", "waiting"}, "running": {"running"}, "waiting": {"waiting"}}
    assert [row for row in EXIT_ROWS if not expects(row[2], loops[row[1]], CAUSES[row[0]])] == []


def test_the_test_of_a_row_expects_that_cap():
    assert [row for row in CAP_ROWS if not expects(row[1], {"ChunkCap"}, CAPS[row[0]])] == []


def test_the_causes_told_to_be_inferred_are_those_that_the_code_infers():
    names = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(inference)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Cause"
    }
    inferred = {Cause[name].value for name in names} | {
        cause.value for cause in WAITING_STATUS_CAUSES.values()
    }
    [section] = re.findall(r"^## Inferred causes\n(.*?)What it cannot see", PAGE, re.MULTILINE | re.DOTALL)
    words = set(re.findall(r"`(\w+)`", section))
    assert words & {cause.value for cause in Cause} == inferred
