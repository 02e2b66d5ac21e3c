"""Models for which a chunk may not end anywhere: Mamba layers, several MTP modules."""

import pytest

pytest.importorskip("vllm")

from schedtrace.model.causes import Cap, Cause
from schedtrace.model.trace import ChunkCap
from tests.contract.causes.models import with_mamba, with_mtp
from tests.contract.causes.scenes import nobody_is_left, running, waiting

pytestmark = pytest.mark.vllm


def test_mamba_alignment(scene):
    """No block of 16 goes into the 8 tokens that are left."""
    told = scene(**with_mamba(), max_num_batched_tokens=24).play(first=16, second=40)
    assert told.tokens == {"first": 16}
    assert told.exits == [waiting("break", Cause.MAMBA_ALIGNMENT, "second", 8)]
    assert told.guards == ["num_new_tokens == 0"]


def test_mamba_alignment_leaves_a_running_request_out(scene):
    """The first request decodes again once its output is back (two batches are in flight): 15 are left."""
    engine = scene(**with_mamba(), max_num_batched_tokens=16, pipeline_parallel_size=2)
    told = engine.after(decodes=1).play(half_way=64, steps=2)
    assert told.tokens == {"decodes": 1}
    assert told.exits == [
        running("continue", Cause.MAMBA_ALIGNMENT, "half_way", 15, detail=Cap.MAMBA_ALIGNMENT),
        nobody_is_left(15),
    ]
    assert told.guards[0] == "num_new_tokens == 0"


def test_kv_blocks_without_a_limit_where_vllm_only_puts_it_off(scene):
    """State that another request writes in this very step cannot be used in it: vLLM asks for too much, then.

    That other one has 4 blocks for attention and 1 for its state.
    """
    told = scene(**with_mamba()).play(
        writes={"prompt": 65, "shared": 65}, could_use_it={"prompt": 65, "shared": 65}
    )
    assert told.tokens == {"writes": 64}
    assert told.exits == [waiting("break", Cause.KV_BLOCKS, "could_use_it", 192, blocks_free=999 - 4 - 1)]


def test_prefill_lookahead(scene):
    """One token is left of the budget: with it the chunk would end 2 tokens before the prompt's end."""
    told = scene(**with_mtp(), max_num_batched_tokens=16).play(first=15, second=3)
    assert told.tokens == {"first": 15}
    assert told.exits == [
        waiting("break", Cause.PREFILL_LOOKAHEAD, "second", 1, detail=Cap.PREFILL_LOOKAHEAD),
    ]
    assert told.guards == ["num_new_tokens == 0"]


def test_prefill_lookahead_leaves_a_running_request_out(scene):
    """A threshold of one token: 3 are left to compute, and after one of them it would be 2."""
    told = scene(**with_mtp(), long_prefill_token_threshold=1).play(
        stuck=4, other={"prompt": 1, "max_tokens": 9}, steps=2
    )
    assert told.exits[0] == running(
        "continue", Cause.PREFILL_LOOKAHEAD, "stuck", 256, detail=Cap.PREFILL_LOOKAHEAD
    )
    assert told.guards[0] == "num_new_tokens == 0"
    assert told.caps == [
        ChunkCap("stuck", Cap.LONG_PREFILL, wanted_tokens=3, capped_tokens=1),
        ChunkCap("stuck", Cap.PREFILL_LOOKAHEAD, wanted_tokens=1, capped_tokens=0),
    ]
