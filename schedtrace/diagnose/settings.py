"""Settings that affect scheduling, and each value's origin: the user, vLLM's default, or other settings.

A value may differ from the user's, and some settings have no effect.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import polars as pl

from schedtrace.diagnose.reached import Reached, reached_by, reached_message
from schedtrace.model.causes import Cap
from schedtrace.model.manifest import OFFLINE_CONTEXT, Configured
from schedtrace.model.message import NOTHING, Code, Message, Number, given, joined
from schedtrace.model.report import EffectiveSetting, Finding, Origin
from schedtrace.model.say import say
from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import Fact
from schedtrace.read.run import Run
from schedtrace.timeline.timeline import Timeline, made_once

Value = Callable[[Header], Any]


def _scheduler(name: str) -> Value:
    return lambda header: header.scheduler_config.get(name)


def _listed(name: str) -> Value:
    return lambda header: header.settings.get(name)


RETENTION = "cache_config.prefix_cache_retention_interval"


def has_windows(header: Header) -> bool:
    """Return whether the retention interval has an effect because there are groups that free blocks."""
    return any(group.kind.startswith(("SlidingWindow", "Mamba")) for group in header.cache_groups)


def keeps_windows(header: Header) -> bool:
    """Return whether every block of a window stays cached, by the setting or because vLLM lacks it."""
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
"""Function that returns each setting's value from the engine's header; None if this run or release lacks it.
"""


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
"""Values that leave the choice to vLLM."""
GIVEN = "(given)"
"""Recorded text for a value that is not a plain value."""


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
    """Return the user's value of a setting; None if there is none, or it leaves the choice to vLLM."""
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
        names = ("num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization")
        decisive = next((name for name in names if VALUES[name](header) is not None), None)
        return "derived", say("[by {setting:setting}]", setting=decisive)
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
    """Describe the tokens that speculative decoding reserves in a step; nothing without it."""
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


LOCAL_INTERVAL_SINCE = (0, 33)
"""First release in which ranks outside lock-step also read ``prefill_schedule_interval``."""


def why_inert(setting: EffectiveSetting, header: Header, configured: Configured | None) -> Message:
    """Return why a setting has no effect; nothing if it has one, is at its default, or is switched off."""
    check = _CHECKS.get(setting.name)
    return check(setting, header, configured) if check and setting.origin != "overridden" else NOTHING


def _partial_prefills(setting: EffectiveSetting, _: Header, __: Configured | None) -> Message:
    """Explain that no release's V1 scheduler reads these settings, and that vLLM 0.27 removed them."""
    return NOTHING if setting.value == 1 else say("vLLM's V1 scheduler does not read it")


def _threshold(setting: EffectiveSetting, header: Header, _: Configured | None) -> Message:
    value, budget = setting.value, header.token_budget
    if not isinstance(value, int) or not value or budget is None or value < budget:
        return NOTHING
    return say("no effect: the token budget of {budget:n} limits chunks first", budget=budget)


def _adaptive(setting: EffectiveSetting, header: Header, _: Configured | None) -> Message:
    if not setting.value or header.scheduler_config.get("long_prefill_token_threshold"):
        return NOTHING
    return say("no effect without {setting:setting}", setting="long_prefill_token_threshold")


def _active(setting: EffectiveSetting, header: Header, _: Configured | None) -> Message:
    """Explain that ``max_num_active_seqs`` replaces ``max_num_seqs`` only if it is smaller."""
    if setting.value != header.scheduler_config.get("max_num_seqs"):
        return NOTHING
    return say("no effect: {setting:setting} is the same", setting="max_num_seqs")


def _watermark(setting: EffectiveSetting, header: Header, _: Configured | None) -> Message:
    """Explain a watermark without effect: vLLM reserves ``int(watermark * blocks)``."""
    value, blocks = setting.value, header.kv_blocks_total
    if not isinstance(value, int | float) or not value or blocks is None or int(value * blocks) > 0:
        return NOTHING
    return say("no effect: of {blocks:n} blocks it keeps 0 free", blocks=blocks)


def _interval(setting: EffectiveSetting, header: Header, _: Configured | None) -> Message:
    """Explain an interval without effect: a rank that schedules alone has ``data_parallel_size`` 1."""
    release = _release(header.vllm_version)
    in_lock_step = header.data_parallel_size is None or header.data_parallel_size > 1
    if setting.value == 1 or in_lock_step or release is None or release >= LOCAL_INTERVAL_SINCE:
        return NOTHING
    return say("no effect in this release: only data-parallel ranks in lock-step read it")


def _queued(_: EffectiveSetting, __: Header, configured: Configured | None) -> Message:
    """Explain why this setting does not limit ``LLM``: it never calls ``AsyncLLM.check_admission``."""
    if configured is None or configured.usage_context != OFFLINE_CONTEXT:
        return NOTHING
    return say("no effect offline: only a server's front end checks it")


