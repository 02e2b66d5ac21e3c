"""Which loops of a ``schedule()`` are its own, how their ends are marked, and which guard tells a cause."""

import textwrap

import pytest

from schedtrace.record.marks import guards
from schedtrace.record.marks.guards import Guard, Registered, end_cause, exit_cause

RUNNING = """\
while req_index < len(self.running) and token_budget > 0:
    request = self.running[req_index]
    num_scheduled_tokens[request.request_id] = 1
    {}
"""
WAITING = """\
while self.waiting and token_budget > 0:
    request = self.waiting.peek_request()
    {}
    new_blocks = self.kv_cache_manager.allocate_slots(request, 1)
"""
RUNNING_END = (
    "running",
    "condition",
    ("(loop done)", "token_budget"),
    "req_index < len(self.running) and token_budget > 0",
    1,
)
WAITING_END = (
    "waiting",
    "condition",
    ("queue_empty", "token_budget"),
    "self.waiting and token_budget > 0",
    1,
)


def within(loop, *lines):
    """The loop with these lines in its middle."""
    return loop.format("\n    ".join(lines))


def test_both_loops_are_told_apart(sites):
    both = within(RUNNING, "if request.late:", "    continue") + within(
        WAITING, "if request.late:", "    break"
    )
    late = "request.late"
    assert sites(both) == [
        ("running", "continue", ("other",), late, 5),
        RUNNING_END,
        ("waiting", "break", ("other",), late, 9),
        (*WAITING_END[:4], 6),
    ]


LOOPS = {
    "for request in self.running": "running",
    "for request in self.waiting": "waiting",
    "while self.running and self.go_on": "running",
    "while self.waiting and len(self.running) < self.most": "waiting",
    "while token_budget > 0 and len(self.running) < self.most and self.waiting.peek_request()": "waiting",
    "while True": None,
    "for step in range(3)": None,
}


@pytest.mark.parametrize(("head", "loop"), LOOPS.items())
def test_a_loop_is_told_by_what_it_takes_its_requests_from(head, loop, sites):
    found = sites(f"{head}:\n    num_scheduled_tokens[1] = 1\n    if self.late:\n        break\n")
    assert [(site[0], site[1]) for site in found if site[1] == "break"] == ([(loop, "break")] if loop else [])


def test_a_loop_is_told_by_whom_it_takes_from_in_its_body(sites):
    body = "while token_budget > 0 and len(self.running) < 3:\n    request = self.waiting.pop_request()\n"
    assert [site[0] for site in sites(body + "    num_scheduled_tokens[1] = 1\n")] == ["waiting"]


@pytest.mark.parametrize(
    "helper",
    [
        "while self.waiting:\n    self.waiting.pop_request()\n    if self.late:\n        break\n",
        "for request in self.waiting:\n    if request.late:\n        break\n",
        "if self.waiting:\n    while self.waiting:\n        self.waiting.pop_request()\n",
        "while skipped:\n    self.waiting.prepend_request(skipped.pop())\n",
    ],
)
def test_a_loop_that_hands_out_no_tokens_is_a_helper(helper, sites):
    assert sites(helper) == []


def test_a_helper_within_a_loop_is_not_marked_and_an_allocation_again_is(sites):
    helper = ("for block in request.blocks:", "    if block.late:", "        break")
    again = (
        "while True:",
        "    new_blocks = self.kv_cache_manager.allocate_slots(request, 1)",
        "    if new_blocks is not None:",
        "        break",
        "    if self.late:",
        "        break",
    )
    assert sites(within(RUNNING, *helper, *again)) == [
        ("running", "break", ("other",), "self.late", 12),
        RUNNING_END,
    ]


@pytest.mark.parametrize("success", ["blocks is not None", "blocks"])
def test_an_allocation_that_succeeds_is_no_exit_whatever_it_is_called(success, sites):
    lines = (
        "while True:",
        "    blocks = self.allocate_slots(request, 1)",
        f"    if {success}:",
        "        break",
    )
    assert sites(within(RUNNING, *lines)) == [RUNNING_END]


OUTCOME = (
    "while True:",
    "    new_blocks = self.kv_cache_manager.allocate_slots(request, 1)",
    "    if new_blocks is None:",
    "        if self.nobody_else:",
    "            can_schedule = False",
    "            break",
    "    else:",
    "        can_schedule = True",
    "        break",
    "if not can_schedule:",
    "    break",
)
"""As vLLM 0.10.0 to 0.11.0 have it."""


