"""What was assigned last to a flag: every assignment whose value a guard can see, and no other."""

import ast
import textwrap
from types import SimpleNamespace

import pytest

from schedtrace.record.marks.conditions import explained
from tests.toys import request

FLOWS = {
    "one": (("flag = a > 1", "if flag:", "    pass"), "flag = a > 1"),
    "the last one": (("flag = 1", "flag = 2", "if flag:", "    pass", "flag = 3"), "flag = 2"),
    "in one way": (
        ("flag = 1", "if a:", "    flag = 2", "if flag:", "    pass"),
        "flag = 1, or flag = 2",
    ),
    "in both ways": (
        ("flag = 1", "if a:", "    flag = 2", "else:", "    flag = 3", "if flag:", "    pass"),
        "flag = 2, or flag = 3",
    ),
    "not in a way that leaves": (
        ("flag = 1", "if a:", "    flag = 2", "    return", "if flag:", "    pass"),
        "flag = 1",
    ),
    "in the turn before": (
        ("flag = 1", "while a:", "    if flag:", "        pass", "    flag = 2"),
        "flag = 1, or flag = 2",
    ),
    "before a continue": (
        (
            "flag = 1",
            "while a:",
            "    if flag:",
            "        pass",
            "    flag = 2",
            "    continue",
            "    flag = 3",
        ),
        "flag = 1, or flag = 2",
    ),
    "before a break": (
        ("while True:", "    flag = 2", "    if a:", "        break", "    flag = 3", "if flag:", "    pass"),
        "flag = 2",
    ),
    "set anew in each turn": (
        ("flag = 1", "while a:", "    flag = 2", "    if flag:", "        pass"),
        "flag = 2",
    ),
    "behind a loop": (
        ("flag = 1", "for _ in a:", "    flag = 2", "if flag:", "    pass"),
        "flag = 1, or flag = 2",
    ),
    "by a loop": (("for flag in a:", "    if flag:", "        pass"), "for flag in a"),
    "otherwise, behind a loop": (
        ("for _ in a:", "    flag = 1", "    break", "else:", "    flag = 2", "if flag:", "    pass"),
        "flag = 1, or flag = 2",
    ),
    "added to": (
        ("flag = 1", "flag |= a", "if flag:", "    pass"),
        "flag = 1, or flag |= a",
    ),
    "on the way": (
        ("flag = 1", "a(flag := 2)", "if flag:", "    pass"),
        "flag = 1, or a((flag := 2))",
    ),
    "among others": (("flag, b = a", "if flag:", "    pass"), "flag, b = a"),
    "annotated": (("flag: bool = a", "if flag:", "    pass"), "flag: bool = a"),
    "within with": (("with a as flag:", "    if flag:", "        pass"), "with a as flag"),
    "in a try": (
        (
            "flag = 1",
            "try:",
            "    flag = 2",
            "    flag = 3",
            "except KeyError:",
            "    pass",
            "if flag:",
            "    pass",
        ),
        "flag = 1, or flag = 2, or flag = 3",
    ),
    "in a try that went well": (
        ("flag = 1", "try:", "    flag = 2", "except KeyError:", "    raise", "if flag:", "    pass"),
        "flag = 2",
    ),
    "finally": (
        ("try:", "    flag = 1", "finally:", "    flag = 2", "if flag:", "    pass"),
        "flag = 2",
    ),
    "in a case": (
        ("flag = 1", "match a:", "    case 1:", "        flag = 2", "if flag:", "    pass"),
        "flag = 1, or flag = 2",
    ),
    "an argument": (("if a:", "    pass"), "a is an argument"),
    "an argument, or not": (
        ("if self.b:", "    a = 2", "if a:", "    pass"),
        "a is an argument, or a = 2",
    ),
    "alike": (("flag = 1", "while a:", "    if flag:", "        pass", "    flag = 1"), "flag = 1"),
    "in a function within": (
        ("flag = 1", "def f():", "    flag = 2", "if flag:", "    pass"),
        "flag = 1",
    ),
    "not if somebody else may assign it": (
        ("flag = 1", "def f():", "    nonlocal flag", "    flag = 2", "if flag:", "    pass"),
        "",
    ),
    "nobody in here": (("if GLOBAL:", "    pass"), ""),
    "not of what is compared": (("flag = 1", "if flag > a:", "    pass"), ""),
    "not of an attribute": (("self.flag = 1", "if self.flag:", "    pass"), ""),
    "the other way round": (("flag = 1", "if not flag:", "    pass"), "flag = 1"),
    "several": (
        ("flag = 1", "b = 2", "if not flag and (b or flag or len(a) > 3):", "    pass"),
        "flag = 1; b = 2",
    ),
    "elif": (
        ("flag = 1", "if a:", "    flag = 2", "elif flag:", "    pass"),
        "flag = 1",
    ),
}


@pytest.mark.parametrize(("lines", "expected"), FLOWS.values(), ids=FLOWS)
def test_a_flag_is_explained_by_what_can_have_been_assigned_to_it(lines, expected):
    [function] = ast.parse("def schedule(self, a):\n" + textwrap.indent("\n".join(lines), "    ")).body
    ifs = [node for node in ast.walk(function) if isinstance(node, ast.If)]
    [guard] = [node.test for node in ifs if isinstance(node.body[0], ast.Pass)]
    text = ast.unparse(guard)
    assert explained(function, guard) == (f"{text}, where {expected}" if expected else text)


