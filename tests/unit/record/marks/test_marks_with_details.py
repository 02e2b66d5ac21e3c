"""Guards of older releases that need a second look: whose output is in flight, which limit leaves no room."""

import pytest

from tests.toys import Queue, request

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
