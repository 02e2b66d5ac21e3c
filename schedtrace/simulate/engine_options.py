"""Options of a simulated engine, from a recorded trace or from a model's shape and a GPU."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from vllm.config import CacheConfig, SchedulerConfig
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from schedtrace.errors import UsageError
from schedtrace.model.trace import Header
from schedtrace.model.what_if import OF_RANKS
from schedtrace.simulate import releases
from schedtrace.simulate.driver import recorded_groups
from schedtrace.step_times.roofline import (
    FIT_TO_MEMORY,
    Gpu,
    GpuPlatform,
    kv_cache_blocks,
    refuse_memory_setting,
)
from schedtrace.step_times.shapes import Shape

RENAMED = {"policy": "scheduling_policy"}
"""Argument of vLLM for each field of ``SchedulerConfig`` that has another name."""
LEFT_OUT = {"scheduler_cls", "async_scheduling", "runner_type"}
"""Fields of ``SchedulerConfig`` that a replay chooses itself. A scheduler class named in a trace is never
imported."""
OF_SCHEDULER = {field.name for field in dataclasses.fields(SchedulerConfig)} - LEFT_OUT
"""Fields that a replay takes from a header. Anyone may have written the header, and other arguments of vLLM
can name code to run."""
OF_DEVICE = {
    *("block_size", "enable_prefix_caching", "num_gpu_blocks_override", "gpu_memory_utilization"),
    *("kv_cache_memory_bytes", "swap_space", "cpu_offload_gb", "kv_offloading_size", "kv_offloading_backend"),
    *("kv_sharing_fast_prefill", "prefix_caching_hash_algo", "kv_cache_dtype_skip_layers"),
    *("mamba_block_size", "mamba_cache_mode", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
    *("enable_mamba_shared_prefix_checkpoint", "use_replayssm", "replayssm_buffer_len"),
}
"""Fields of ``CacheConfig`` that are not replayed, because they concern memory, computation or Mamba layers,
or are fields of the header."""
DENSE = {"prefix_cache_retention_interval": None}
"""Values of settings that older vLLM did not have; it kept every block of a sliding window cached."""
NEEDED = {
    "parallel_config.decode_context_parallel_size": (None, 1),
    "parallel_config.prefill_context_parallel_size": (None, 1),
    "speculative_config.num_speculative_tokens_per_batch_size": (None, []),
}
"""Settings that affect scheduling, with the only values that a replay supports."""
BLOCKS = "num_gpu_blocks_override"
SPECULATION = "speculative_config"
NAMES = tuple(field.name for field in dataclasses.fields(EngineArgs))


def engine_options(
    header: Header, changes: Mapping[str, Any] | None = None, *, ranks: int = 1
) -> dict[str, Any]:
    """Return the options of ``Engine`` (or ``Ranks``) for the engine of a trace, with changes.

    Args:
        header: Header of the trace, or of one of several engines.
        changes: Values by the names of vLLM's arguments; ``num_gpu_blocks_override`` is the size of the KV
            cache. ``router`` chooses a rank anew for every request; ``balance_ranks`` switches
            ``schedtrace.balance`` on or off.
        ranks: Number of engines of the run.

    Raises:
        UsageError: If a name is not one of vLLM's arguments, or a replay does not support a change, the
            model's layers or a recorded setting.
    """
    changes = dict(changes or {})
    _require_replayable(header.settings)
    for name in changes:
        require_known(name)
    configured = {
        RENAMED.get(name, name): value
        for name, value in header.scheduler_config.items()
        if name in OF_SCHEDULER
        and value is not None
        and not (isinstance(value, str) and value.startswith("["))  # no list affects a scheduler
    }
    options = {name: value for name, value in configured.items() if name in NAMES}
    settings = header.settings
    options |= _cache_options(settings) | {
        "max_num_batched_tokens": header.token_budget,
        "max_num_seqs": header.max_num_running_reqs,
        "max_model_len": header.max_model_len,
        "block_size": header.block_size,
        "enable_prefix_caching": bool(header.enable_prefix_caching),
        "async_scheduling": bool(header.async_scheduling),
        "pipeline_parallel_size": header.pipeline_parallel_size or 1,
        "num_blocks": header.kv_blocks_total,
    }
    if loras := settings.get("lora_config.max_loras"):
        options |= {"enable_lora": True, "max_loras": loras, "max_cpu_loras": max(loras, 64)}
    if drafts := settings.get("num_speculative_tokens"):
        method = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 4}
        options |= {"drafts": drafts, SPECULATION: method}
    options |= _rank_options(header, changes, ranks)
    if BLOCKS in changes:
        changes["num_blocks"] = changes.pop(BLOCKS)
    if SPECULATION in changes:
        if changes.pop(SPECULATION) is not None:  # another way to speculate, whose drafts no trace shows
            msg = f"--set {SPECULATION}: a replay can only switch drafts off: --set {SPECULATION}=none"
            raise UsageError(msg)
        options |= {"drafts": 0, SPECULATION: None}
    options |= changes
    if not options["num_blocks"]:
        msg = f"the trace does not say how many KV blocks there are: --set {BLOCKS}=N"
        raise UsageError(msg)
    _require_room(options, changes)
    groups = recorded_groups(header.cache_groups, options["block_size"])
    return options | ({"kv_groups": groups} if groups else {})


def _require_replayable(settings: Mapping[str, Any]) -> None:
    """Refuse a recorded setting that affects scheduling and that a replay does not support."""
    for name, values in NEEDED.items():
        if settings.get(name) not in values:
            msg = (
                f"the engine ran with {name.rpartition('.')[2]}={settings[name]}, which a replay cannot "
                "reproduce"
            )
            raise UsageError(msg)


def _cache_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the KV cache for a replay, as arguments that vLLM accepts."""
    recorded = {
        name.removeprefix("cache_config."): value
        for name, value in settings.items()
        if name.startswith("cache_config.")
    }
    arguments = {field.name for field in dataclasses.fields(CacheConfig)} & {*NAMES} - OF_DEVICE
    return {name: value for name, value in (DENSE | recorded).items() if name in arguments}


