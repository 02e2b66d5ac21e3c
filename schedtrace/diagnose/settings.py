"""Settings that affect scheduling: their values, the origin of each value, and what engines made of them.

A value comes from the user, from vLLM's default or from other settings. It may differ from the value that the
user gave, and some settings have no effect.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import polars as pl

from schedtrace.diagnose.batches_in_flight import executed_batches
from schedtrace.diagnose.kv_cache import cache_use
from schedtrace.model.causes import Cap
from schedtrace.model.manifest import OFFLINE_CONTEXT, Configured
from schedtrace.model.message import NOTHING, Code, Message, given, joined
from schedtrace.model.report import EffectiveSetting, Finding, Origin
from schedtrace.model.say import say
from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import Fact
from schedtrace.read.run import Run
from schedtrace.step_times.batch import graph_sizes
from schedtrace.timeline.timeline import Timeline, made_once

Value = Callable[[Header], Any]


def _scheduler(name: str) -> Value:
    return lambda header: header.scheduler_config.get(name)


def _listed(name: str) -> Value:
    return lambda header: header.settings.get(name)


RETENTION = "cache_config.prefix_cache_retention_interval"


def has_windows(header: Header) -> bool:
    """Return whether the retention interval has an effect: some cache groups free blocks behind a window."""
    return any(group.kind.startswith(("SlidingWindow", "Mamba")) for group in header.cache_groups)


def keeps_windows(header: Header) -> bool:
    """Return whether every block of a window stays cached: no retention interval is set, or vLLM lacks it."""
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
"""Function for each setting that returns its value from the engine's header; None if the header lacks it."""


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
"""Text that is recorded in place of a structured value, such as a list."""


def with_origin(name: str, value: Any, run: Run) -> EffectiveSetting:
    """Return a setting of the run's engines, with the origin of its value, as far as it is recorded."""
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
        context, defaults = configured.usage_context, configured.context_defaults.get(name, {})
        defaults_elsewhere = [
            say("{context:code} {value:n}", context=other_context, value=default)
            for other_context, default in defaults.items()
            if other_context != context and default != value
        ]
        elsewhere = say("[default elsewhere: {others}]", others=joined(defaults_elsewhere, ", "))
        is_default = context is not None and value == defaults.get(context)
        mine = say("[for {context:code}]", context=context)
        return ("default" if is_default else "derived"), joined([mine, elsewhere], "; ")
    if configured.given.get(STRUCTURES.get(name, "")) is not None:
        structure = Code(STRUCTURES[name])
        return "unknown", say("{structure} was given; its content is not recorded", structure=structure)
    return ("derived" if name in configured.derived or name in CHOSEN else "default"), NOTHING


def _reserved_for_drafts(header: Header) -> Message:
    """Describe the tokens that speculative decoding reserves in a step; nothing without such decoding."""
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


THRESHOLD = "long_prefill_token_threshold"
LOCAL_INTERVAL_SINCE = (0, 33)
"""First release in which ranks outside lock-step also read ``prefill_schedule_interval``."""


