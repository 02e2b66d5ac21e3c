"""The parts of an engine that a scheduler needs, built as ``EngineCore`` builds them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from schedtrace.errors import UsageError
from schedtrace.model.trace_facts import CacheGroup
from schedtrace.simulate import releases
from schedtrace.simulate.model_runner import STOP_AT

FULL = {"FullAttention", "MLAAttention", "UniformTypeKVCacheSpecs"}
"""Kinds of cache groups that keep every token, so that a scheduler treats them alike."""
_NOTHING = dict.fromkeys(
    ("pooling_params", "eos_token_id", "multi_modal_inputs", "multi_modal_hashes", "multi_modal_placeholders")
)
"""Arguments of ``Request`` that have no default in some release."""


def kv_cache_groups(config: Any) -> list[Any]:
    """One group of full attention layers, as dense models have it."""
    shape = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16, "use_mla": False}
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size, **releases.known(FullAttentionSpec, shape)
    )
    return [KVCacheGroupSpec(["layer"], spec)]


def scheduler_arguments(config: Any, groups: list[Any]) -> dict[str, Any]:
    """The keyword arguments of ``Scheduler``; each release takes those that it knows."""
    shared = math.lcm(*(group.kv_cache_spec.block_size for group in groups))
    arguments = {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(config.cache_config.num_gpu_blocks, [], groups),
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": shared,
        "hash_block_size": config.cache_config.block_size,
        "log_stats": True,
    }
    return releases.known(Scheduler.__init__, arguments)


def make_request(
    request_id: str, tokens: list[int], max_tokens: int, stop_token: int, hasher: Any, **options: Any
) -> Any:
    """vLLM's ``Request``; ``options`` are further arguments of it, or ``structured_outputs``."""
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        stop_token_ids=[stop_token],
        extra_args={STOP_AT: options.pop("stop_at", None)},
        **releases.structured(options.pop("structured_outputs", None)),
    )
    arguments = {**_NOTHING, "block_hasher": hasher, **releases.structured_request(params), **options}
    return Request(request_id, tokens, sampling_params=params, **releases.known(Request.__init__, arguments))


def block_hasher(config: Any) -> Any:
    """Hashes a request's full blocks, for prefix caching."""
    return releases.block_hasher(config.cache_config.block_size)


def recorded_groups(groups: Sequence[CacheGroup], block_size: int) -> list[Any]:
    """The cache groups of a recorded engine; empty where there is only one of full attention.

    Raises:
        UsageError: a kind of layers that cannot be built from what a trace says.
    """
    if {group.kind for group in groups} <= FULL and len(groups) <= 1:
        return []
    shape = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16, "use_mla": False}
    built = []
    for number, group in enumerate(groups):
        kind = {"SlidingWindow": SlidingWindowSpec, **dict.fromkeys(FULL, FullAttentionSpec)}.get(group.kind)
        if kind is None:
            msg = f"the model has {group.kind} layers, whose KV cache cannot be simulated yet"
            raise UsageError(msg)
        given = shape | ({"sliding_window": group.window} if group.kind == "SlidingWindow" else {})
        spec = kind(block_size=group.block_size or block_size, **releases.known(kind, given))
        built.append(KVCacheGroupSpec([f"layer.{number}"], spec))
    return built
