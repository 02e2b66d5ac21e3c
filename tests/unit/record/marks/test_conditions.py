"""What was assigned last to a flag: every assignment whose value a guard can see, and no other."""

import ast
import textwrap

import pytest

from schedtrace.record.marks.conditions import explained

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