def is_lockstep(header: Header) -> bool:
    """Return whether data-parallel ranks of this model run in lock-step."""
    return (header.data_parallel_size or 1) > 1 or bool(header.settings.get("parallel_config.is_moe_model"))


def _rank_options(header: Header, changes: Mapping[str, Any], recorded: int) -> dict[str, Any]:
    """Return the options of ``Ranks``; an empty dict for an independent engine."""
    ranks = changes.get("data_parallel_size", recorded)
    lockstep = is_lockstep(header)
    require_values(changes, ranks=ranks, lockstep=lockstep)
    if ranks == 1:
        return {"router": "vllm"} if recorded > 1 else {}
    options: dict[str, Any] = {"data_parallel_size": ranks, "lockstep": lockstep}
    if header.scheduler_class.startswith("schedtrace.balance."):
        options["balance_ranks"] = True
    if interval := header.settings.get("parallel_config.dp_sync_interval"):
        options["dp_sync_interval"] = interval
    return options | ({"router": "vllm"} if ranks != recorded else {})


def require_values(changes: Mapping[str, Any], *, ranks: int, lockstep: bool) -> None:
    """Check the settings of ranks.

    Args:
        changes: Values by the names of settings.
        ranks: Number of ranks.
        lockstep: Whether ranks of this model run in lock-step.

    Raises:
        UsageError: If a value is not allowed, or balance scheduling is on although the ranks do not run in
            lock-step.
    """
    if not isinstance(ranks, int) or ranks < 1:
        msg = f"data_parallel_size={ranks}: expected a number of ranks, 1 or more"
        raise UsageError(msg)
    for name, values in OF_RANKS.items():
        if name in changes and changes[name] not in values:
            allowed = ", ".join(str(choice).lower() for choice in values)
            msg = f"{name}={changes[name]}: one of {allowed}"
            raise UsageError(msg)
    if changes.get("balance_ranks") and ranks == 1:
        msg = "balance_ranks=true: a single rank has no other to wait for; set data_parallel_size=N as well"
        raise UsageError(msg)
    if changes.get("balance_ranks") and not lockstep:
        msg = "balance_ranks=true: ranks of a dense model are independent, none waits for another"
        raise UsageError(msg)


def require_known(name: str) -> None:
    """Check the name of a changed setting.

    Raises:
        UsageError: If it is not an argument of vLLM, or a replay cannot change this argument.
    """
    refuse_memory_setting(name)
    if name not in NAMES and name not in OF_RANKS:
        near = difflib.get_close_matches(name, [*NAMES, *OF_RANKS], n=1)
        msg = f"--set {name}: not an argument of vLLM{f'; {near[0]}?' if near else ''}"
        raise UsageError(msg)


