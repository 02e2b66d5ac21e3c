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

from schedtrace.diagnose.kv_cache import group_use
from schedtrace.model.kv_need import KvNeed
from schedtrace.read.run import read_run
from schedtrace.record.header import cache_groups
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from schedtrace.timeline.timeline import make_timeline
from tests.contract.causes.models import attention_spec, mamba_spec
from tests.contract.facts.needs import NeedOf
from tests.contract.facts.told import Traced
from tests.contract.test_hybrid_models import engine

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


@pytest.mark.parametrize(
    ("model", "kind", "per_request"), [("mamba", "Mamba", 1.5), ("sliding_window", "SlidingWindow", 3.0)]
)
def test_a_state_is_as_large_for_a_short_request(model, kind, per_request, recording):
    """A request of 151 tokens and three of 40: ten and three blocks of 16 of full attention."""
    refused = engine(model, traced_class, Traced, max_num_batched_tokens=64)
    refused.add("holder", prompt=150, max_tokens=30)
    for _ in range(4):
        refused.step()
    for name in ("a", "b", "c"):
        refused.add(name, prompt=40, max_tokens=30)
    refused.step()
    refused.add("head", prompt=250, max_tokens=2)
    refused.finish()
    [trace] = read_run(recording).traces
    timeline = make_timeline(trace)
    needed = timeline.lists["refusals"].collect()["blocks_needed"]
    assert {*needed.list.first().drop_nulls()} == {16}
    full, other = group_use(timeline)
    assert (full.kind, full.blocks_per_request) == ("FullAttention", 4.75)
    assert (other.kind, other.blocks_per_request) == (kind, per_request)
