"""Differences of older vLLM releases that the simulation must handle: 0.10 to 0.13 unless noted."""

import dataclasses
import inspect
import math
import os
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, get_args

import vllm.utils as hashing
from vllm import SamplingParams
from vllm.config import ParallelConfig
from vllm.engine import arg_utils
from vllm.v1 import outputs
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request
from vllm.v1.structured_output.request import StructuredOutputRequest

_LEFT_OUT: dict[str, Any] = {
    "spec_token_ids": None,
    "logprobs": None,
    "prompt_logprobs_dict": {},
    "pooler_output": [],
}
"""Values for arguments of ``ModelRunnerOutput`` that later releases made optional or removed."""


def supported_arguments(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those arguments that this release's function accepts."""
    parameters = _parameters(function)
    return {name: value for name, value in arguments.items() if name in parameters}


@cache  # a step's output and each request ask again
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def structured(params: Any) -> dict[str, Any]:
    """Return the argument of ``SamplingParams`` that requests structured output."""
    if params is None:
        return {}
    name = "structured_outputs" if "structured_outputs" in SamplingParams.__struct_fields__ else None
    return {name or "guided_decoding": params}


def structured_request(params: Any) -> dict[str, Any]:
    """Return a ``StructuredOutputRequest`` argument; until 0.11.0, ``Request`` does not create it itself."""
    if "structured_output_request" not in _parameters(Request.__init__):
        return {}
    return {"structured_output_request": StructuredOutputRequest(sampling_params=params)}


def batch_defaults(context: Any) -> tuple[int, int]:
    """Return the default ``max_num_batched_tokens`` and ``max_num_seqs`` of ``EngineArgs`` on this platform.

    Args:
        context: ``UsageContext`` of vLLM.
    """
    engine_args = arg_utils.EngineArgs
    if hasattr(engine_args, "get_batch_defaults"):
        tokens, seqs = engine_args.get_batch_defaults(1)
        return tokens[context], seqs[context]
    # To 0.11 it sets them on itself, with what the model decides, and looks for what is no folder on the hub.
    empty = engine_args(model=os.curdir)
    for name in ("_set_default_args_v1", "_set_default_args"):  # vLLM has no public one; the latter in 0.11.0
        if hasattr(empty, name):
            getattr(empty, name)(context, SimpleNamespace(runner_type="generate"))
    return empty.max_num_batched_tokens, empty.max_num_seqs


def by_name_or_class(executor: str) -> Any:
    """Return an executor for ``distributed_executor_backend``; 0.10.0 needs the class, not a name."""
    named = str in get_args(ParallelConfig.__annotations__["distributed_executor_backend"])
    return executor if named else resolve_name(executor)


def kv_cache_config(config: Any, groups: list[Any]) -> Any:
    """Return a ``KVCacheConfig`` with ``num_gpu_blocks`` blocks and all settings that vLLM adds to it."""
    cache = config.cache_config
    names = {field.name for field in dataclasses.fields(KVCacheConfig)}
    settings = {name: getattr(cache, name) for name in sorted(names) if hasattr(cache, name)}
    return KVCacheConfig(
        num_blocks=cache.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=groups, **settings
    )


def block_sizes(config: Any, groups: list[Any]) -> tuple[int, int]:
    """Return the block size to which the scheduler aligns chunks, and the one by which prompts are hashed."""
    if hasattr(kv_cache_utils, "resolve_kv_cache_block_sizes"):
        sizes: tuple[int, int] = kv_cache_utils.resolve_kv_cache_block_sizes(
            kv_cache_config(config, groups), config
        )
        return sizes
    shared = math.lcm(*(group.kv_cache_spec.block_size for group in groups))
    return shared, config.cache_config.block_size


def block_hasher(block_size: int) -> Any:
    """Return the function that hashes full blocks; None in 0.10.0, whose cache manager hashes them itself."""
    if not hasattr(kv_cache_utils, "get_request_block_hasher"):
        return None
    return kv_cache_utils.get_request_block_hasher(block_size, _hash_function())


@cache
def _hash_function() -> Any:
    module = hashing if hasattr(hashing, "get_hash_fn_by_name") else import_module("vllm.utils.hashing")
    function = module.get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(function)
    return function


def model_output(sampled: dict[str, list[int]], drafts: dict[str, list[int]] | None) -> Any:
    """Create a ``ModelRunnerOutput``; only in 0.10.0 does it contain the draft tokens."""
    arguments = supported_arguments(outputs.ModelRunnerOutput, _LEFT_OUT)
    if "spec_token_ids" in arguments:
        arguments["spec_token_ids"] = drafts and [drafts.get(request_id, []) for request_id in sampled]
    request_ids = list(sampled)
    places = {request_id: place for place, request_id in enumerate(request_ids)}
    return outputs.ModelRunnerOutput(request_ids, places, list(sampled.values()), **arguments)


def tell_drafts(scheduler: Any, request_ids: list[str], drafts: list[list[int]]) -> None:
    """Pass a step's draft tokens to the scheduler after the step's output (from 0.10.2)."""
    if hasattr(scheduler, "update_draft_token_ids"):
        scheduler.update_draft_token_ids(outputs.DraftTokenIds(request_ids, drafts))


def num_prompt_tokens(new: Any) -> int:
    """Return the number of prompt tokens of a ``NewRequestData``; since 0.11 they may be embeddings."""
    return len(new.prompt_token_ids if new.prompt_token_ids is not None else new.prompt_embeds)


def num_known_tokens(new: Any) -> int:
    """Return the number of prompt tokens and, with the second model runner, of earlier output tokens."""
    prefill = getattr(new, "prefill_token_ids", None)
    return num_prompt_tokens(new) if prefill is None else len(prefill)


def resumed_outputs(cached: Any) -> Iterator[tuple[str, int]]:
    """Yield the preempted requests that resume in a ``CachedRequestData``, with their output token counts.

    Releases up to 0.11.0 lack this information, but there a worker's own count is correct, because nothing is
    in flight.
    """
    resumed = getattr(cached, "resumed_req_ids", ())
    if resumed:
        counts = zip(cached.req_ids, cached.num_output_tokens, strict=True)
        yield from ((request_id, count) for request_id, count in counts if request_id in resumed)
