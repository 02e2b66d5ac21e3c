"""Requests that wait for a KV connector (a toy that vLLM's own factory builds), or for its blocks."""

import pytest

pytest.importorskip("vllm")

from schedtrace.model.causes import Cause
from tests.contract.causes.scenes import nobody_is_left, running, waiting
from tests.contract.causes.toy_connectors import KV

pytestmark = pytest.mark.vllm

TWO_BLOCKS = {"prompt": 32, "max_tokens": 40}
"""Full, so that the first decode wants a third block."""


def test_connector_undecided(scene):
    engine = scene(kv_transfer_config=KV)
    engine.scheduler.connector.has["asked_for"] = (None, False)
    told = engine.play(asked_for={})
    assert told.exits == [
        waiting("continue", Cause.CONNECTOR_UNDECIDED, "asked_for", 256),
        nobody_is_left(256),
    ]
    assert told.guards[0] == "ext_tokens is None"


def test_kv_load_started(scene):
    engine = scene(kv_transfer_config=KV)
    engine.scheduler.connector.has["is_loaded"] = (16, True)
    told = engine.play(is_loaded=40)
    assert told.exits == [waiting("continue", Cause.KV_LOAD_STARTED, "is_loaded", 256), nobody_is_left(256)]
    assert told.guards[0] == "load_kv_async"


def test_remote_kv_pending(scene):
    engine = scene(kv_transfer_config=KV)
    engine.scheduler.connector.has["is_loaded"] = (16, True)
    told = engine.play(is_loaded=40, steps=2)
    assert told.exits == [
        waiting("continue", Cause.REMOTE_KV_PENDING, "is_loaded", 256, detail="WAITING_FOR_REMOTE_KVS"),
        nobody_is_left(256),
    ]
    assert told.guards[0] == "not ready_to_schedule"


def test_a_load_would_fit_but_for_reserved_blocks(scene):
    """Of 9 blocks a prefill under way has 2 and will want 5 more: 2 are left for the load, which wants 3."""
    engine = scene(
        kv_transfer_config=KV, num_blocks=1 + 9, max_num_batched_tokens=64, long_prefill_token_threshold=32
    )
    engine.scheduler.connector.has["is_loaded"] = (48, True)
    told = engine.play(under_way=112, is_loaded=49)
    refused = waiting(
        "break", Cause.KV_BLOCKS, "is_loaded", 32, detail="reserved", blocks_needed=3, blocks_free=7
    )
    assert told.exits == [refused]
    assert told.guards == ["new_blocks is None"]


def test_connector_frees_pending(scene):
    """Rather than preempting, vLLM waits for the blocks that the connector is about to free."""
    engine = scene(kv_transfer_config=KV, num_blocks=1 + 4)
    engine.scheduler.connector.about_to_free = True
    told = engine.play(wants_a_block=TWO_BLOCKS, other=TWO_BLOCKS, steps=2)
    assert (told.tokens, told.preempted) == ({}, [])
    assert told.exits == [
        running("break", Cause.CONNECTOR_FREES_PENDING, "wants_a_block", 256),
        running("break", Cause.KV_BLOCKS, "wants_a_block", 256),
        nobody_is_left(256),
    ]
    assert "self.connector.has_pending_block_frees()" in told.guards[0]


def test_victim_not_freeable(scene):
    """A step in flight may still write the victim's blocks, and the connector could give them away."""
    told = scene(kv_transfer_config=KV, num_blocks=1 + 4, async_scheduling=True).play(
        wants_a_block=TWO_BLOCKS, victim=TWO_BLOCKS, steps=2
    )
    assert (told.tokens, told.preempted) == ({}, [])
    assert told.exits == [
        running("break", Cause.VICTIM_NOT_FREEABLE, "wants_a_block", 256),
        running("break", Cause.KV_BLOCKS, "wants_a_block", 256),
        nobody_is_left(256),
    ]
    assert told.guards[0] == "not self._request_blocks_can_be_freed(preempted_req)"