class Asked:
    """Notes each question, and answers in turn."""

    def __init__(self, name, log, *answers):
        self.name, self.log, self.answers = name, log, [*answers]

    def __bool__(self):
        self.log.append(self.name)
        return self.answers.pop(0)


LOOP = """\
num_scheduled_tokens = {{}}
while {}:
    num_scheduled_tokens[len(num_scheduled_tokens)] = 1
    self.waiting.pop_request
return num_scheduled_tokens
"""
CONDITIONS = {
    "a and b": ("self.a and self.b", {"a": [True, True], "b": [True, False]}, "abab", "not self.b"),
    "the first": ("self.a and self.b", {"a": [True, False], "b": [True]}, "aba", "not self.a"),
    "of three": (
        "self.a and not self.b and self.c",
        {"a": [True], "b": [True]},
        "ab",
        "self.b",
    ),
    "of an or": (
        "(self.a or self.b) and self.c",
        {"a": [False], "b": [False]},
        "ab",
        "not (self.a or self.b)",
    ),
    "no and": ("self.a or self.b", {"a": [True, False], "b": [False]}, "aab", "not (self.a or self.b)"),
}


@pytest.mark.parametrize(("condition", "answers", "asked", "guard"), CONDITIONS.values(), ids=CONDITIONS)
def test_a_loop_asks_as_often_as_plain_and_tells_what_was_false(condition, answers, asked, guard, run):
    log = []
    parts = {name: Asked(name, log, *given) for name, given in answers.items()}
    _, exits, _ = run(LOOP.format(condition), **parts)
    assert "".join(log) == asked
    assert [(line.kind, line.cause, line.guard) for line in exits] == [("condition", "other", guard)]


BREAK = """\
for one in self.running:
    if {}:
        {}
    num_scheduled_tokens = {{}}
    num_scheduled_tokens[one.request_id] = 1
"""
EXITS = {
    "the first of an or": ("self.a or self.b", {"a": [True]}, "a", ["self.a"]),
    "the second": ("self.a or self.b", {"a": [False], "b": [True]}, "ab", ["self.b"]),
    "neither": ("self.a or self.b", {"a": [False], "b": [False]}, "ab", []),
    "all of an and": ("self.a and self.b", {"a": [True], "b": [True]}, "ab", ["self.a and self.b"]),
    "a not": ("not self.a or self.b", {"a": [False]}, "a", ["not self.a"]),
    "two nots": ("not not self.a", {"a": [True]}, "a", ["self.a"]),
}


@pytest.mark.parametrize(("condition", "answers", "asked", "guards"), EXITS.values(), ids=EXITS)
def test_an_exit_asks_as_often_as_plain_and_tells_what_was_true(condition, answers, asked, guards, run):
    log = []
    parts = {name: Asked(name, log, *given) for name, given in answers.items()}
    _, exits, _ = run(BREAK.format(condition, "break"), running=[request("a")], **parts)
    assert "".join(log) == asked
    assert [line.guard for line in exits] == guards


VALUES = {
    "len(self.running) >= self.cap": "len(self.running) = 1; self.cap = 1",
    "self.cap": "self.cap = 1",
    "not self.nobody": "self.nobody = list of 0",
    "self.name == 'x'": "self.name = 'x'",
    "self.odd is not None": "self.odd = a SimpleNamespace",
    "self.cap > 3 or self.cap": "self.cap = 1",
    "self.cap and len(self.running) < 5": None,
    "0 < self.cap < 3": None,
    "self.full()": None,
}


@pytest.mark.parametrize(("condition", "values"), VALUES.items())
def test_what_was_compared_is_told_as_it_was(condition, values, run):
    facts = {"cap": 1, "nobody": [], "name": "x", "odd": SimpleNamespace(), "full": lambda: True}
    _, [line], _ = run(BREAK.format(condition, "break"), running=[request("a")], **facts)
    assert line.values == values


def test_a_known_part_of_an_unknown_condition_is_known(run):
    condition = "len(self.running) >= self.max_num_running_reqs or self.full"
    body = BREAK.format(condition, "break").replace("self.running:", "self.waiting:")
    seats = {"waiting": [request("a")], "running": [1, 2]}
    _, [line], _ = run(body, max_num_running_reqs=2, full=False, **seats)
    assert (line.cause, line.guard, line.values) == ("max_num_seqs", None, None)
    _, [line], _ = run(body, max_num_running_reqs=3, full=True, **seats)
    assert (line.cause, line.guard, line.values) == ("other", "self.full", None)


def test_both_ways_out_of_one_condition_are_told(run):
    body = BREAK.format("self.full or self.late", "break\n    else:\n        continue")
    _, [line], _ = run(body, running=[request("a")], full=False, late=True)
    assert (line.kind, line.guard) == ("break", "self.late")
    _, exits, _ = run(body, running=[request("a")], full=False, late=False)
    assert [(line.kind, line.guard) for line in exits][:1] == [("continue", "not (self.full or self.late)")]
