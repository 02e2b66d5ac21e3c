"""Where an engine's header has the settings that decide scheduling."""

from collections.abc import Callable
from typing import Any

from schedtrace.model.trace import Header

Value = Callable[[Header], Any]


def _scheduler(name: str) -> Value:
    return lambda header: header.scheduler_config.get(name)


def _listed(name: str) -> Value:
    return lambda header: header.settings.get(name)


VALUES: dict[str, Value] = {
    "max_num_seqs": lambda header: header.max_num_running_reqs,
    "max_num_active_seqs": _scheduler("max_num_active_seqs"),
    "max_num_batched_tokens": _scheduler("max_num_batched_tokens"),
    "max_num_scheduled_tokens": lambda header: header.token_budget,
    "long_prefill_token_threshold": _scheduler("long_prefill_token_threshold"),
    "long_prefill_token_threshold_adaptive": _scheduler("long_prefill_token_threshold_adaptive"),
    "max_num_partial_prefills": _scheduler("max_num_partial_prefills"),
    "max_long_partial_prefills": _scheduler("max_long_partial_prefills"),
    "enable_chunked_prefill": _scheduler("enable_chunked_prefill"),
    "max_model_len": lambda header: header.max_model_len,
    "scheduling_policy": _scheduler("policy"),
    "async_scheduling": lambda header: header.async_scheduling,
    "scheduler_reserve_full_isl": _scheduler("scheduler_reserve_full_isl"),
    "watermark": _scheduler("watermark"),
    "prefill_schedule_interval": _scheduler("prefill_schedule_interval"),
    "max_num_queued_reqs": _scheduler("max_num_queued_reqs"),
    "max_num_queued_tokens": _scheduler("max_num_queued_tokens"),
    "num_gpu_blocks": lambda header: header.kv_blocks_total,
    "num_gpu_blocks_override": _listed("cache_config.num_gpu_blocks_override"),
    "kv_cache_memory_bytes": _listed("cache_config.kv_cache_memory_bytes"),
    "gpu_memory_utilization": _listed("cache_config.gpu_memory_utilization"),
    "kv_cache_dtype": _listed("cache_config.cache_dtype"),
    "block_size": lambda header: header.settings.get("cache_config.block_size") or header.block_size,
    "enable_prefix_caching": lambda header: header.enable_prefix_caching,
    "num_speculative_tokens": _listed("speculative_config.num_speculative_tokens"),
    "max_loras": _listed("lora_config.max_loras"),
    "max_num_encoder_input_tokens": lambda header: (
        header.settings.get("scheduler.max_num_encoder_input_tokens") or None
    ),
    "pipeline_parallel_size": lambda header: header.pipeline_parallel_size,
    "tensor_parallel_size": _listed("parallel_config.tensor_parallel_size"),
    "data_parallel_size": lambda header: header.data_parallel_size,
    "cudagraph_mode": _listed("compilation_config.cudagraph_mode"),
    "max_cudagraph_capture_size": _listed("compilation_config.max_cudagraph_capture_size"),
    "cudagraph_capture_sizes": _listed("compilation_config.cudagraph_capture_sizes"),
}
"""Name of the setting to where the engine's header has it; None: this run or release does not have it."""
