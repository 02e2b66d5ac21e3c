"""Traced against plain where the queue, or what a scheduler does with those that run, is not vLLM's."""

from collections import defaultdict

import pytest

pytest.importorskip("vllm")

from schedtrace.model.causes import Cause
from schedtrace.read.run import read_run
from schedtrace.record.header import vllm_version
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from tests.contract.deciding import first_difference
from tests.contract.loads import FAMILIES, make_script, play
from tests.contract.toy_queues import QUEUES, gives_back, sets_aside, with_queue

OURS = vllm_version().startswith("0.32.")
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not OURS, reason="the toys are for vLLM 0.32")]

LOADS = ["few_seqs", "aborts", "tight_kv_small_budget", "async_tight", "chunked_prefill_off"]


class Untouched(Driver):
    """Keeps what is decided, and asks no queue for it."""

    def __init__(self, wrap, **options):
        super().__init__(wrap, **options)
        self.decisions = []
        self.waiting = []
        """How many wait after each step, and whom the queue was asked for last."""

    def schedule(self, *args):
        output = super().schedule(*args)
        cached = output.scheduled_cached_reqs
        self.decisions.append(
            (list(output.num_scheduled_tokens.items()), list(cached.new_block_ids), output.finished_req_ids)
        )
        scheduler = self.scheduler
        held = getattr(scheduler.waiting, "held", scheduler.waiting)
        self.waiting.append(len(list(held)) + len(scheduler.kv_holding_waiting))
        return output

    def update(self):
        told = super().update()
        outputs = [one for of_client in told.values() for one in of_client.outputs]
        self.decisions.append([(one.request_id, one.new_token_ids, one.finish_reason) for one in outputs])
        return told


def both(make, load, seed=1):
    """The engine of a load, plain and traced."""
    script = make_script(FAMILIES[load], seed)
    plain = play(Untouched(make, **FAMILIES[load].engine), script)
    traced = play(Untouched(lambda base: traced_class(make(base)), **FAMILIES[load].engine), script)
    return plain, traced


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_a_queue_decides_the_same_whether_it_is_recorded_or_not(queue, load, recording, warnings):
    plain, traced = both(lambda base: with_queue(base, queue), load)
    assert first_difference(plain.decisions, traced.decisions) is None
    [trace] = read_run(recording).traces
    assert (warnings, trace.notices) == ([], [])
    assert trace.header.foreign_queues == [f"tests.contract.toy_queues.{queue.__name__}"]
    assert trace.steps.height == trace.end.steps
    assert trace.steps["num_waiting_after"].to_list() == traced.waiting
    assert wrong_causes(trace) == []


def wrong_causes(trace):
    """Exits that say that nobody was left in the queue, although more waited than were skipped."""
    skipped = defaultdict(int)
    wrong = []
    left = dict(trace.steps.select("step", "num_waiting_after").iter_rows())
    for line in trace.exits().collect().filter(loop="waiting").iter_rows(named=True):
        if line["kind"] == "continue":
            skipped[line["step"]] += line["count"]
        elif line["cause"] == Cause.QUEUE_EMPTY and left[line["step"]] > skipped[line["step"]]:
            wrong.append(line)
    return wrong


def test_a_queue_that_is_false_although_requests_wait_is_not_told_as_empty(recording):
    both(lambda base: with_queue(base, QUEUES["Withholds"]), "few_seqs")
    [trace] = read_run(recording).traces
    told = trace.exits().collect().filter(cause="other", loop="waiting")
    assert told.height > 20
    assert set(told["guard"]) == {"not request_queue"}
    assert set(told["values"]) <= {f"{count} waiting requests" for count in range(1, 300)}