def changed(**lines):
    """``OUTCOME`` with lines replaced, by their number."""
    return [lines.get(f"line{number}", line) for number, line in enumerate(OUTCOME)]


NO_OUTCOME = {
    "set elsewhere": ("can_schedule = self.late", *OUTCOME),
    "set to what it does not tell": changed(line7="        can_schedule = False"),
    "set on and off": changed(line4="            can_schedule = True"),
    "set before anybody has looked for blocks": (
        *OUTCOME[:2],
        "    if self.late:",
        "        can_schedule = False",
        "        break",
        *OUTCOME[2:],
    ),
    "not set right before the end": changed(line4="            can_schedule = False; self.seen += 1"),
}


def test_an_allocation_that_succeeds_otherwise_is_no_exit(sites):
    assert sites(within(RUNNING, *OUTCOME)) == [
        ("running", "break", ("other",), "self.nobody_else", 9),
        ("running", "break", ("kv_blocks",), "not can_schedule", 14),
        RUNNING_END,
    ]


@pytest.mark.parametrize("lines", NO_OUTCOME.values(), ids=NO_OUTCOME)
def test_a_flag_tells_how_allocating_ended_only_if_nothing_else_sets_it(lines, sites):
    [*_, end] = [site for site in sites(within(RUNNING, *lines)) if site[1] == "break"]
    assert end[2] == ("other",)
    assert end[3].startswith("not can_schedule, where can_schedule = ")


def test_a_flag_is_explained_and_a_known_guard_is_not(sites):
    lines = ("full = max(self.ranks()) >= 3", "if not full:", "    pass", "else:", "    break")
    known = ("new_blocks = 1", "if new_blocks:", "    break")
    found = sites(within(WAITING, *lines, *known))
    assert [site[3] for site in found if site[1] == "break"] == [
        "full, where full = max(self.ranks()) >= 3",
        "new_blocks",
    ]


def test_functions_within_are_left_alone(sites):
    lines = (
        "def skip(queue):",
        "    for request in queue.waiting:",
        "        num_scheduled_tokens[1] = 1",
        "        break",
        "key = lambda: [token_budget for token_budget in self.running]",
    )
    assert sites(within(WAITING, *lines)) == [WAITING_END]


GATE = "not preempted_reqs and self._pause_state == PauseState.UNPAUSED"


def gated(gate, *otherwise):
    inner = textwrap.indent(within(WAITING, "pass"), "    ")
    return f"if {gate}:\n{inner}" + "".join(f"{line}\n" for line in otherwise)


def test_a_condition_around_a_loop_is_its_gate(sites):
    gate = ("waiting", "gate", ("preempted_this_step", "paused"), GATE, 1)
    assert gate in sites(gated(GATE))
    assert gate in sites(gated(GATE, "elif self.early:", "    pass"))
    nested = sites(gated(GATE).replace("if not", "if self.early:\n  if not").replace("\n    ", "\n      "))
    assert [site[3] for site in nested if site[1] == "gate"] == [GATE, "not self.early"]


def test_a_condition_between_two_loops_of_a_kind_closes_neither(sites):
    other = textwrap.indent(within(WAITING, "pass"), "    ").splitlines()
    assert [site[1] for site in sites(gated(GATE, "else:", *other))] == ["condition", "condition"]


def test_a_loop_over_everybody_says_no_more_than_that_it_is_through(sites):
    body = "for request in self.waiting:\n    num_scheduled_tokens[1] = 1\n"
    assert sites(body) == [("waiting", "condition", ("(loop done)",), "self.waiting", 1)]


def test_each_part_of_a_condition_has_its_cause_though_another_part_does_something(sites):
    body = within(WAITING, "pass").replace("self.waiting and", "self.take_next() and self.waiting and")
    assert [site[2] for site in sites(body)] == [("other", "queue_empty", "token_budget")]


