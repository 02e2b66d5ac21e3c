"""Origins of a setting's value: the user, vLLM's default, or other settings."""

from collections.abc import Callable
from typing import Any

from schedtrace.model.manifest import Configured
from schedtrace.model.message import NOTHING, Code, Message, joined
from schedtrace.model.report import EffectiveSetting, Origin
from schedtrace.model.say import say
from schedtrace.model.trace import Header
from schedtrace.read.run import Run

Value = Callable[[Header], Any]


def _scheduler(name: str) -> Value:
    return lambda header: header.scheduler_config.get(name)


def _listed(name: str) -> Value:
    return lambda header: header.settings.get(name)


RETENTION = "cache_config.prefix_cache_retention_interval"


def has_windows(header: Header) -> bool:
    """Return whether the retention interval has an effect: whether there are groups that free blocks."""
    return any(group.kind.startswith(("SlidingWindow", "Mamba")) for group in header.cache_groups)


def keeps_windows(header: Header) -> bool:
    """Return whether every block of a window stays cached: by the setting, or in a vLLM without it."""
    return has_windows(header) and header.settings.get(RETENTION) is None


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
    "prefix_cache_retention_interval": lambda header: (
        header.settings.get(RETENTION) if has_windows(header) else None
    ),
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
"""Location of each setting in the engine's header; None if this run or release lacks it."""


STRUCTURES = {
    "num_speculative_tokens": "speculative_config",
    "cudagraph_mode": "compilation_config",
    "max_cudagraph_capture_size": "compilation_config",
    "cudagraph_capture_sizes": "compilation_config",
}
"""Settings that a structure may contain; only the presence of the structure is recorded."""
CHOSEN = frozenset(
    {
        *("max_num_scheduled_tokens", "num_gpu_blocks", "kv_cache_memory_bytes", "kv_cache_dtype"),
        *("block_size", "max_model_len", "max_num_encoder_input_tokens", *STRUCTURES),
    }
)
"""Settings that vLLM computes if the user does not set them."""
BY_CONTEXT = frozenset({"max_num_seqs", "max_num_batched_tokens"})
"""Settings whose default differs between ``LLM(...)`` and a server."""
AUTOMATIC = (None, -1, "auto")
"""Values that ask vLLM to choose."""
GIVEN = "(given)"
"""Recorded text for a value that is no plain value."""


def with_origin(name: str, value: Any, run: Run) -> EffectiveSetting:
    """Return a setting of the run's engines, with the known origin of its value."""
    value_given, configured = _given(name, run), configured_by(run)
    if value_given is None:
        origin, why = _not_given(name, value, run)
        context = configured.usage_context if name in BY_CONTEXT and configured else None
        return EffectiveSetting(name=name, value=value, origin=origin, context=context, explanation=why)
    if value_given in (value, GIVEN):
        by_run = run.manifest is not None and name in run.manifest.engine_args_chosen
        why = say("chosen by {run:code}", run="schedtrace run") if by_run else NOTHING
        return EffectiveSetting(name=name, value=value, origin="given", explanation=why)
    why = say("{given:code} was given; vLLM or its platform changed it", given=str(value_given))
    return EffectiveSetting(name=name, value=value, origin="overridden", given=value_given, explanation=why)


def configured_by(run: Run) -> Configured | None:
    """Return the front end's record of the engines' configuration."""
    return run.front_end.configured if run.front_end else None


def _given(name: str, run: Run) -> Any:
    """Return the user's value of a setting; None if there is none, or it asks vLLM to choose."""
    arguments: dict[str, Any] = {}
    if configured := configured_by(run):
        arguments = configured.given
    elif run.manifest is not None:
        arguments = run.manifest.engine_args_given | run.manifest.engine_args_chosen
    if name == "num_speculative_tokens" and arguments.get(STRUCTURES[name]) is not None:
        return GIVEN
    return None if arguments.get(name) in AUTOMATIC else arguments[name]


def _not_given(name: str, value: Any, run: Run) -> tuple[Origin, Message]:
    header, configured = run.traces[0].header, configured_by(run)
    if name == "max_num_scheduled_tokens" and (reserved := _reserved_for_drafts(header)):
        return "reduced", reserved
    if name == "num_gpu_blocks":
        return "derived", _blocks_from(header)
    if configured is None:
        return "unknown", NOTHING
    if name in BY_CONTEXT:
        return _by_context(value, configured.context_defaults.get(name, {}), configured.usage_context)
    if configured.given.get(STRUCTURES.get(name, "")) is not None:
        structure = Code(STRUCTURES[name])
        return "unknown", say("{structure} was given; its content is not recorded", structure=structure)
    return ("derived" if name in configured.derived or name in CHOSEN else "default"), NOTHING


def _by_context(value: Any, defaults: dict[str, int], context: str | None) -> tuple[Origin, Message]:
    """Return the origin of a setting in ``BY_CONTEXT``: the context's default, or vLLM's choice."""
    defaults_elsewhere = [
        say("{context:code} {value:n}", context=other_context, value=default)
        for other_context, default in defaults.items()
        if other_context != context and default != value
    ]
    elsewhere = say("[default elsewhere: {others}]", others=joined(defaults_elsewhere, ", "))
    mine = say("[for {context:code}]", context=context)
    is_default = context is not None and value == defaults.get(context)
    return ("default" if is_default else "derived"), joined([mine, elsewhere], "; ")


def _reserved_for_drafts(header: Header) -> Message:
    """Return the number of tokens that speculative decoding reserves in a step, or nothing without it."""
    slots = header.settings.get("speculative_config.max_num_new_slots_for_drafting")
    batched, budget = header.scheduler_config.get("max_num_batched_tokens"), header.token_budget
    if not header.settings.get("speculative_config.num_speculative_tokens") or not batched or budget is None:
        return NOTHING
    setting = "max_num_batched_tokens"
    if budget < batched:
        sentence = "{setting:setting} ({batched:n}) less {slots:n} for draft tokens"
        return say(sentence, setting=setting, batched=batched, slots=batched - budget)
    if not isinstance(slots, int) or not slots:
        return NOTHING
    sentence = "every scheduled request also takes {slots:n} of {setting:setting} for draft tokens"
    return say(sentence, slots=slots, setting=setting)


def _blocks_from(header: Header) -> Message:
    """Return the setting that decided the number of blocks."""
    names = ("num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization")
    by = next((name for name in names if VALUES[name](header) is not None), None)
    return say("[by {setting:setting}]", setting=by)
