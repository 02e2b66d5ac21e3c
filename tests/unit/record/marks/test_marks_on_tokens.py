"""A cap is told only where tokens really get fewer; a refusal with the limit, where it can be asked for."""

import textwrap
from types import SimpleNamespace

import pytest

from schedtrace.record.allocation import Refusal
from tests.toys import request

ONE = [request("a")]
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
