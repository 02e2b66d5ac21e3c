"""The parts of an engine that a scheduler needs, built as ``EngineCore`` builds them."""

import inspect
from functools import cache
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


def kv_cache_groups(config: Any) -> list[Any]:
    """One group of full attention layers, as dense models have it."""
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size, num_kv_heads=2, head_size=32, dtype=torch.bfloat16
    )
    return [KVCacheGroupSpec(["layer"], spec)]


def scheduler_arguments(config: Any, groups: list[Any]) -> dict[str, Any]:
    """The keyword arguments of ``Scheduler``; each release takes those that it knows."""
    block_size = config.cache_config.block_size
    arguments = {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(config.cache_config.num_gpu_blocks, [], groups),
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": block_size,
        "hash_block_size": block_size,
        "log_stats": True,
    }
    known = inspect.signature(Scheduler.__init__).parameters
    return {name: value for name, value in arguments.items() if name in known}


def make_request(
    request_id: str, tokens: list[int], max_tokens: int, stop_token: int, hasher: Any, **options: Any
) -> Any:
    """vLLM's ``Request``; ``options`` are further arguments of it, or ``structured_outputs``."""
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        stop_token_ids=[stop_token],
        structured_outputs=options.pop("structured_outputs", None),
    )
    arguments = {"pooling_params": None, "block_hasher": hasher, "eos_token_id": None, **options}
    known = inspect.signature(Request.__init__).parameters
    arguments = {name: value for name, value in arguments.items() if name in known}
    return Request(request_id, tokens, params, **arguments)


@cache
def _hash_function() -> Any:

    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    return function


def block_hasher(config: Any) -> Any:
    """Hashes a request's full blocks, for prefix caching."""
    return get_request_block_hasher(config.cache_config.block_size, _hash_function())


def is_prefill_chunk(request: Any) -> bool:
    """Whether the chunk that was just scheduled leaves something of the request's tokens for a later one.

    Newer releases say so. In older ones a request whose last chunk was scheduled has a placeholder for the
    token to come, if outputs overlap.
    """
    last = request.num_tokens + max(request.num_output_placeholders, 1) - 1
    return bool(getattr(request, "is_prefill_chunk", request.num_computed_tokens < last))
