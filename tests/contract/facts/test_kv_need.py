"""The count of KV blocks of a request is that of vLLM's own managers, for every kind of cache group."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from schedtrace.model.kv_need import KvNeed
from schedtrace.record.header import cache_groups
from schedtrace.simulate import Driver
from tests.contract.causes.models import attention_spec, mamba_spec
from tests.contract.facts.needs import NeedOf

pytestmark = pytest.mark.vllm

SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=16, **SHAPE)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=40, **SHAPE)
LOCAL = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=24, **SHAPE)
LATENT = MLAAttentionSpec(block_size=16, **{**SHAPE, "num_kv_heads": 1})
MAMBA = mamba_spec(attention_spec())
CHECKPOINTS = replace(MAMBA, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
NO_CACHE = {"enable_prefix_caching": False}
ALIGN = {"mamba_cache_mode": "align", "enable_prefix_caching": True}
MODELS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "dense": ([FULL], NO_CACHE),
    "latent": ([LATENT], NO_CACHE),
    "sliding_window": ([WINDOW], NO_CACHE),
    "hybrid_window": ([FULL, WINDOW, WINDOW], NO_CACHE),
    "chunked_local": ([FULL, LOCAL], NO_CACHE),
    "mamba_none": ([FULL, replace(MAMBA, mamba_cache_mode="none", block_size=256)], NO_CACHE),
    "mamba_align": ([FULL, MAMBA], ALIGN),
    "mamba_drafts": ([FULL, replace(MAMBA, num_speculative_blocks=2)], ALIGN),
    "checkpoints": ([FULL, CHECKPOINTS], ALIGN),
}


def driven(model: str, **options: Any) -> tuple[Driver, NeedOf]:
    specs, settings = MODELS[model]
    groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)]
    given = {"num_blocks": 40, "max_model_len": 256, "max_num_batched_tokens": 48, **settings, **options}
    driver = Driver(kv_groups=groups, **given)
    scheduler = driver.scheduler
    need = KvNeed(tuple(cache_groups(scheduler)), scheduler.num_lookahead_tokens, 256)
    return driver, NeedOf(driver, need)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "checkpoints"])
def test_blocks_held_and_asked_for_are_vllms(model):
    """Prompts in chunks, decodes across blocks, and a head that is refused for its whole sequence."""
    driver, need = driven(model)
    for number, (prompt, outputs) in enumerate([(150, 60), (17, 40), (16, 3), (230, 26), (90, 30), (200, 9)]):
        driver.add(f"r{number}", prompt=prompt, max_tokens=outputs)
    for _ in range(150):
        need.compare_step()
    assert need.steps_compared > 60
    assert need.sequences_compared >= 6
    assert need.differences == []


def test_a_checkpoint_of_mamba_leaves_the_need_unknown():
    _, need = driven("checkpoints")
    assert (need.need.held(0, 100), need.need.sequence(100)) == (None, None)


def test_slots_for_drafts_are_counted():
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    driver, need = driven("hybrid_window", speculative_config=draft)
    driver.add("a", prompt=60, max_tokens=50)
    for _ in range(40):
        need.compare_step()
    assert need.differences == []
