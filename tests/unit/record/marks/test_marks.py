"""What a mark gets to see: no name that is not surely bound, and nobody who may not be meant."""

import ast
import textwrap

import pytest

from schedtrace.record.marks.syntax import goes_on_to_waiting
from tests.toys import Queue, request


def each(*lines, before=""):
    """A loop over all that run, with these lines before one token is given to each."""
    body = textwrap.indent("\n".join(lines), "    ")
    loop = f"for one in self.running:\n{body}\n    num_scheduled_tokens[one.request_id] = 1\n"
    return f"{before}num_scheduled_tokens = {{}}\n{loop}"


def seen(exits):
    return [(line.request_id, line.budget_left) for line in exits]


ONE = [request("a")]
SKIP = ("if self.late:", "    continue")
BOUND = {
    "bound before the exit": (("request = one", *SKIP), "a"),
    "bound after it": ((*SKIP, "request = one"), None),
    "bound in one way only": (("if one:", "    request = one", *SKIP), None),
    "bound in both ways": (("if one:", "    request = one", "else:", "    request = self", *SKIP), "a"),
    "the other way leaves": (("if one:", "    request = one", "else:", "    break", *SKIP), "a"),
    "bound in another loop": (("for request in (one,):", "    pass", *SKIP), None),
    "not bound in another loop": (("for request in ():", "    pass", *SKIP), None),
    "bound in a try": (("try:", "    request = one", "except KeyError:", "    pass", *SKIP), None),
    "declared, not bound": (("request: int", *SKIP), None),
    "taken apart": (("request, _ = one, 1", *SKIP), "a"),
    "unbound again": (("request = one", "if one:", "    del request", *SKIP), None),
    "a handler's": (
        ("request = one", "try:", "    {}[1]", "except KeyError as request:", "    pass", *SKIP),
        None,
    ),
}


@pytest.mark.parametrize(("lines", "request_id"), BOUND.values(), ids=BOUND)
def test_a_request_is_told_only_if_it_is_surely_this_turns(lines, request_id, run):
    returned, exits, _ = run(each(*lines), running=ONE, late=True)
    assert (returned, seen(exits)) == (None, [(request_id, 77)])


def test_the_request_of_the_turn_before_is_not_told_again(run):
    lines = ("if one.sits_out:", "    continue", "request = one")
    running = [request("a", sits_out=False), request("b", sits_out=True)]
    _, exits, _ = run(each(*lines), running=running)
    assert seen(exits) == [(None, 77)]


def test_the_loops_own_variable_is_this_turns(run):
    body = (
        "for request in self.running:\n    if request.late:\n        break\n    num_scheduled_tokens[1] = 1\n"
    )
    _, exits, _ = run(body, running=[request("a", late=True)])
    assert seen(exits) == [("a", 77)]


@pytest.mark.parametrize(
    ("parameters", "given", "before", "budget"),
    [
        ("self, token_budget=10", (), "", 10),
        ("self, token_budget, /", (9,), "", 9),
        ("self, *given", (), "token_budget = 8\n", 8),
        ("self, *given", (), "if self.late:\n    token_budget = 8\n", 77),
        ("self, *, token_budget=10", (), "", 77),
    ],
)
def test_the_budget_is_told_where_it_is_surely_bound(parameters, given, before, budget, run):
    _, exits, _ = run(each(*SKIP, before=before), *given, parameters=parameters, running=ONE, late=True)
    assert seen(exits) == [(None, budget)]


NOBODY = {
    "of those that run": ("while self.running and self.turns:", "break"),
    "in a loop over all": ("for one in self.waiting:", "break"),
    "by a skip": ("while self.waiting and self.turns:", "continue"),
}


@pytest.mark.parametrize(("head", "leave"), NOBODY.values(), ids=NOBODY)
def test_the_first_in_the_queue_is_not_told_where_another_may_be_meant(head, leave, run):
    lines = ("self.turns.pop()", "if self.late:", f"    {leave}", "num_scheduled_tokens[1] = 1")
    body = "\n    ".join((head, *lines))
    _, exits, _ = run(body, running=ONE, waiting=Queue([request("first")]), late=True, turns=[1])
    assert (exits[0].kind, exits[0].request_id) == (leave, None)


def test_who_is_next_in_the_queue_is_told_where_nobody_was_taken(run):
    body = (
        "while self.waiting and token_budget > 0:\n    if self.late:\n        break\n"
        "    request = self.waiting.pop_request()\n    num_scheduled_tokens[1] = 1\n"
    )
    _, exits, _ = run(
        body, 5, parameters="self, token_budget", waiting=Queue([request("a"), request("b")]), late=True
    )
    assert seen(exits) == [("a", 5)]
    assert [(line.kind, line.guard) for line in exits] == [("break", "self.late")]


@pytest.mark.parametrize(
    ("waiting", "budget", "expected"),
    [
        ([], 5, ("condition", "queue_empty", None)),
        (["a"], 0, ("condition", "token_budget", "a")),
        ([], 0, ("condition", "queue_empty", None)),
    ],
)
def test_a_condition_tells_its_first_part_that_was_false(waiting, budget, expected, run):
    body = (
        "num_scheduled_tokens = {}\nwhile self.waiting and token_budget > 0:\n"
        "    request = self.waiting.pop_request()\n    num_scheduled_tokens[1] = 1\n"
    )
    queue = Queue(map(request, waiting))
    _, [line], _ = run(body, budget, parameters="self, token_budget", waiting=queue)
    assert (line.kind, line.cause, line.request_id) == expected


def test_a_loop_that_went_through_everybody_says_nothing(run):
    returned, exits, caps = run(
        each("pass") + "return num_scheduled_tokens", running=[request("a"), request("b")]
    )
    assert (returned, exits, caps) == ({"a": 1, "b": 1}, [], [])


LOOPS = """
def schedule(self):
    while self.running:
        self.allocate_slots(1)
    {between}
    while self.waiting:
        self.allocate_slots(1)
    return 1
"""


@pytest.mark.parametrize(
    ("source", "goes_on"),
    [
        (LOOPS.format(between="pass"), True),
        (LOOPS.format(between="if self.late: return 2"), False),
        (LOOPS.format(between="match self.late:\n        case 1: pass"), False),
        (LOOPS.replace("self.waiting", "self.others").format(between="pass"), False),
    ],
)
def test_where_the_waiting_loop_certainly_follows_the_running_one(source, goes_on):
    assert goes_on_to_waiting(ast.parse(source).body[0]) is goes_on
