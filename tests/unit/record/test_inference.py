"""Exits inferred from the state after ``schedule()``: one scheduler for each answer, unchanged afterwards."""

import copy
from types import SimpleNamespace

import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit
from schedtrace.record.inference import InferredExits
from tests.toys import Queue


def request(name, status="WAITING", **facts):
    return SimpleNamespace(request_id=name, status=SimpleNamespace(name=status), num_tokens=9, **facts)


class Manager:
    """Refuses whoever is called so."""

    def allocate_slots(self, request, *_args, **_keywords):
        return None if request.request_id == "refused" else ["block"]


def scheduler(*waiting, running=(), seats=4, chunked=True, **facts):
    return SimpleNamespace(
        kv_cache_manager=Manager(),
        waiting=Queue(waiting),
        running=list(running),
        max_num_running_reqs=seats,
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
        **facts,
    )


def waiting_exit(toy, budget=5, preempted=0, allocates=None):
    """The exit of the waiting loop, after a call in which ``allocates`` asked for blocks."""
    inference = InferredExits(toy)
    inference.begin(toy, running=0, waiting=1)
    if allocates is not None:
        toy.kv_cache_manager.allocate_slots(allocates, 3)
    [inferred] = inference.infer_exits(
        toy, budget, dict.fromkeys(one.request_id for one in toy.running), preempted
    )
    return inferred


A = request("a")
REFUSED, RUNS = request("refused"), request("refused", status="RUNNING")
THREE = [request("r"), request("s"), request("t")]
UNPAUSED = SimpleNamespace(name="UNPAUSED")
BLOCKED = {
    "a seat is free": (scheduler(A, running=THREE, _pause_state=UNPAUSED), {}, (Cause.OTHER, "a", None)),
    "a paused session has a seat": (
        scheduler(A, running=THREE, num_waiting_for_streaming_input=1), {}, (Cause.MAX_NUM_SEQS, "a", None),
    ),
    "a prompt that fits": (scheduler(A, chunked=False), {"budget": 9}, (Cause.OTHER, "a", None)),
    "one larger than the rest of the budget": (
        scheduler(A, chunked=False), {"budget": 8}, (Cause.CHUNKED_PREFILL_OFF, "a", "prompt of 9 tokens"),
    ),
    "a preemption": (scheduler(A), {"preempted": 1}, (Cause.PREEMPTED_THIS_STEP, None, None)),
    "a preemption, and nobody waits": (scheduler(), {"preempted": 1}, (Cause.QUEUE_EMPTY, None, None)),
    "no budget, before all that the loop would have found": (
        scheduler(REFUSED, seats=0), {"budget": 0, "allocates": REFUSED},
        (Cause.TOKEN_BUDGET, "refused", None),
    ),
    "no blocks": (scheduler(A, REFUSED), {"allocates": REFUSED}, (Cause.KV_BLOCKS, "refused", None)),
    "no blocks for one that runs, which was a preemption": (
        scheduler(A), {"allocates": RUNS}, (Cause.OTHER, "a", None),
    ),
}  # fmt: skip
"""Where vLLM's own scheduler comes to in ``tests/contract/test_inferred_exits.py``: not here."""


@pytest.mark.parametrize(("toy", "call", "expected"), BLOCKED.values(), ids=BLOCKED)
def test_the_waiting_loop(toy, call, expected):
    found = waiting_exit(toy, **call)
    assert (found.cause, found.request_id, found.detail) == expected
    assert found.budget_left == call.get("budget", 5)
    assert bool(found.guard) == (found.cause == Cause.OTHER)


def test_a_failed_allocation_of_the_call_before_does_not_count():
    refused = request("refused")
    toy = scheduler(refused)
    inference = InferredExits(toy)
    inference.begin(toy, running=0, waiting=1)
    toy.kv_cache_manager.allocate_slots(refused)
    inference.infer_exits(toy, 5, {}, 0)
    inference.begin(toy, running=0, waiting=1)
    [inferred] = inference.infer_exits(toy, 5, {}, 0)
    assert inferred.cause == Cause.OTHER


