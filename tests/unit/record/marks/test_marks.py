"""What a mark gets to see: no name that is not surely bound, and nobody who may not be meant."""

import ast
import textwrap
from types import SimpleNamespace

import pytest

from schedtrace.record.allocation import Refusal
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


NO_ROOM = SimpleNamespace(allocate_slots=lambda *_, **__: None)


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

    monkeypatch.setattr("schedtrace.record.marks.exits.why_refused", why_refused)
    body = "\n    ".join(("for request in self.running:", "tokens = 2", *lines))
    _, [line], _ = run(body, running=ONE, kv_cache_manager=NO_ROOM, late=True, turns=[1])
    assert asked == expected
    assert (line.cause, line.request_id, line.blocks_needed) == ("kv_blocks", "a", 3 if expected else None)


IN_FLIGHT = """\
num_scheduled_tokens = {}
for request in self.running:
    if self.use_pp and request.num_output_placeholders > 0:
        continue
    if request.num_output_placeholders > 0 and (
        request.num_computed_tokens + 2 - request.num_output_placeholders
        >= request.num_prompt_tokens + request.max_tokens
    ):
        continue
    num_scheduled_tokens[request.request_id] = 1
"""
"""vLLM 0.15; only the second guard is there in others."""


@pytest.mark.parametrize(("use_pp", "detail"), [(True, "pipeline_parallel"), (False, None)])
def test_output_in_flight_is_the_last_token_only_where_no_detail_says_otherwise(use_pp, detail, run):
    one = request("a", num_output_placeholders=1, num_computed_tokens=9, num_prompt_tokens=8, max_tokens=2)
    _, [line], _ = run(IN_FLIGHT, running=[one], use_pp=use_pp)
    assert (line.kind, line.cause, line.request_id, line.detail) == (
        "continue",
        "output_in_flight",
        "a",
        detail,
    )


PADDING = """\
num_scheduled_tokens = {}
while self.waiting and token_budget > 0:
    request = self.waiting.peek_request()
    num_computed_tokens = request.num_computed_tokens
    num_new_tokens = request.num_tokens - num_computed_tokens
    if self.num_spec_tokens > 0 and num_new_tokens == 1:
        num_new_tokens = 1 + self.num_spec_tokens
        if (
            num_new_tokens > token_budget
            or num_computed_tokens + num_new_tokens > self.max_model_len
        ):
            break
    self.waiting.pop_request()
    num_scheduled_tokens[request.request_id] = num_new_tokens
    token_budget -= num_new_tokens
return num_scheduled_tokens
"""
"""vLLM 0.25 to 0.28."""


@pytest.mark.parametrize(
    ("budget", "computed", "detail"),
    [(3, 10, None), (9, 29, "max_model_len"), (3, 29, None)],
    ids=["no budget", "at max_model_len", "neither"],
)
def test_padding_that_does_not_fit_says_what_it_does_not_fit_into(budget, computed, detail, run):
    waits = request("a", num_computed_tokens=computed, num_tokens=computed + 1)
    returned, [line], _ = run(
        PADDING,
        budget,
        parameters="self, token_budget",
        waiting=Queue([waits]),
        num_spec_tokens=3,
        max_model_len=32,
    )
    assert returned == {}
    assert (line.kind, line.cause, line.request_id, line.budget_left, line.detail) == (
        "break",
        "spec_decode_padding",
        "a",
        budget,
        detail,
    )


def test_padding_that_fits_is_no_exit(run):
    waits = request("a", num_computed_tokens=10, num_tokens=11)
    returned, [line], _ = run(
        PADDING,
        9,
        parameters="self, token_budget",
        waiting=Queue([waits]),
        num_spec_tokens=3,
        max_model_len=32,
    )
    assert (returned, line.cause) == ({"a": 4}, "queue_empty")


PREEMPTS = """\
from types import SimpleNamespace
RequestStatus = SimpleNamespace(PREEMPTED=self.running[0].status)
preempted_reqs = []
num_scheduled_tokens = {}
for request in list(self.running):
    num_new_tokens = 1
    while True:
        new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
        if new_blocks is None:
            preempted_req = self.running.pop()
            self.kv_cache_manager.free(preempted_req)
            preempted_req.status = RequestStatus.PREEMPTED
            preempted_req.num_computed_tokens = 0
            preempted_reqs.append(preempted_req)
            if preempted_req == request:
                can_schedule = False
                break
        else:
            can_schedule = True
            break
    if not can_schedule:
        break
    num_scheduled_tokens[request.request_id] = num_new_tokens
return num_scheduled_tokens
"""
"""vLLM 0.10.0 to 0.11.0."""


class Blocks:
    """Has room for one request once another one has gone."""

    def __init__(self, room):
        self.room, self.gone = room, []

    def allocate_slots(self, one, _):
        if len(self.gone) < self.room:
            return None
        return one.request_id

    def free(self, one):
        assert one.num_computed_tokens == 5
        self.gone.append(one.request_id)


class Recorder:
    """What is told of preemptions, in order."""

    def __init__(self, blocks):
        self.blocks, self.told = blocks, []

    def request_preempted(self, _scheduler, victim):
        event = self.events[-1]
        self.told.append(
            (victim.request_id, victim.num_computed_tokens, event.request_id, [*self.blocks.gone])
        )

    def request_was_preempted(self):
        self.told.append([*self.blocks.gone])


@pytest.fixture(autouse=True)
def _nobody_to_ask_why(monkeypatch):
    monkeypatch.setattr("schedtrace.record.marks.exits.why_refused", lambda *_: None)


def test_a_schedule_that_preempts_by_itself_tells_its_victims(run):
    blocks = Blocks(room=1)
    recorder = Recorder(blocks)
    running = [request(name, num_computed_tokens=5) for name in "ab"]
    returned, exits, _ = run(PREEMPTS, running=running, kv_cache_manager=blocks, recorder=recorder)
    assert (returned, exits) == ({"a": 1, "b": 1}, [])
    assert recorder.told == [("b", 5, "a", []), ["b"]]


def test_whoever_preempts_itself_is_left_without_blocks(run):
    blocks = Blocks(room=9)
    recorder = Recorder(blocks)
    returned, exits, _ = run(
        PREEMPTS,
        running=[request("a", num_computed_tokens=5)],
        kv_cache_manager=blocks,
        recorder=recorder,
    )
    assert (returned, recorder.told) == ({}, [("a", 5, "a", []), ["a"]])
    assert [(line.cause, line.request_id, line.guard) for line in exits] == [
        ("preempted_itself", "a", None),
        ("kv_blocks", "a", None),
    ]
