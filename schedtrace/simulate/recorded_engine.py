"""The engine of a recorded trace, to be built again: its header, in the words of vLLM's arguments."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from vllm.config import SchedulerConfig
from vllm.engine.arg_utils import EngineArgs

from schedtrace.errors import UsageError
from schedtrace.model.trace import Header
from schedtrace.simulate.assembled_engine import recorded_groups
from schedtrace.simulate.config import OF_RANKS, require_values
from schedtrace.step_times.memory import refuse_of_memory

RENAMED = {"policy": "scheduling_policy"}
"""Fields of ``SchedulerConfig`` that vLLM's arguments call otherwise."""
LEFT_OUT = {"scheduler_cls", "async_scheduling", "runner_type"}
"""Of ``SchedulerConfig``: what a replay chooses by itself. A class that a trace names is never imported."""
OF_SCHEDULER = {field.name for field in dataclasses.fields(SchedulerConfig)} - LEFT_OUT
"""Taken from a header, which may be anyone's: other arguments of vLLM can name code that is run."""
BLOCKS = "num_gpu_blocks_override"
NAMES = tuple(field.name for field in dataclasses.fields(EngineArgs))


def _is_text_of_list(value: Any) -> bool:
    """Lists are recorded as text; none of them decides anything in the scheduler (``cuda_graph_sizes``)."""
    return isinstance(value, str) and value.startswith("[")


def engine_options(
    header: Header, changes: Mapping[str, Any] | None = None, *, ranks: int = 1
) -> dict[str, Any]:
    """Options of ``Engine`` (for several ranks of ``Ranks``) for what recorded a trace, some changed.

    Args:
        header: Of the trace; of several engines, of one of them.
        changes: Names of vLLM's arguments to values; ``num_gpu_blocks_override`` is the size of the KV cache.
            ``router`` has every request routed anew; ``balance_ranks`` is ``schedtrace.balance``.
        ranks: Engines of the run.

    Raises:
        UsageError: a name is none of vLLM's, or a change that a replay cannot make; the model has layers that
            it cannot build.
    """
    changes = dict(changes or {})
    for name in changes:
        require_known(name)
    configured = {
        RENAMED.get(name, name): value
        for name, value in header.scheduler_config.items()
        if name in OF_SCHEDULER and value is not None and not _is_text_of_list(value)
    }
    options = {name: value for name, value in configured.items() if name in NAMES}
    settings = header.settings
    options |= {
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
        options |= {"drafts": drafts, "speculative_config": method}
    options |= _of_ranks(header, changes, ranks)
    if BLOCKS in changes:
        changes["num_blocks"] = changes.pop(BLOCKS)
    options |= changes
    if not options["num_blocks"]:
        msg = f"the trace does not say how many KV blocks there are: --set {BLOCKS}=N"
        raise UsageError(msg)
    _require_room(options, changes)
    groups = recorded_groups(header.cache_groups, options["block_size"])
    return options | ({"kv_groups": groups} if groups else {})


def is_lockstep(header: Header) -> bool:
    """Whether data-parallel ranks of this model run in lock-step."""
    return (header.data_parallel_size or 1) > 1 or bool(header.settings.get("parallel_config.is_moe_model"))


def _of_ranks(header: Header, changes: Mapping[str, Any], recorded: int) -> dict[str, Any]:
    """Options of ``Ranks``; none for an engine that stays on its own."""
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


def require_known(name: str) -> None:
    """Check the name of a change.

    Raises:
        UsageError: no argument of vLLM, or one that a replay cannot change.
    """
    refuse_of_memory(name)
    if name not in NAMES and name not in OF_RANKS:
        near = difflib.get_close_matches(name, [*NAMES, *OF_RANKS], n=1)
        msg = f"--set {name}: not an argument of vLLM{f'; {near[0]}?' if near else ''}"
        raise UsageError(msg)


def _require_room(options: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """vLLM does not start where one request of ``max_model_len`` would not fit."""
    if not {"num_blocks", "max_model_len", "block_size"} & changes.keys() or options.get("kv_groups"):
        return
    needed = -(-options["max_model_len"] // options["block_size"])
    if options["num_blocks"] < needed:
        msg = (
            f"--set {BLOCKS}={options['num_blocks']}: vLLM would not start, a request of max_model_len "
            f"{options['max_model_len']:,} needs {needed:,} blocks; --set max_model_len=N as well"
        )
        raise UsageError(msg)
