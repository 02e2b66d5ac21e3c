"""Running requests that give their KV blocks to another one: who, for whom, how many."""

import pytest

pytest.importorskip("vllm")

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Preemption
from tests.contract.causes.scenes import running, waiting

pytestmark = pytest.mark.vllm


def test_preempted_this_step(scene):
    told = scene(num_blocks=1 + 4).play(
        stays={"prompt": 32, "max_tokens": 40}, victim={"prompt": 32, "max_tokens": 40}, steps=2
    )
    assert told.exits == [waiting("gate", Cause.PREEMPTED_THIS_STEP, "victim", 255)]
    assert told.guards == ["not preempted_reqs and self._pause_state != PauseState.PAUSED_ALL"]
    assert told.preempted == [
        Preemption(
            "victim",
            lost_tokens=32,
            for_request_id="stays",
            num_preemptions=1,
            blocks_needed=1,
            blocks_freed=2,
            policy="fcfs",
        )
    ]


def test_the_least_important_is_preempted(scene):
    """It stands first in the running list; the budget that it had got is given back."""
    engine = scene(num_blocks=1 + 4, scheduling_policy="priority")
    engine.after(low={"prompt": 30, "max_tokens": 40, "priority": 1})
    told = engine.play(high={"prompt": 32, "max_tokens": 40, "priority": 0}, steps=2)
    assert told.tokens == {"high": 1}
    assert told.exits == [waiting("gate", Cause.PREEMPTED_THIS_STEP, "low", 255)]
    assert told.preempted == [
        Preemption(
            "low",
            lost_tokens=31,
            for_request_id="high",
            num_preemptions=1,
            blocks_needed=1,
            blocks_freed=2,
            policy="priority",
        )
    ]


def test_several_victims_for_one_request(scene):
    """A second decode's 17 drafted tokens want two blocks; each victim has one."""
    drafts = {"method": "ngram", "num_speculative_tokens": 17, "prompt_lookup_max": 3}
    told = scene(num_blocks=1 + 3, speculative_config=drafts, drafts=17, max_num_seqs=3).play(
        wants_two={"prompt": 16, "max_tokens": 40},
        earlier={"prompt": 2, "max_tokens": 40},
        later={"prompt": 2, "max_tokens": 40},
        steps=2,
    )
    assert [
        (victim.request_id, victim.for_request_id, victim.blocks_needed, victim.blocks_freed)
        for victim in told.preempted
    ] == [("later", "wants_two", 2, 1), ("earlier", "wants_two", 2, 1)]


def test_preempted_itself(scene):
    told = scene(num_blocks=1 + 4).play(
        has_room={"prompt": 31, "max_tokens": 40}, last={"prompt": 32, "max_tokens": 40}, steps=2
    )
    assert told.tokens == {"has_room": 1}
    assert told.exits == [
        running("break", Cause.PREEMPTED_ITSELF, "last", 255),
        running("break", Cause.KV_BLOCKS, "last", 255),
        waiting("gate", Cause.PREEMPTED_THIS_STEP, "last", 255),
    ]
    assert told.guards[:2] == ["preempted_req == request", "new_blocks is None"]
    [itself] = told.preempted
    assert (itself.request_id, itself.for_request_id, itself.lost_tokens) == ("last", "last", 32)
    assert (itself.blocks_needed, itself.blocks_freed) == (1, 2)
