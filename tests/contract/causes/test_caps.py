"""Limits that make a chunk smaller without being an exit."""

import pytest

pytest.importorskip("vllm")

from schedtrace.model.causes import Cap, Cause
from schedtrace.model.trace import ChunkCap
from tests.contract.causes.models import image, sees_images, with_mamba, with_mtp
from tests.contract.causes.scenes import waiting
from tests.contract.causes.test_budgets import DRAFT_MODEL, NGRAM

pytestmark = pytest.mark.vllm


def test_long_prefill_token_threshold(scene):
    told = scene(long_prefill_token_threshold=24).play(long=100, short=10)
    assert told.tokens == {"long": 24, "short": 10}
    assert told.caps == [ChunkCap("long", Cap.LONG_PREFILL, wanted_tokens=100, capped_tokens=24)]
    assert told.statements == ["num_new_tokens = long_prefill_token_threshold"]


def test_long_prefill_token_threshold_while_it_runs(scene):
    told = scene(long_prefill_token_threshold=24).play(long=100, short=10, steps=2)
    assert told.tokens == {"long": 24, "short": 1}
    assert told.caps == [ChunkCap("long", Cap.LONG_PREFILL, wanted_tokens=76, capped_tokens=24)]


def test_adaptive_long_prefill_token_threshold(scene):
    """A fair share of 256 among 2 is more than the threshold, among 16 it is less."""
    engine = scene(long_prefill_token_threshold=24, long_prefill_token_threshold_adaptive=True)
    engine.after(long=200, short=10).after(**{f"more{number}": 1 for number in range(14)})
    told = engine.told(0)
    assert told.tokens == {"long": 128, "short": 10}
    assert told.caps == [ChunkCap("long", Cap.LONG_PREFILL_ADAPTIVE, wanted_tokens=200, capped_tokens=128)]
    assert told.statements == ["num_new_tokens = long_prefill_token_threshold"]
    assert engine.told(1).caps == [ChunkCap("long", Cap.LONG_PREFILL, wanted_tokens=72, capped_tokens=24)]


def test_max_model_len(scene):
    """Three drafts and a token are wanted; after 13 of 16 there is room for two, and a sampled one."""
    told = scene(max_model_len=16, speculative_config=NGRAM, drafts=3).play(
        nearly_full={"prompt": 13, "max_tokens": 9}, steps=2
    )
    assert told.tokens == {"nearly_full": 2}
    assert told.caps == [ChunkCap("nearly_full", Cap.MAX_MODEL_LEN, wanted_tokens=4, capped_tokens=2)]
    assert "self.max_model_len - request.num_computed_tokens" in told.statements[0]


def test_token_budget(scene):
    told = scene(max_num_batched_tokens=100).play(first=60, second=50)
    assert told.tokens == {"first": 60, "second": 40}
    assert told.caps == [ChunkCap("second", Cap.TOKEN_BUDGET, wanted_tokens=50, capped_tokens=40)]
    assert told.statements == ["num_new_tokens = min(num_new_tokens, request_token_budget)"]


def test_token_budget_while_it_runs(scene):
    told = scene(max_num_batched_tokens=100).play(long=250, steps=2)
    assert told.caps == [ChunkCap("long", Cap.TOKEN_BUDGET, wanted_tokens=150, capped_tokens=100)]
    assert told.statements == [
        "num_new_tokens = min(num_new_tokens, token_budget, input_budget - draft_slots)"
    ]


def test_input_budget(scene):
    """Of 40 the first request takes 20 and a slot, the second a slot: 18 are left for its tokens."""
    told = scene(max_num_batched_tokens=40, speculative_config=DRAFT_MODEL).play(first=20, second=30)
    assert told.tokens == {"first": 20, "second": 18}
    assert told.caps == [ChunkCap("second", Cap.INPUT_BUDGET, wanted_tokens=30, capped_tokens=18)]
    assert told.statements == ["num_new_tokens = min(num_new_tokens, request_token_budget)"]


def test_mamba_alignment(scene):
    told = scene(**with_mamba()).play(ends_at_a_block=40)
    assert told.tokens == {"ends_at_a_block": 32}
    assert told.caps == [ChunkCap("ends_at_a_block", Cap.MAMBA_ALIGNMENT, wanted_tokens=40, capped_tokens=32)]
    assert "self._mamba_block_aligned_split(" in told.statements[0]


def test_encoder_budget(scene):
    """The text before an image that cannot be computed in this step is computed all the same."""
    told = scene(**sees_images(), max_num_batched_tokens=40).play(
        first={"prompt": 32, "mm_features": [image("one", at=0)]},
        second={"prompt": 37, "mm_features": [image("other", at=5)]},
    )
    assert told.tokens == {"first": 32, "second": 5}
    assert told.exits == [waiting("break", Cause.QUEUE_EMPTY, None, 3)]
    assert told.caps == [
        ChunkCap("second", Cap.TOKEN_BUDGET, wanted_tokens=37, capped_tokens=8),
        ChunkCap("second", Cap.ENCODER_BUDGET, wanted_tokens=8, capped_tokens=5),
    ]
    assert "self._try_schedule_encoder_inputs(" in told.statements[1]


def test_prefill_lookahead(scene):
    """16 of 18 would leave 2, and 3 must be left."""
    told = scene(**with_mtp(), max_num_batched_tokens=16).play(long=18)
    assert told.tokens == {"long": 15}
    assert told.caps == [
        ChunkCap("long", Cap.TOKEN_BUDGET, wanted_tokens=18, capped_tokens=16),
        ChunkCap("long", Cap.PREFILL_LOOKAHEAD, wanted_tokens=16, capped_tokens=15),
    ]
    assert "self._reserve_prefill_lookahead(" in told.statements[1]