def why_inert(setting: EffectiveSetting, header: Header, configured: Configured | None) -> Message:
    """Return why a setting has no effect; nothing if it has an effect or its default value, or is off."""
    value, budget, blocks = setting.value, header.token_budget, header.kv_blocks_total
    number = value if isinstance(value, int | float) else 0
    limits, memory = header.scheduler_config, header.settings.get("cache_config.kv_cache_memory_bytes")
    is_alone = header.data_parallel_size is not None and header.data_parallel_size <= 1
    release = _release(header.vllm_version)
    is_older = release is not None and release < LOCAL_INTERVAL_SINCE
    is_offline = configured is not None and configured.usage_context == OFFLINE_CONTEXT
    why = NOTHING
    match setting.name:
        case "max_num_partial_prefills" | "max_long_partial_prefills" if value != 1:
            why = say("vLLM's V1 scheduler does not read it")  # in no release; vLLM 0.27 removed them
        case "long_prefill_token_threshold" if number and budget is not None and number >= budget:
            why = say("no effect: the token budget of {budget:n} limits chunks first", budget=budget)
        case "long_prefill_token_threshold_adaptive" if value and not limits.get(THRESHOLD):
            why = say("no effect without {setting:setting}", setting=THRESHOLD)
        case "max_num_active_seqs" if value == limits.get("max_num_seqs"):  # the smaller one counts
            why = say("no effect: {setting:setting} is the same", setting="max_num_seqs")
        case "watermark" if number and blocks is not None and int(number * blocks) <= 0:  # vLLM's formula
            why = say("no effect: of {blocks:n} blocks it keeps 0 free", blocks=blocks)
        case "prefill_schedule_interval" if value != 1 and is_alone and is_older:
            why = say("no effect in this release: only data-parallel ranks in lock-step read it")
        case "max_num_queued_reqs" | "max_num_queued_tokens" if is_offline:
            # ``LLM`` never calls ``AsyncLLM.check_admission``
            why = say("no effect offline: only a server's front end checks it")
        case "gpu_memory_utilization" if setting.origin == "given" and memory is not None:
            why = say("no effect: {setting:setting} decides", setting="kv_cache_memory_bytes")
    return why


def _release(version: str) -> tuple[int, int] | None:
    """Return (0, 32) for ``0.32.0+cpu``; None for a text that is not a version."""
    try:
        major, minor = version.split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return None


LITTLE_USED = 0.5
"""Maximum peak use, as a share of the limit, which shows that the limit does not matter."""
FEWEST_STEPS = 100
"""Minimum number of steps with work for a statement that a limit was never reached."""
FEWEST_REQUESTS = 10
"""Minimum number of prompts for a statement that the prefix cache had no hit."""


FEWEST_STEPS_OF_USE = 20
"""Minimum number of steps, or executed batches, that show the use of a setting."""
MISSED_FRAC = 0.05
"""Minimum share of the prompts' tokens that the prefix cache missed although earlier prompts began with them,
for these misses to be reported."""


class CappedSteps(NamedTuple):
    """Steps that left budget unused because ``long_prefill_token_threshold`` capped chunks."""

    steps: int
    """Number of steps that left budget unused because chunks were capped."""
    withheld_tokens: int
    """Number of tokens that prompts wanted and the budget still had, but the threshold withheld."""
    full_steps: int
    """Number of steps with a full budget that would have computed these steps' tokens, trial by trial."""


@dataclass(frozen=True)
class Reached:
    """Sums over one engine; 0 if the engine has no such events or the trace does not record them."""

    depth: int = 0
    """Configured number of batches in flight in a pipeline."""
    batches: int = 0
    """Number of batches whose execution is recorded."""
    in_flight: int = 0
    """Number of batches in flight, summed over the recorded batches."""
    drafts: int = 0
    """Number of draft tokens of finished requests."""
    accepted: int = 0
    """Number of draft tokens of finished requests that were accepted."""
    round_us: float | None = None
    """Time to verify the drafts of one decode, as the step-time model estimates it; None without a model."""
    graph_steps: int = 0
    """Number of steps without prefill that fit into a captured graph."""
    graph_tokens: int = 0
    """Number of tokens scheduled in the steps of ``graph_steps``."""
    padded_tokens: int = 0
    """Sizes in tokens of the smallest graphs that hold the steps of ``graph_steps``, summed."""
    larger_steps: int = 0
    """Number of steps without prefill that are larger than every captured graph."""
    prompt_tokens: int = 0
    """Number of prompt tokens of all requests."""
    shareable_tokens: int = 0
    """Number of prompt tokens in prefixes that prompts share with earlier ones."""
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""


@dataclass(frozen=True)
class Use:
    """Peak values that one engine reached, to compare with its limits, and the number of observed steps."""

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


