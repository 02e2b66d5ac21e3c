"""An engine that was never started: a model's shape on a GPU, with vLLM's own defaults for it."""

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext

from schedtrace.errors import UsageError
from schedtrace.simulate import releases
from schedtrace.simulate.config import require_values
from schedtrace.step_times.gpus import Gpu, GpuPlatform
from schedtrace.step_times.memory import FIT_TO_MEMORY, kv_cache_blocks
from schedtrace.step_times.shapes import Shape

BLOCK_SIZE = 16
"""vLLM's on CUDA."""
UTILIZATION = 0.92
"""vLLM's default of ``gpu_memory_utilization`` since 0.20."""
DEFAULT_LENGTH = 2048
"""vLLM's for a model whose ``config.json`` names none."""
_ASYNC = arg_utils.EngineArgs.async_scheduling
"""vLLM's default: None where it decides by itself, False in releases that only do as they are told."""
OF_MODEL = {
    "model",
    "load_format",
    "skip_tokenizer_init",
    "tokenizer",
    "seed",
    "kv_cache_dtype",
    "enforce_eager",
}
"""Arguments that say nothing to a scheduler without a model."""


def shaped_options(
    shape: Shape, gpu: Gpu, given: Mapping[str, Any], *, online: bool = True
) -> dict[str, Any]:
    """Options of ``Engine`` for a model on GPUs.

    What is not given is vLLM's default on that GPU. ``num_blocks`` follows from the memory, unless
    ``num_gpu_blocks_override`` is given. ``max_model_len``, not given or ``auto`` (-1), is the model's own
    or, where the KV cache holds less, as much as it holds.

    Args:
        shape: The model's.
        gpu: One of ``tensor_parallel_size``.
        given: vLLM's arguments, by name.
        online: As ``vllm serve``, whose defaults differ from those of ``LLM``.

    Raises:
        UsageError: the model does not fit, or a setting of ranks that cannot be.
    """
    options = {name: value for name, value in given.items() if name not in OF_MODEL}
    tensor_parallel_size = options.pop("tensor_parallel_size", 1)
    utilization = options.pop("gpu_memory_utilization", UTILIZATION)
    kv_bytes = options.pop("kv_cache_memory_bytes", None)
    if kv_bytes is not None:
        msg = "--kv-cache-memory-bytes: give --num-gpu-blocks-override, or leave it to the GPU's memory"
        raise UsageError(msg)
    blocks = options.pop("num_gpu_blocks_override", None)
    budget, seats = _batch_defaults(gpu, online=online)
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
        kv_dtype=given.get("kv_cache_dtype"),
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


def _batch_defaults(gpu: Gpu, *, online: bool) -> tuple[int, int]:
    """vLLM's ``max_num_batched_tokens`` and ``max_num_seqs`` on that GPU."""
    context = UsageContext.OPENAI_API_SERVER if online else UsageContext.LLM_CLASS
    with patch.object(arg_utils, "current_platform", GpuPlatform(gpu)):
        return releases.batch_defaults(context)