def _require_room(options: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Refuse a KV cache that cannot hold a request of ``max_model_len``, with which vLLM would not start."""
    if not {"num_blocks", "max_model_len", "block_size"} & changes.keys() or options.get("kv_groups"):
        return
    needed = -(-options["max_model_len"] // options["block_size"])
    if options["num_blocks"] < needed:
        msg = (
            f"--set {BLOCKS}={options['num_blocks']}: vLLM would not start, a request of max_model_len "
            f"{options['max_model_len']:,} needs {needed:,} blocks; --set max_model_len=N as well"
        )
        raise UsageError(msg)


BLOCK_SIZE = 16
"""Tokens per block: vLLM's default on CUDA."""
UTILIZATION = 0.92
"""Default of vLLM's ``gpu_memory_utilization`` since 0.20."""
DEFAULT_LENGTH = 2048
"""Maximum length in tokens of a model whose ``config.json`` states none, as in vLLM."""
_ASYNC = arg_utils.EngineArgs.async_scheduling
"""Default of ``async_scheduling``: None if vLLM chooses, False in releases that do not choose."""
OF_MODEL = {
    "model",
    "load_format",
    "skip_tokenizer_init",
    "tokenizer",
    "seed",
    "kv_cache_dtype",
    "enforce_eager",
}
"""Arguments that have no effect on a scheduler without a model."""


def shaped_options(
    shape: Shape, gpu: Gpu, arguments: Mapping[str, Any], *, online: bool = True
) -> dict[str, Any]:
    """Return the options of ``Engine`` for a model on GPUs.

    Settings that are not stated have vLLM's defaults on that GPU. ``num_blocks`` follows from the memory,
    unless ``num_gpu_blocks_override`` is set. If ``max_model_len`` is not set, or is ``auto`` (-1), it is the
    model's own length or, if that is too large, the length that the KV cache can hold.

    Args:
        shape: Shape of the model.
        gpu: Kind of the ``tensor_parallel_size`` GPUs.
        arguments: vLLM's arguments, by name.
        online: Whether to use the defaults of ``vllm serve``, which differ from those of ``LLM``.

    Raises:
        UsageError: If the model does not fit, or a setting of ranks is impossible.
    """
    options = {name: value for name, value in arguments.items() if name not in OF_MODEL}
    tensor_parallel_size = options.pop("tensor_parallel_size", 1)
    utilization = options.pop("gpu_memory_utilization", UTILIZATION)
    kv_bytes = options.pop("kv_cache_memory_bytes", None)
    if kv_bytes is not None:
        msg = "--kv-cache-memory-bytes: give --num-gpu-blocks-override, or leave it to the GPU's memory"
        raise UsageError(msg)
    blocks = options.pop("num_gpu_blocks_override", None)
    context = UsageContext.OPENAI_API_SERVER if online else UsageContext.LLM_CLASS
    with patch.object(arg_utils, "current_platform", GpuPlatform(gpu)):
        budget, seats = releases.batch_defaults(context)
    options.setdefault("max_num_batched_tokens", budget)
    options.setdefault("max_num_seqs", min(seats, options["max_num_batched_tokens"]))
    options.setdefault("block_size", BLOCK_SIZE)
    options.setdefault("enable_prefix_caching", True)
    ranks = options.get("data_parallel_size", 1)
    require_values(options, ranks=ranks, lockstep=bool(shape.experts))
    if ranks > 1:
        options["lockstep"] = bool(shape.experts)
    overlapped = options.get("async_scheduling")  # None: on a GPU vLLM does, since it decides by itself
    options["async_scheduling"] = (_ASYNC if overlapped is None else overlapped) is not False
    options["num_blocks"] = blocks or kv_cache_blocks(
        shape,
        gpu,
        tensor_parallel_size,
        block_size=options["block_size"],
        gpu_memory_utilization=utilization,
        kv_dtype=arguments.get("kv_cache_dtype"),
        max_num_batched_tokens=options["max_num_batched_tokens"],
        max_num_seqs=options["max_num_seqs"],
    )
    room, longest = options["num_blocks"] * options["block_size"], options.get("max_model_len")
    if longest in FIT_TO_MEMORY:
        options["max_model_len"] = min(room, shape.positions or DEFAULT_LENGTH)
    elif longest > room:
        msg = (
            f"{shape.name} on {gpu.name}: {options['num_blocks']:,} KV blocks hold no request of "
            f"max_model_len {longest:,}, so vLLM would not start: the largest that fits is {room:,}"
        )
        raise UsageError(msg)
    return options