def _utilization(setting: EffectiveSetting, header: Header, __: Configured | None) -> Message:
    if setting.origin != "given" or header.settings.get("cache_config.kv_cache_memory_bytes") is None:
        return NOTHING
    return say("no effect: {setting:setting} decides", setting="kv_cache_memory_bytes")


def _release(version: str) -> tuple[int, int] | None:
    """Return (0, 32) for ``0.32.0+cpu``; None for a text that is not a version."""
    try:
        major, minor = version.split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return None


_CHECKS: dict[str, Callable[[EffectiveSetting, Header, Configured | None], Message]] = {
    "max_num_partial_prefills": _partial_prefills,
    "max_long_partial_prefills": _partial_prefills,
    "long_prefill_token_threshold": _threshold,
    "long_prefill_token_threshold_adaptive": _adaptive,
    "max_num_active_seqs": _active,
    "watermark": _watermark,
    "prefill_schedule_interval": _interval,
    "max_num_queued_reqs": _queued,
    "max_num_queued_tokens": _queued,
    "gpu_memory_utilization": _utilization,
}


LITTLE_USED = 0.5
"""Share of a limit below which the peak use shows that the limit does not matter."""
FEWEST_STEPS = 100
"""Minimum number of steps with work for a statement that a limit was never reached."""
FEWEST_REQUESTS = 10
"""Minimum number of prompts for a statement that the prefix cache had no hit."""


class CappedSteps(NamedTuple):
    """Steps that left budget unused because ``long_prefill_token_threshold`` capped chunks."""

    steps: int
    """Number of steps that left budget unused because chunks were capped."""
    withheld_tokens: int
    """Number of tokens that prompts wanted and the budget still had, but the threshold withheld."""
    full_steps: int
    """Number of steps with a full budget that would have computed these steps' tokens, trial by trial."""


@dataclass(frozen=True)
class Use:
    """Peak use of the limits by one engine, and the number of observed steps."""

    steps: int
    """Number of steps that scheduled something."""
    most_tokens: int
    """Maximum number of tokens in one step."""
    most_running: int
    """Maximum number of requests that ran at once."""
    admitted: int
    cached_tokens: int
    capped: CappedSteps
    reached: Reached