def reached_by(timeline: Timeline) -> Reached:
    """Return the use that one engine made of its settings."""
    stages, depth = timeline.header.pipeline_parallel_size, timeline.header.batches_in_flight
    batches = executed_batches(timeline)
    if not (stages and depth and min(stages, depth) > 1):  # no pipeline
        depth, batches = 0, batches.clear()
    finishes, model = timeline.finishes, timeline.step_time
    drafts, accepted = (
        int(finishes[name].sum() or 0) if name in finishes.columns else 0
        for name in ("drafts", "drafts_accepted")
    )
    each = timeline.header.settings.get("speculative_config.num_speculative_tokens")
    round_us = model.per_decode_token_us * each if model and drafts and isinstance(each, int) else None
    captured = pl.Series(graph_sizes(timeline.header), dtype=pl.Int64)
    decodes = pl.Series(dtype=pl.Int64)
    if not captured.is_empty():
        steps = timeline.steps.filter((pl.col("prefill_tokens") == 0) & (pl.col("used_tokens") > 0))
        decodes = steps["used_tokens"].cast(pl.Int64)
    place = captured.search_sorted(decodes, side="left").cast(pl.Int64)
    fits = place < captured.len()
    prompt, shareable, cached = 0, 0, 0
    if {Fact.CACHE, Fact.REQUESTS, Fact.LIVES} <= timeline.facts:
        use = cache_use(timeline)
        names = ("prompt_tokens", "shareable_tokens", "cached_tokens")
        prompt, shareable, cached = (int(use[name].sum() or 0) for name in names)
    return Reached(
        depth=depth,
        batches=batches.height,
        in_flight=int(batches["in_flight"].sum()),
        drafts=drafts,
        accepted=accepted,
        round_us=round_us,
        graph_steps=int(fits.sum()),
        graph_tokens=int(decodes.filter(fits).sum()),
        padded_tokens=int(captured.gather(place.filter(fits)).sum()),
        larger_steps=int((~fits).sum()),
        prompt_tokens=prompt,
        shareable_tokens=shareable,
        cached_tokens=cached,
    )


def use_of(timeline: Timeline) -> Use | None:
    """Return the peak values that an engine reached; None if the trace lacks its queue or configuration."""
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
    steps = sum(engine.capped.steps for engine in engines)
    if setting.name == THRESHOLD and steps:
        return say(
            "it capped chunks in {steps:n step}, which left {tokens:n token} unused on average that the "
            "prompts wanted; full steps would have needed {full_steps:n step} for the same work",
            steps=steps,
            tokens=round(sum(engine.capped.withheld_tokens for engine in engines) / steps),
            full_steps=sum(engine.capped.full_steps for engine in engines),
        )
    was_reached = reached_message(setting, [engine.reached for engine in engines])
    if setting.name == "enable_prefix_caching" and not was_reached:
        requests = sum(engine.admitted for engine in engines)
        if requests >= FEWEST_REQUESTS and not any(engine.cached_tokens for engine in engines):
            return say("none of {requests:n request} found a cached token", requests=requests)
    return was_reached


def reached_message(setting: EffectiveSetting, engines: Sequence[Reached]) -> Message:
    """Describe the use that all engines made of a setting; ``NOTHING`` if the traces do not show it."""
    name = setting.name

    def engine_sum(field: str) -> int:
        return sum(getattr(engine, field) for engine in engines)

    if name == "pipeline_parallel_size" and engine_sum("batches") >= FEWEST_STEPS_OF_USE:
        return say(
            "on average {mean:n1} of {depth:n} batches were in flight",
            mean=engine_sum("in_flight") / engine_sum("batches"),
            depth=max(engine.depth for engine in engines),
        )
    if name == "num_speculative_tokens" and engine_sum("drafts"):
        return say(
            "{frac:%} of {drafts:n draft token} were accepted[; those of a decode take {round:us} to verify]",
            frac=engine_sum("accepted") / engine_sum("drafts"),
            drafts=engine_sum("drafts"),
            round=engines[0].round_us,
        )
    if (
        name == "cudagraph_capture_sizes"
        and engine_sum("graph_steps") + engine_sum("larger_steps") >= FEWEST_STEPS_OF_USE
    ):
        padded = engine_sum("padded_tokens")
        parts = [
            say(
                "[{frac:%} of the tokens in graphs of {steps:n decode step} were padding]",
                frac=1 - engine_sum("graph_tokens") / padded if padded else None,
                steps=engine_sum("graph_steps"),
            ),
            say(
                "[{larger:n decode step} were larger than every graph]",
                larger=engine_sum("larger_steps") or None,
            ),
        ]
        return joined(parts, "; ")
    missed = engine_sum("shareable_tokens") - engine_sum("cached_tokens")
    if name == "enable_prefix_caching" and missed >= MISSED_FRAC * max(1, engine_sum("prompt_tokens")):
        return say(
            "prompts found {cached:n} of {shareable:n token} with which earlier ones began",
            cached=engine_sum("cached_tokens"),
            shareable=engine_sum("shareable_tokens"),
        )
    return NOTHING


