"""A condition is evaluated once, as it always was, and tells which part decided and what was compared."""

from types import SimpleNamespace

import pytest

from tests.toys import request


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