GUARDS = {
    ("if self.late:", "    continue"): [("continue", "self.late")],
    ("if self.late:", "    pass", "else:", "    break"): [("break", "not self.late")],
    ("if self.late:", "    pass", "elif self.early:", "    break"): [("break", "self.early")],
    ("if self.late:", "    pass", "elif self.early:", "    pass", "else:", "    return"): [
        ("break", "not self.early")
    ],
    ("if self.late:", "    if self.early:", "        break", "    continue"): [
        ("break", "self.early"),
        ("continue", "self.late"),
    ],
    ("break",): [("break", "True")],
    ("with self.timed():", "    if self.late:", "        break"): [("break", "self.late")],
    (
        "try:",
        "    break",
        "except KeyError:",
        "    continue",
        "else:",
        "    return",
        "finally:",
        "    pass",
    ): [
        ("break", "True"),
        ("continue", "KeyError"),
        ("break", "True"),
    ],
    ("try:", "    pass", "except:", "    continue"): [("continue", "True")],
    ("try:", "    pass", "finally:", "    if self.late:", "        break"): [("break", "self.late")],
    ("try:", "    pass", "except* KeyError:", "    self.seen += 1", "if self.late:", "    break"): [
        ("break", "self.late")
    ],
    ("match request.kind:", "    case 1:", "        continue", "    case _:", "        break"): [
        ("continue", "request.kind"),
        ("break", "request.kind"),
    ],
}


@pytest.mark.filterwarnings("ignore:'break' in a 'finally' block:SyntaxWarning")  # since Python 3.14
@pytest.mark.parametrize(("lines", "expected"), GUARDS.items())
def test_the_innermost_condition_is_the_guard(lines, expected, sites):
    found = sites(within(WAITING, *lines))
    assert [(site[1], site[3]) for site in found if site[1] != "condition"] == expected
    assert {site[2] for site in found if site[1] != "condition"} == {("other",)}


CAUSES = {
    "len(self.running) >= self.max_num_running_reqs": "max_num_seqs",
    "len(self.running) >= self.max_num_running_reqs - 4": "other",
    "len(self.running) >= self.max_num_running_reqs and self.draining": "other",
    "num_new_tokens == 0": "(zero tokens)",
    "num_new_tokens < 64": "other",
    "new_blocks is None": "kv_blocks",
    "new_blocks is None and self.late": "other",
    "request.num_output_placeholders > 0 and request.num_computed_tokens + 2 >= request.max_tokens": "other",
    "num_external_computed_tokens is None": "connector_undecided",
    "not self.scheduler_config.chunked_prefill_enabled and num_new_tokens > 0": "chunked_prefill_off",
}


@pytest.mark.parametrize(("guard", "cause"), CAUSES.items())
def test_a_guard_is_known_only_if_all_names_and_numbers_in_it_are(guard, cause, sites):
    found = sites(within(WAITING, f"if {guard}:", "    break"))
    assert [site[2] for site in found if site[1] == "break"] == [(cause,)]


def test_a_full_batch_may_end_a_loop_by_its_condition(sites):
    head = "while self.waiting and len(self.running) < self.max_num_running_reqs"
    [site] = sites(within(WAITING, "pass").replace("while self.waiting and token_budget > 0", head))
    assert site[2] == ("queue_empty", "max_num_seqs")


NAMES = frozenset({"self", "running_on_ranks", "max_running_per_rank"})
NO_NAMES: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("module", "loop", "names", "enclosing", "cause"),
    [
        ("theirs", "waiting", NAMES, NO_NAMES, "rank_balance"),
        ("theirs", "running", NAMES | {"more", "64"}, {"outer"}, "rank_balance"),
        ("vllm.v1.core.sched.scheduler", "waiting", NAMES, NO_NAMES, "other"),
        ("theirs", "waiting", NAMES - {"running_on_ranks"}, NO_NAMES, "other"),
        ("theirs", "waiting", {"self", "more"}, NAMES, "other"),
        ("theirs", "waiting", {"self", "len", "running", "max_num_running_reqs"}, NO_NAMES, "max_num_seqs"),
    ],
)
def test_a_guard_that_somebody_has_named_is_known_in_that_module_by_all_its_names(
    module, loop, names, enclosing, cause, monkeypatch
):
    guard = Guard("theirs", NAMES - {"self"}, "rank_balance", "...")
    monkeypatch.setattr(guards, "registered_guards", lambda: Registered((guard,), ()))
    assert exit_cause(module, loop, frozenset(names), frozenset(enclosing)) == cause
    assert end_cause("theirs", "waiting", NAMES) == "rank_balance"
