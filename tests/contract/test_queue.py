"""``schedtrace queue`` between steps of vLLM's scheduler: its own queues, tokens, blocks and causes."""

from typing import Any

import pytest

pytest.importorskip("vllm")

from schedtrace.model.trace import Exit
from schedtrace.record.live.between_steps import NotReachedError
from schedtrace.record.live.queue_copy import copy_queues, queue_now
from schedtrace.record.written_ids import WrittenIds
from schedtrace.simulate import Driver
from tests.contract.loads import FAMILIES, SHORT_STEPS, make_script, play
from tests.toys import Now, core_of

pytestmark = pytest.mark.vllm

EVERY = 5
QUEUES = ("kv_holding_waiting", "skipped_waiting", "waiting")


class Never:
    """An engine that is held up in a step."""

    def do(self, _what: Any, timeout_s: float) -> None:
        raise NotReachedError(timeout_s)


def now(engine, exits=(), way=None):
    return queue_now(core_of(engine), way or Now(), lambda **_wait: exits, WrittenIds(hash_ids=False))


def vllms_own(scheduler):
    """By vLLM's own methods, which the code under test does not call."""
    manager = scheduler.kv_cache_manager

    def entry(request):
        blocks = sum(map(len, manager.get_block_ids(request.request_id)))
        tokens = (request.num_prompt_tokens, request.num_computed_tokens, request.num_output_tokens)
        lora = request.lora_request.lora_name if request.lora_request else None
        return (request.request_id, request.status.name.lower(), *tokens, blocks, request.priority, lora)

    waiting = [one for name in QUEUES for one in getattr(scheduler, name, ())]
    return [*map(entry, scheduler.running)], [*map(entry, waiting)], manager.block_pool.get_num_free_blocks()


def shown(queue):
    def entry(one):
        tokens = (one.prompt_tokens, one.computed_tokens, one.output_tokens)
        return (one.request_id, one.state, *tokens, one.blocks, one.priority, one.lora)

    return [*map(entry, queue.running)], [*map(entry, queue.waiting)], queue.blocks_free


class Sampled(Driver):
    """Looked at every few steps."""

    calls, compared = 0, 0

    def schedule(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls % EVERY == 0 and self.scheduler.requests:
            assert shown(now(self)) == vllms_own(self.scheduler)
            self.compared += 1
        return super().schedule(*args)


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_vllms_own(name):
    engine = play(Sampled(**FAMILIES[name].engine), make_script(FAMILIES[name], 0, SHORT_STEPS))
    assert engine.compared > 10


@pytest.fixture
def crowded():
    """Two seats are taken, two requests wait."""
    engine = Driver(max_num_seqs=2)
    for number in range(4):
        engine.add(f"r{number}", 40)
    engine.step()
    return engine


def test_the_cause_of_a_wait_is_the_skip_that_names_it_else_the_end_of_the_loop(crowded):
    exits = [
        Exit("running", "continue", "async_stop_reserved", "r1"),
        Exit("waiting", "continue", "max_loras", "r3"),
        Exit("waiting", "condition", "max_num_seqs"),
    ]
    queue = now(crowded, exits)
    causes = {one.request_id: one.refused_for for one in (*queue.running, *queue.waiting)}
    assert causes == {"r0": None, "r1": "async_stop_reserved", "r2": "max_num_seqs", "r3": "max_loras"}
    assert (queue.seats, queue.policy, queue.pause, queue.between_steps) == (2, "fcfs", None, True)


def test_who_has_output_and_waits_was_preempted_although_vllm_does_not_count_it(crowded):
    """Requests of vLLM before 0.11.2 have no count of preemptions."""
    copied = copy_queues(crowded.scheduler, in_flight=False)
    copied = copied._replace(output_tokens=[3] * 4, num_preemptions=[None] * 4)
    states = [request.state for request in copied.ordered_requests()]
    assert states == ["running", "running", "preempted", "preempted"]


def test_an_empty_queue_is_no_reason(crowded):
    queue = now(crowded, [Exit("waiting", "condition", "queue_empty")])
    assert {one.refused_for for one in queue.waiting} == {None}


def test_an_engine_that_is_within_a_step_is_read_meanwhile_and_its_exits_are_not_waited_for(crowded):
    waits = []

    def exits(*, wait):
        waits.append(wait)
        return []

    queue = queue_now(core_of(crowded), Never(), exits, WrittenIds(hash_ids=False))
    assert not queue.between_steps
    assert shown(queue) == vllms_own(crowded.scheduler)
    assert waits == [False]


def test_exits_that_are_waited_for_are_of_a_step_before_the_copy(crowded):
    def exits(*, wait):
        if not wait:
            return []
        crowded.add("late", 40)
        return [Exit("waiting", "condition", "max_num_seqs")]

    queue = queue_now(core_of(crowded), Now(), exits, WrittenIds(hash_ids=False))
    assert [one.request_id for one in queue.waiting] == ["r2", "r3", "late"]
    assert queue.between_steps
