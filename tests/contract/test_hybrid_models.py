"""Asking vLLM's cache managers again after a refusal leaves them exactly as they were, Mamba's too.

``MambaManager.get_num_blocks_to_allocate`` is not pure: it notes or forgets a checkpoint, and makes an
entry for a request that has none.
"""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec

from schedtrace.record.marks import exits
from schedtrace.record.traced import traced_class
from tests.contract.causes.models import attention_spec, mamba_spec
from tests.contract.deciding import Deciding, first_difference
from tests.contract.families import FAMILIES
from tests.contract.loads import SEEDS, SHORT_STEPS, make_script, play

pytestmark = pytest.mark.vllm

ATTENTION, MAMBA = attention_spec(), mamba_spec(attention_spec())
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sliding_window=32
)
CHECKPOINTS = replace(MAMBA, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
MAMBA_WITH_CACHE = {"mamba_cache_mode": "align", "enable_prefix_caching": True}
MODELS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "mamba": ([ATTENTION, MAMBA], MAMBA_WITH_CACHE),
    "mamba_checkpoints": ([ATTENTION, CHECKPOINTS], MAMBA_WITH_CACHE),
    "mamba_plain": ([ATTENTION, replace(MAMBA, mamba_cache_mode="none")], {}),
    "sliding_window": ([ATTENTION, WINDOW], {"enable_prefix_caching": True}),
}
FAMILY = replace(FAMILIES["aborts"], prompt=(33, 200), shared=32, priorities=3, resets=0.02)


def engine(model: str, wrap: Any = None, made_as: Any = Deciding, **options: Any) -> Any:
    specs, settings = MODELS[model]
    groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)]
    return made_as(wrap, kv_groups=groups, **{"num_blocks": 40, **settings, **options})


def state_of(manager: Any) -> Any:
    """Every container of the cache's managers, in order, down to the blocks' ids and reference counts."""
    parts = [vars(one) for one in manager.coordinator.single_type_managers]
    pool = manager.block_pool
    return [
        [{name: _plain(value) for name, value in part.items()} for part in parts],
        [(block.block_id, block.ref_cnt) for block in pool.blocks],
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        len(pool.cached_block_hash_to_block),
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, _plain(entry)) for key, entry in value.items()]
    if isinstance(value, list | tuple | set):
        return [_plain(entry) for entry in value]
    return getattr(value, "block_id", value)


@pytest.fixture
def states(monkeypatch):
    """The managers' state right before and right after each time that they were asked again."""
    seen = []
    ask = exits.why_refused

    def watched(manager: KVCacheManager, arguments: Any) -> Any:
        before = state_of(manager)
        answer = ask(manager, arguments)
        seen.append((before, state_of(manager), answer.limit))
        return answer

    monkeypatch.setattr(exits, "why_refused", watched)
    return seen


@pytest.mark.parametrize("full", [True, False], ids=["full_sequence", "first_chunk"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("recording")
def test_asking_again_leaves_the_managers_as_they_were(states, model, full):
    play(
        engine(model, traced_class, max_num_batched_tokens=64, scheduler_reserve_full_isl=full),
        make_script(FAMILY, 1, SHORT_STEPS),
    )
    assert len(states) > 20
    assert full == ("full_sequence" in {limit for _, _, limit in states})
    assert [after for before, after, _ in states if after != before] == []


@pytest.mark.parametrize(("policy", "async_scheduling"), [("fcfs", False), ("priority", True)])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("recording")
def test_tracing_changes_no_decision(model, seed, policy, async_scheduling):
    options = {
        "scheduling_policy": policy,
        "async_scheduling": async_scheduling,
        "max_num_batched_tokens": 64,
    }
    script = make_script(FAMILY, seed, SHORT_STEPS)
    plain = play(engine(model, **options), script)
    traced = play(engine(model, traced_class, **options), script)
    assert first_difference(plain.decisions, traced.decisions) is None
    assert state_of(plain.scheduler.kv_cache_manager)[1:] == state_of(traced.scheduler.kv_cache_manager)[1:]
    assert any(decision.get("preempted") for decision in plain.decisions)
