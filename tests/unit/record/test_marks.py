"""What a mark gets to see: no name that is not surely bound; and a cap only where tokens really get fewer."""

import textwrap
from types import SimpleNamespace

import pytest

from schedtrace.record.allocation import Refusal
from tests.toys import Queue, module_of, request, told


@pytest.fixture
def run(tmp_path):
    """Runs a marked ``schedule(*given)`` of this body; what it returns, its exits and its caps."""

    def _run(body, *given, parameters="self, *given", **facts):
        source = f"class Toy:\n    def schedule({parameters}):\n" + textwrap.indent(body, " " * 8)
        with module_of(tmp_path, source) as module:
            return told(module.Toy, *given, budget=77, **facts)

    return _run


def each(*lines, before=""):
    """A loop over all that run, with these lines before one token is given to each."""
    body = textwrap.indent("\n".join(lines), "    ")
    loop = f"for one in self.running:\n{body}\n    num_scheduled_tokens[one.request_id] = 1\n"
    return f"{before}num_scheduled_tokens = {{}}\n{loop}"


def seen(exits):
    return [(line.request_id, line.budget_left) for line in exits]


ONE = [request("a")]
NO_ROOM = SimpleNamespace(allocate_slots=lambda *_, **__: None)
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


def capped(*lines, wants=5):
    """A loop that gives what is left of ``wants`` after these lines."""
    body = textwrap.indent("\n".join((f"num_new_tokens = {wants}", *lines)), "    ")
    return (
        f"num_scheduled_tokens = {{}}\nfor request in self.running:\n{body}\n"
        "    num_scheduled_tokens[request.request_id] = num_new_tokens\nreturn num_scheduled_tokens\n"
    )


MIN = "num_new_tokens = min(num_new_tokens, token_budget)"
CAPS = {
    "fewer": ((MIN,), 3, [("token_budget", 5, 3)]),
    "as many": ((MIN.replace("token_budget", "token_budget + 2"),), 5, []),
    "more": (("num_new_tokens = max(num_new_tokens, 9)",), 9, []),
    "under a condition": (
        ("if num_new_tokens > token_budget:", "    num_new_tokens = token_budget"),
        3,
        [("token_budget", 5, 3)],
    ),
    "otherwise": (
        ("if num_new_tokens <= 2:", "    pass", "else:", "    num_new_tokens = 2"),
        2,
        [("other", 5, 2)],
    ),
    "less": (("num_new_tokens -= 4",), 1, [("other", 5, 1)]),
    "one after the other": (
        (MIN, "num_new_tokens = min(num_new_tokens, self.max_model_len)"),
        2,
        [("token_budget", 5, 3), ("max_model_len", 3, 2)],
    ),
    "another number altogether": (("num_new_tokens = 1",), 1, []),
    "by a helper": (
        ("if self:", "    num_new_tokens = self._reserve_prefill_lookahead(num_new_tokens)"),
        4,
        [("prefill_lookahead", 5, 4)],
    ),
    "among others": (("num_new_tokens, rest = num_new_tokens - 1, 1",), 4, [("other", 5, 4)]),
    "padding taken back": (("num_new_tokens = num_new_tokens - num_spec_tokens",), 4, []),
}


@pytest.mark.parametrize(("lines", "scheduled", "expected"), CAPS.values(), ids=CAPS)
def test_a_cap_is_told_where_tokens_get_fewer(lines, scheduled, expected, run):
    facts = {"max_model_len": 2, "_reserve_prefill_lookahead": lambda tokens: tokens - 1}
    returned, exits, caps = run(
        "num_spec_tokens = 1\n" + capped(*lines), 3, parameters="self, token_budget", running=ONE, **facts
    )
    assert (returned, exits) == ({"a": scheduled}, [])
    assert [(cap.request_id, cap.cap, cap.wanted_tokens, cap.capped_tokens) for cap in caps] == [
        ("a", *told) for told in expected
    ]


@pytest.mark.parametrize("wants", [None, 5])
def test_a_number_that_may_not_be_there_yet_is_not_looked_at(wants, run):
    body = (
        "for request in self.running:\n"
        "    if request.wants:\n"
        "        num_new_tokens = request.wants\n"
        "    num_new_tokens = min(num_new_tokens, 3) if request.wants else 1\n"
        "    num_scheduled_tokens[request.request_id] = num_new_tokens\n"
        "return num_scheduled_tokens\n"
    )
    returned, exits, caps = run(
        "num_scheduled_tokens = {}\n" + body, running=[request("a", wants=wants)], late=False
    )
    assert (returned, exits, caps) == ({"a": 3 if wants else 1}, [], [])


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


ALLOCATE = "new_blocks = self.kv_cache_manager.allocate_slots(request, tokens, {})"
REFUSED = ("if new_blocks is None:", "    break")
ASKED = {
    "with the same arguments": ((ALLOCATE.format("whole=tokens"), *REFUSED), [(2, {"whole": 2})]),
    "without those that may do something": (
        (ALLOCATE.format("whole=tokens, first=self.turns.pop()"), *REFUSED),
        [(2, {"whole": 2})],
    ),
    "not if they were changed": ((ALLOCATE.format(""), "tokens = 1", *REFUSED), []),
    "not if they may have been changed": (
        (ALLOCATE.format(""), "if self.late:", "    tokens = 1", *REFUSED),
        [],
    ),
    "not if they are gone": ((ALLOCATE.format(""), "del tokens", *REFUSED), []),
    "not of a call that may not have been": (("if self.late:", "    " + ALLOCATE.format(""), *REFUSED), []),
    "not if the first ones may do something": (
        (ALLOCATE.format("").replace("tokens,", "self.turns.pop()"), *REFUSED),
        [],
    ),
}


@pytest.mark.parametrize(("lines", "expected"), ASKED.values(), ids=ASKED)
def test_the_limit_is_asked_for_right_after_the_call_that_failed(lines, expected, run, monkeypatch):
    asked = []

    def why_refused(manager, arguments):
        (given, tokens), keywords = arguments
        assert (manager, given) == (NO_ROOM, ONE[0])
        asked.append((tokens, keywords))
        return Refusal("free", 3, 1)

    monkeypatch.setattr("schedtrace.record.exits.why_refused", why_refused)
    body = "\n    ".join(("for request in self.running:", "tokens = 2", *lines))
    _, [line], _ = run(body, running=ONE, kv_cache_manager=NO_ROOM, late=True, turns=[1])
    assert asked == expected
    assert (line.cause, line.request_id, line.blocks_needed) == ("kv_blocks", "a", 3 if expected else None)


def test_a_loop_that_went_through_everybody_says_nothing(run):
    returned, exits, caps = run(
        each("pass") + "return num_scheduled_tokens", running=[request("a"), request("b")]
    )
    assert (returned, exits, caps) == ({"a": 1, "b": 1}, [], [])