@pytest.mark.parametrize(
    ("running", "waiting", "watched"), [(0, 1, True), (3, 1, True), (4, 1, False), (0, 0, False)]
)
def test_allocations_are_watched_only_if_somebody_could_be_refused_one(running, waiting, watched):
    toy = scheduler()
    InferredExits(toy).begin(toy, running, waiting)
    assert (type(toy.kv_cache_manager) is not Manager) is watched


def test_watching_passes_everything_on_and_leaves_nothing_behind():
    toy = scheduler()
    inference = InferredExits(toy)
    inference.begin(toy, 0, 1)
    assert toy.kv_cache_manager.allocate_slots(request("a"), 3, num_lookahead_tokens=1) == ["block"]
    inference.release()
    assert (type(toy.kv_cache_manager), vars(toy.kv_cache_manager)) == (Manager, {})
    inference.release()


def test_a_copy_that_is_made_within_a_watched_call_is_plain_and_asks_nobody_else():
    toy = scheduler()
    inference = InferredExits(toy)
    inference.begin(toy, 0, 1)
    for made in (copy.copy, copy.deepcopy):
        copied = made(toy.kv_cache_manager)
        assert (type(copied), copied.allocate_slots(request("refused"))) == (Manager, None)
    [exit_line] = inference.infer_exits(toy, 5, {}, 0)
    assert exit_line.cause == Cause.QUEUE_EMPTY


def test_an_allocator_put_on_the_object_before_is_put_back():
    toy = scheduler()
    toy.kv_cache_manager.allocate_slots = own = lambda *_: ["own"]
    inference = InferredExits(toy)
    inference.begin(toy, 0, 1)
    assert toy.kv_cache_manager.allocate_slots(request("a")) == ["own"]
    inference.infer_exits(toy, 5, {}, 0)
    assert toy.kv_cache_manager.allocate_slots is own


def test_an_allocator_put_on_the_object_meanwhile_stays():
    toy = scheduler()
    inference = InferredExits(toy)
    inference.begin(toy, 0, 1)
    toy.kv_cache_manager.allocate_slots = own = lambda *_: ["own"]
    inference.release()
    assert toy.kv_cache_manager.allocate_slots is own


def running_exits(*running, budget=5, scheduled=("r",)):
    toy = scheduler(running=running)
    return InferredExits(toy).infer_exits(toy, budget, dict.fromkeys(scheduled, 1), 0)[:-1]


def test_nobody_is_left_out_where_as_many_run_as_were_scheduled():
    assert running_exits(request("r")) == []


def test_nobody_is_left_out_if_a_scheduled_request_no_longer_runs():
    assert running_exits(request("r"), budget=0, scheduled=("r", "s")) == []


def test_without_budget_the_first_one_left_out_is_where_the_loop_ended():
    exits = running_exits(request("r"), request("s"), request("t"), budget=0)
    assert exits == [Exit("running", "condition", Cause.TOKEN_BUDGET, "s", 0)]


@pytest.mark.parametrize(
    ("placeholders", "computed", "cause"),
    [
        (1, 19, Cause.OUTPUT_IN_FLIGHT),  # 10 of prompt and 10 to come: the last token is in flight
        (1, 18, Cause.OTHER),
        (2, 20, Cause.OUTPUT_IN_FLIGHT),
        (2, 19, Cause.OTHER),
        (0, 30, Cause.OTHER),
    ],
)
def test_one_left_out_with_budget_has_its_last_token_in_flight_or_it_is_not_known(
    placeholders, computed, cause
):
    out = request(
        "s",
        num_output_placeholders=placeholders,
        num_prompt_tokens=10,
        max_tokens=10,
        num_computed_tokens=computed,
    )
    assert running_exits(request("r"), out) == [Exit("running", "continue", cause, "s", 5)]


def test_a_cache_manager_whose_class_cannot_be_assigned_is_not_watched():
    toy = scheduler(A)
    toy.kv_cache_manager = SimpleNamespace(allocate_slots=lambda *_: None)
    inference = InferredExits(toy)
    for _ in range(2):
        inference.begin(toy, 0, 1)
        toy.kv_cache_manager.allocate_slots(REFUSED)
        [inferred] = inference.infer_exits(toy, 5, {}, 0)
        assert (inferred.cause, type(toy.kv_cache_manager)) == (Cause.OTHER, SimpleNamespace)