@made_once
def capped_steps(timeline: Timeline) -> CappedSteps:
    """Return the steps with budget left in which the threshold, or its adaptive form, capped chunks."""
    if timeline.caps.is_empty():
        return CappedSteps(steps=0, withheld_tokens=0, full_steps=0)
    capped = (
        timeline.caps.filter(pl.col("cap").is_in([Cap.LONG_PREFILL, Cap.LONG_PREFILL_ADAPTIVE]))
        .filter(pl.col("remaining_budget") > 0)
        .group_by("step", maintain_order=True)
        .agg(withheld=(pl.col("wanted_tokens") - pl.col("capped_tokens")).sum())
        .join(timeline.steps, on="step", maintain_order="left")
        .with_columns(withheld=pl.min_horizontal("withheld", "remaining_budget"))
    )
    used_tokens = capped.group_by("trial").agg(pl.col("used_tokens").sum())["used_tokens"]
    return CappedSteps(
        steps=capped.height,
        withheld_tokens=int(capped["withheld"].sum()),
        full_steps=sum(-(-used // timeline.token_budget) for used in used_tokens),
    )


def use_of(timeline: Timeline) -> Use | None:
    """Return the peak use of an engine; values that are not recorded are None."""
    if not {Fact.QUEUE, Fact.CONFIG} <= timeline.facts:
        return None
    steps = timeline.steps
    most_tokens, most_running = (
        int(steps.select(pl.col(column).max().fill_null(0)).item() or 0)
        for column in ("used_tokens", "num_running_after")
    )
    return Use(
        steps=steps.filter(pl.col("total_requests") > 0).height,
        most_tokens=most_tokens,
        most_running=most_running,
        admitted=int(steps["num_new"].sum() or 0),
        cached_tokens=int(steps["cached_tokens"].sum() or 0),
        capped=capped_steps(timeline),
        reached=reached_by(timeline),
    )


def limit_use(setting: EffectiveSetting, engines: Sequence[Use]) -> Message:
    """Describe how much of this limit the run used, over all engines; nothing if too little is recorded."""
    if not engines or setting.value is False:
        return NOTHING
    if setting.name == "max_num_batched_tokens":
        tokens = max(engine.most_tokens for engine in engines)
        share = _little(tokens, setting, engines)
        if share is not None:
            return say("no step used more than {tokens:n} ({share:%})", tokens=tokens, share=share)
    if setting.name == "max_num_seqs":
        requests = max(engine.most_running for engine in engines)
        if _little(requests, setting, engines) is not None:
            return say("at most {requests:n request} ran at once", requests=requests)
    if setting.name == "long_prefill_token_threshold":
        return _capped([engine.capped for engine in engines])
    was_reached = reached_message(setting, [engine.reached for engine in engines])
    if setting.name == "enable_prefix_caching" and not was_reached:
        requests = sum(engine.admitted for engine in engines)
        if requests >= FEWEST_REQUESTS and not any(engine.cached_tokens for engine in engines):
            return say("none of {requests:n request} found a cached token", requests=requests)
    return was_reached


def _capped(engines: Sequence[CappedSteps]) -> Message:
    """Describe the budget that capped chunks left unused; return nothing if no chunk was capped."""
    steps = sum(engine.steps for engine in engines)
    if not steps:
        return NOTHING
    return say(
        "it capped chunks in {steps:n step}, which left {tokens:n token} unused on average that the prompts "
        "wanted; full steps would have needed {full_steps:n step} for the same work",
        steps=steps,
        tokens=round(sum(engine.withheld_tokens for engine in engines) / steps),
        full_steps=sum(engine.full_steps for engine in engines),
    )


def _little(most: int, setting: EffectiveSetting, engines: Sequence[Use]) -> float | None:
    """Return the peak use of a limit as a share, if the share is small and the run long enough."""
    limit = setting.value
    if not isinstance(limit, int) or not limit or sum(engine.steps for engine in engines) < FEWEST_STEPS:
        return None
    return most / limit if most <= LITTLE_USED * limit else None


def effective_settings(run: Run, engines: Sequence[Use] = ()) -> list[EffectiveSetting]:
    """Return the settings of a run's engines, which are the same for all ranks, in the order of ``VALUES``.

    Args:
        run: Run; without a record of its front end, only the origin of values in the manifest is known.
        engines: Peak use of each engine; if empty, only the origin of each value is described.
    """
    header = run.traces[0].header
    settings = []
    for name, value_of in VALUES.items():
        value = value_of(header)
        if name == "data_parallel_size" and value is not None:  # independent ranks know of themselves only
            value = max(value, run.engines)
        if _is_plain(value):
            settings.append(with_origin(name, value, run))
    for setting in settings:
        inert = why_inert(setting, header, configured_by(run))
        setting.inert = bool(inert)
        setting.explanation = joined([setting.explanation, inert, limit_use(setting, engines)], "; ")
    return [setting for setting in settings if _says_something(setting, header)]


def _is_plain(value: Any) -> bool:
    """Return whether a header's value is known, and of a type that vLLM can have written."""
    if isinstance(value, list):
        return all(type(size) is int for size in value)
    return isinstance(value, bool | int | float | str)


def _says_something(setting: EffectiveSetting, header: Header) -> bool:
    """Return whether to list a value, unless it is an empty list, a limit's second name, or replaced."""
    if setting.value == []:
        return False
    if setting.origin not in {"default", "derived", "unknown"}:
        return True
    if setting.name == "max_num_scheduled_tokens":
        return setting.value != header.scheduler_config.get("max_num_batched_tokens")
    return setting.name != "gpu_memory_utilization" or not VALUES["kv_cache_memory_bytes"](header)


def without_followed(findings: list[Finding], settings: Sequence[EffectiveSetting]) -> list[Finding]:
    """Remove advice to use a setting that the user set and vLLM overrode; return findings in order.

    A finding that loses its first piece of advice also loses its gain, which belongs to it. If no advice is
    left, the finding's ``refuted`` gives the reason.
    """
    overridden = {setting.name: setting for setting in settings if setting.origin == "overridden"}
    return [_without(finding, overridden) for finding in findings]


def _without(finding: Finding, overridden: dict[str, EffectiveSetting]) -> Finding:
    remaining = []
    for advice in finding.advice:
        setting = overridden.get(advice.setting or "")
        if setting is None or advice.value is None or setting.given != advice.value:
            remaining.append(advice)
    if len(remaining) == len(finding.advice):
        return finding
    first = finding.advice[0]
    return msgspec.structs.replace(
        finding,
        advice=remaining,
        gain=finding.gain if first in remaining else None,
        refuted=finding.refuted if remaining else [*finding.refuted, _why(overridden[str(first.setting)])],
    )


def _why(setting: EffectiveSetting) -> Message:
    option = setting.name.replace("_", "-")
    if isinstance(setting.given, bool):
        option = option if setting.given else f"no-{option}"
        sentence = "{option:setting} was given, and vLLM keeps it {state} here."
        return say(sentence, option=f"--{option}", state="on" if setting.value else "off")
    sentence = "{option:setting} {given} was given, and vLLM keeps {value} here."
    return say(sentence, option=f"--{option}", given=_plain(setting.given), value=_plain(setting.value))


def _plain(value: object) -> Number | str:
    return given(value) if isinstance(value, int | float) else str(value)
