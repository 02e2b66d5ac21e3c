"""What the header says of the engine beside the scheduler's own settings.

Only what is listed here is read, so that no path, host or name of a layer gets into a trace.
"""

import os
from typing import Any

from schedtrace.model.trace_facts import CacheGroup
from schedtrace.record.allocation import managers_of

SETTINGS = {
    "parallel_config": (
        "tensor_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "enable_expert_parallel",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "dp_sync_interval",
        "is_moe_model",
    ),
    "cache_config": (
        "block_size",
        "num_gpu_blocks_override",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "cache_dtype",
        "mamba_cache_mode",
        "mamba_block_size",
        "prefix_caching_hash_algo",
        "sliding_window",
    ),
    "lora_config": ("max_loras", "max_cpu_loras", "max_lora_rank"),
    "kv_transfer_config": ("kv_connector", "kv_role", "kv_load_failure_policy"),
    "speculative_config": (
        "method",
        "num_speculative_tokens",
        "max_num_new_slots_for_drafting",
        "disable_padded_drafter_batch",
    ),
    "compilation_config": ("cudagraph_mode", "max_cudagraph_capture_size", "cudagraph_capture_sizes"),
    "model_config": (
        "enforce_eager",
        "dtype",
        "quantization",
        "runner_type",
        "is_hybrid",
        "renderer_num_workers",
    ),
}
"""Part of vLLM's configuration to the settings taken from it."""
ENVIRONMENT = ("VLLM_CPU_KVCACHE_SPACE",)
"""Variables by which vLLM overrules a setting of the above."""
OF_CONFIG = ("num_lookahead_tokens", "num_speculative_tokens", "use_v2_model_runner")
OF_SCHEDULER = (
    "num_lookahead_tokens",
    "num_spec_tokens",
    "draft_slots",
    "num_prefill_lookahead",
    "max_num_encoder_input_tokens",
)


def engine_facts(scheduler: Any) -> dict[str, Any]:
    """The fields of the header that this scheduler's vLLM can fill."""
    config = scheduler.vllm_config
    parallel = getattr(config, "parallel_config", None)
    return {
        "cache_groups": cache_groups(scheduler),
        "kv_block_bytes": kv_block_bytes(scheduler),
        "batches_in_flight": batches_in_flight(config),
        "pipeline_parallel_size": getattr(parallel, "pipeline_parallel_size", None),
        "data_parallel_size": getattr(parallel, "data_parallel_size", None),
        "grammar_threads": _grammar_threads(scheduler),
        "settings": settings(scheduler),
    }


def batches_in_flight(config: Any) -> int | None:
    """As ``EngineCore`` finds it; before vLLM had it in its configuration, the executor knew."""
    if isinstance(batches := getattr(config, "max_concurrent_batches", None), int):
        return batches
    stages = getattr(getattr(config, "parallel_config", None), "pipeline_parallel_size", None)
    if stages is None:
        return None
    overlapped = getattr(config.scheduler_config, "async_scheduling", False)
    return 2 if overlapped and stages == 1 else int(stages)


def cache_groups(scheduler: Any) -> list[CacheGroup]:
    """The KV cache groups; empty where this release does not tell them."""
    groups = getattr(getattr(scheduler, "kv_cache_config", None), "kv_cache_groups", ())
    managers = managers_of(scheduler.kv_cache_manager)
    told = []
    for number, group in enumerate(groups):
        spec = group.kv_cache_spec
        manager = managers[number] if number < len(managers) else None
        told.append(
            CacheGroup(
                kind=type(spec).__name__.removesuffix("Spec"),
                block_size=getattr(manager, "block_size", spec.block_size),
                layers=len(group.layer_names),
                window=getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None),
                speculative_blocks=getattr(spec, "num_speculative_blocks", None),
                cache_mode=getattr(spec, "mamba_cache_mode", None),
                admission_cap=getattr(manager, "max_admission_blocks_per_request", None),
            )
        )
    return told


def kv_block_bytes(scheduler: Any) -> int | None:
    """Memory of one KV block on each device, as ``vllm/v1/core/kv_cache_utils.py`` has divided it up.

    Since vLLM 0.32 all tensors are views of one allocation; before, each was one of its own, but for a packed
    layout, whose tensors name the stride of a whole block.
    """
    config = getattr(scheduler, "kv_cache_config", None)
    tensors, blocks = getattr(config, "kv_cache_tensors", None), getattr(config, "num_blocks", 0)
    if not tensors or not blocks:
        return None
    if hasattr(tensors[0], "layer_stride"):
        return int(max(tensor.size for tensor in tensors) // blocks)
    packed = max(getattr(tensor, "block_stride", 0) for tensor in tensors)
    return int(packed or sum(tensor.size for tensor in tensors) // blocks)


def settings(scheduler: Any) -> dict[str, Any]:
    """The settings that are on the list and known to this release, ``part.name`` to value."""
    config = scheduler.vllm_config
    found: dict[str, Any] = {}
    for part, names in SETTINGS.items():
        if (owner := getattr(config, part, None)) is not None:
            found |= _values(owner, f"{part}.", names)
    found |= _values(config, "", OF_CONFIG) | _values(scheduler, "scheduler.", OF_SCHEDULER)
    found |= {f"environment.{name}": os.environ.get(name) or None for name in ENVIRONMENT}
    return {name: value for name, value in found.items() if value is not None}


def _values(owner: Any, prefix: str, names: tuple[str, ...]) -> dict[str, Any]:
    return {f"{prefix}{name}": _plain(getattr(owner, name)) for name in names if hasattr(owner, name)}


def _grammar_threads(scheduler: Any) -> int | None:
    executor = getattr(getattr(scheduler, "structured_output_manager", None), "executor", None)
    return getattr(executor, "_max_workers", None)


def _plain(value: Any) -> Any:
    """A JSON value; an enumeration by its name."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(getattr(value, "name", value)).removeprefix("torch.")
