"""vLLM's own resolved configuration for an engine that never loads a model."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from schedtrace.errors import UsageError
from schedtrace.model.what_if import OF_RANKS


def require_values(changes: Mapping[str, Any], *, ranks: int, lockstep: bool) -> None:
    """Check the settings of ranks.

    Args:
        changes: Values by the names of settings.
        ranks: Number of ranks.
        lockstep: Whether ranks of this model run in lock-step.

    Raises:
        UsageError: If a value is not allowed, or balance scheduling is on although no rank waits for another.
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
        msg = "balance_ranks=true: with one rank there is nobody to wait for; data_parallel_size=N as well"
        raise UsageError(msg)
    if changes.get("balance_ranks") and not lockstep:
        msg = "balance_ranks=true: ranks of a dense model are independent, none waits for another"
        raise UsageError(msg)


TINY_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 1_048_576,
    "torch_dtype": "bfloat16",
}
"""Configuration of a tiny model; scheduling depends only on its length, cache groups and encoder."""

SMALL: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 256,
    "enable_prefix_caching": False,
    "block_size": 16,
}
"""Defaults for settings that are not stated: small enough to follow by hand."""


def engine_config(
    *,
    num_blocks: int = 1000,
    async_scheduling: bool = False,
    model: str | None = None,
    rank: int = 0,
    experts: int = 0,
    usage_context: str | None = None,
    **engine_args: Any,
) -> Any:
    """Return a ``VllmConfig`` built by ``EngineArgs``.

    Args:
        num_blocks: Number of KV cache blocks, which a real engine determines by profiling the model.
        async_scheduling: Whether two batches are in flight, which vLLM would never choose on a CPU.
        model: Folder with a ``config.json``; None for a tiny dense model.
        rank: Data-parallel rank.
        experts: Number of experts of the tiny model. With experts, ``data_parallel_size`` ranks run in
            lock-step; ranks of a dense model are independent engines.
        usage_context: ``LLM_CLASS``, ``OPENAI_API_SERVER``, ...: some defaults depend on it.
        engine_args: Fields of ``EngineArgs``; the others come from ``SMALL`` or are vLLM's defaults.

    Raises:
        ValueError: If vLLM does not accept the arguments.
    """
    arguments = {**SMALL, "load_format": "dummy", "skip_tokenizer_init": True, **engine_args}
    context = None if usage_context is None else UsageContext[usage_context]
    config = EngineArgs(model=model or tiny_model(experts), **arguments).create_engine_config(context)
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config.async_scheduling = async_scheduling
    if rank:
        config.parallel_config.data_parallel_index = rank
        if experts:
            config.parallel_config.data_parallel_rank = rank
    return config


@cache
def tiny_model(experts: int = 0) -> str:
    """Return a folder with ``TINY_MODEL``, which exists until the process ends.

    With ``num_experts`` in its configuration, vLLM treats it as a mixture of experts.
    """
    folder = Path(tempfile.mkdtemp(prefix="schedtrace-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(
        json.dumps(TINY_MODEL | ({"num_experts": experts} if experts else {}))
    )
    return str(folder)