def _little(most: int, setting: EffectiveSetting, engines: Sequence[Use]) -> float | None:
    """Return the peak use as a share of a limit; None if the share is large or the run too short."""
    limit = setting.value
    if not isinstance(limit, int) or not limit or sum(engine.steps for engine in engines) < FEWEST_STEPS:
        return None
    return most / limit if most <= LITTLE_USED * limit else None


def effective_settings(run: Run, engines: Sequence[Use] = ()) -> list[EffectiveSetting]:
    """Return the settings that all engines of a run share, in the order of ``VALUES``.

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
        # known, and of a type that vLLM can have written
        is_list = isinstance(value, list) and all(type(size) is int for size in value)
        if is_list or isinstance(value, bool | int | float | str):
            settings.append(with_origin(name, value, run))
    for setting in settings:
        is_overridden = setting.origin == "overridden"
        inert = NOTHING if is_overridden else why_inert(setting, header, configured_by(run))
        setting.inert = bool(inert)
        setting.explanation = joined([setting.explanation, inert, limit_use(setting, engines)], "; ")
    return [setting for setting in settings if _says_something(setting, header)]


def _says_something(setting: EffectiveSetting, header: Header) -> bool:
    """Return whether to list a setting: not an empty list, a limit's second name or a replaced default."""
    if setting.value == []:
        return False
    if setting.origin not in {"default", "derived", "unknown"}:
        return True
    if setting.name == "max_num_scheduled_tokens":
        return setting.value != header.scheduler_config.get("max_num_batched_tokens")
    return setting.name != "gpu_memory_utilization" or not VALUES["kv_cache_memory_bytes"](header)


def without_followed(findings: list[Finding], settings: Sequence[EffectiveSetting]) -> list[Finding]:
    """Remove advice to use a value that the user already gave and vLLM overrode; keep the findings' order.

    A finding that loses its first piece of advice also loses its gain, which belongs to that advice. If no
    advice is left, the finding's ``refuted`` gives the reason.
    """
    overridden = {setting.name: setting for setting in settings if setting.origin == "overridden"}
    revised = []
    for finding in findings:
        remaining = []
        for advice in finding.advice:
            setting = overridden.get(advice.setting or "")
            if setting is None or advice.value is None or setting.given != advice.value:
                remaining.append(advice)
        if len(remaining) == len(finding.advice):
            revised.append(finding)
            continue
        first, refuted = finding.advice[0], finding.refuted
        revised.append(
            msgspec.structs.replace(
                finding,
                advice=remaining,
                gain=finding.gain if first in remaining else None,
                refuted=refuted if remaining else [*refuted, _refusal(overridden[str(first.setting)])],
            )
        )
    return revised


def _refusal(setting: EffectiveSetting) -> Message:
    """State the user's value of a setting and the value that vLLM uses instead."""
    option = setting.name.replace("_", "-")
    if isinstance(setting.given, bool):
        option = option if setting.given else f"no-{option}"
        sentence = "{option:setting} was given, and vLLM keeps it {state} here."
        return say(sentence, option=f"--{option}", state="on" if setting.value else "off")
    asked, value = (
        given(value) if isinstance(value, int | float) else str(value)
        for value in (setting.given, setting.value)
    )
    sentence = "{option:setting} {given} was given, and vLLM keeps {value} here."
    return say(sentence, option=f"--{option}", given=asked, value=value)
