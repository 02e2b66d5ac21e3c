"""Advice on settings in the form that vLLM accepts: the option's unit, the current value, and legal values.

What vLLM refuses or overrides was read in its source (``config/``, ``platforms/cpu.py``,
``engine/arg_utils.py``); ``tests/contract/test_allowed_settings.py`` checks it with vLLM's real
configuration.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import polars as pl

from schedtrace.diagnose.rules.common import advise
from schedtrace.model.message import NOTHING, Message, Setting
from schedtrace.model.report import Advice, Finding
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline

UNITS = {"G": 2**30, "M": 2**20, "K": 2**10}
"""Factors of the suffixes that vLLM's options accept; vLLM refuses a fraction before a suffix."""
LEAST_UNITS = 16
"""Fewest units for which a suffix is used; with fewer, rounding up would ask for much more than needed."""
LEAST_COST = 0.01
"""Minimum share of a step's time that its additional requests must cost for this cost to be stated."""
SPACE = "VLLM_CPU_KVCACHE_SPACE"

BATCHED_TOKENS = Setting("--max-num-batched-tokens")
LONG_PREFILL = Setting("--long-prefill-token-threshold")


def allowed(timeline: Timeline, finding: Finding) -> Finding:
    """Return the finding without the advice that vLLM would refuse or override here, but with the reasons.

    A finding that loses its first piece of advice also loses its gain, which is the gain from that piece. If
    the trace does not record whether vLLM chose the current value itself, the advice says so.
    """
    accepted: list[Advice] = []
    refuted: list[Message] = []
    for advice in finding.advice:
        check = _CHECKS.get(advice.setting or "")
        why = check(timeline, advice.value) if check else NOTHING
        if why:
            option = f"--{(advice.setting or '').replace('_', '-')}"
            refuted.append(say("{option:setting} is no choice here: {why}.", option=option, why=why))
        elif (  # vLLM switches these off by itself if they do not combine with other settings
            advice.setting in {"async_scheduling", "enable_chunked_prefill"}
            and advice.value is True
            and chosen_by_vllm(timeline, advice.setting) is None
        ):
            unsure = "{advice}; whether vLLM itself keeps it off here is not recorded"
            accepted.append(msgspec.structs.replace(advice, message=say(unsure, advice=advice.message)))
        else:
            accepted.append(advice)
    if not refuted and accepted == finding.advice:
        return finding
    gone = not accepted or accepted[0].setting != finding.advice[0].setting
    gain = None if gone else finding.gain
    return msgspec.structs.replace(finding, advice=accepted, gain=gain, refuted=[*finding.refuted, *refuted])


def chosen_by_vllm(timeline: Timeline, name: str) -> bool | None:
    """Return whether vLLM derived this argument's value because the user gave none; None: not recorded."""
    configured = timeline.front_end.configured if timeline.front_end else None
    return None if configured is None else name in configured.derived


def why_no_async_scheduling(timeline: Timeline, value: Any = True) -> Message:  # noqa: PLR0911  # a reason a line
    """Return why vLLM refuses ``--async-scheduling`` or switches it off, or nothing if it does neither.

    vLLM switches it on by itself if it can, so a value of false that vLLM chose means that it cannot.
    """
    header, settings = timeline.header, timeline.header.settings
    drafts = settings.get("speculative_config.method")
    if value is not True:
        return NOTHING
    on_platform = header.clock != "virtual"  # a simulated device is not the CPU that vLLM was configured on
    if header.device == "cpu" and on_platform:
        return say("vLLM switches it off on a CPU")
    if drafts in REFUSED_DRAFTS:
        return say("vLLM refuses it together with {method:code} drafts", method=str(drafts))
    if settings.get("speculative_config.disable_padded_drafter_batch"):
        return say("vLLM refuses it together with {option:setting}", option="disable_padded_drafter_batch")
    if (header.pipeline_parallel_size or 1) > 1 and settings.get("use_v2_model_runner") is False:
        return say("vLLM's first model runner does not support it with pipeline parallelism")
    if on_platform and chosen_by_vllm(timeline, "async_scheduling"):
        return say("vLLM itself switched it off for this configuration")
    return NOTHING


REFUSED_DRAFTS = frozenset({"ngram", "medusa", "mlp_speculator", "suffix"})
"""Drafting methods that no release schedules asynchronously."""


def _chunked(timeline: Timeline, value: Any) -> Message:
    if value is True and chosen_by_vllm(timeline, "enable_chunked_prefill"):
        return say("vLLM itself switched it off for this model")
    return NOTHING


def _above(value: Any, most: int | None, option: Setting, things: str = "") -> Message:
    """Return why vLLM refuses a value above another option's; nothing if it does not, or if unknown."""
    if value is None or most is None or value <= most:
        return NOTHING
    return say("vLLM refuses more {things}than {option} ({most:n})", things=things, option=option, most=most)


def _tokens(timeline: Timeline, value: Any) -> Message:
    least = smallest_batched_tokens(timeline)
    if value is None or least is None or value >= least:
        return NOTHING
    return say("vLLM refuses less than {least:n}", least=least)


def _adapters(timeline: Timeline, value: Any) -> Message:
    """Return why vLLM refuses this many LoRA adapters; an unset ``max_cpu_loras`` follows ``max_loras``."""
    most, now = (timeline.header.settings.get(f"lora_config.max_{name}") for name in ("cpu_loras", "loras"))
    is_set = isinstance(most, int) and most != now
    return _above(value, most if is_set else None, Setting("--max-cpu-loras"))


def _block_size(timeline: Timeline, _: Any) -> Message:
    if any(group.kind == "Mamba" for group in timeline.header.cache_groups):
        return say("vLLM derives it from the state of the Mamba layers")
    return NOTHING


ADAPTER_MEMORY = {"max_loras": "Device", "max_cpu_loras": "Host"}
"""Memory in which each setting makes room for adapters."""
_CHECKS: dict[str, Callable[[Timeline, Any], Message]] = {
    "async_scheduling": why_no_async_scheduling,
    "enable_chunked_prefill": _chunked,
    "max_num_seqs": lambda timeline, value: _above(
        value, batched_tokens(timeline) or None, BATCHED_TOKENS, things="seats "
    ),
    "max_num_active_seqs": lambda timeline, value: _above(
        value, timeline.header.max_num_running_reqs, Setting("--max-num-seqs")
    ),
    "max_num_batched_tokens": _tokens,
    "max_loras": _adapters,
    "block_size": _block_size,
}


def kv_space(timeline: Timeline, blocks: int | None = None) -> Message:
    """Return option, value and current value for a KV cache with this many blocks.

    Args:
        timeline: Timeline of the engine.
        blocks: Number of blocks, including the null block; None for "more than now".
    """
    settings, cpu = timeline.header.settings, timeline.header.device == "cpu"
    if now := settings.get("cache_config.num_gpu_blocks_override"):
        return _typed("--num-gpu-blocks-override", blocks, now)
    wanted = kv_bytes(timeline, blocks)
    if cpu and (gib := settings.get(f"environment.{SPACE}")):
        return say("{space}, in GiB", space=_typed(SPACE, wanted and -(-wanted // UNITS["G"]), gib))
    configured = settings.get("cache_config.kv_cache_memory_bytes")
    memory = _typed(
        "--kv-cache-memory-bytes",
        wanted and typed_bytes(wanted),
        typed_bytes(configured, exact=True) if isinstance(configured, int) and configured > 0 else None,
    )
    if cpu or configured:
        return memory
    share, total = settings.get("cache_config.gpu_memory_utilization"), timeline.header.kv_blocks_total
    more = None if blocks is None or total is None else kv_bytes(timeline, blocks - total)
    wanted_share, memory_bytes = None, timeline.header.device_memory_bytes
    if isinstance(share, float) and more is not None and memory_bytes:
        wanted_share = share + more / memory_bytes
    if wanted_share is not None and wanted_share > 1:
        return say(
            "{share}, as far as the GPU's memory goes: {blocks:n} blocks need {times:n} of it",
            share=_typed("--gpu-memory-utilization", None, share),
            blocks=blocks,
            times=round(wanted_share, 1),
        )
    value = wanted_share and math.ceil(100 * wanted_share) / 100
    utilization = _typed("--gpu-memory-utilization", value, share)
    return say("{utilization} or {memory}", utilization=utilization, memory=memory)


def twice_the_blocks(timeline: Timeline, purpose: str = "") -> Advice:
    """Return the advice to double the number of KV blocks; ``purpose`` says what the new blocks are for."""
    total = timeline.header.kv_blocks_total or 0
    return advise(
        "{space}: {blocks:n block} instead of {total:n}" + purpose,
        space=kv_space(timeline, 2 * total or None),
        blocks=2 * total,
        total=total,
        setting="num_gpu_blocks_override",
        value=2 * total or None,
    )


def _typed(option: str, value: object, now: object) -> Message:
    """Return an option with its value and current value: ``--kv-cache-memory-bytes 32M (now 4M)``."""
    assign = "=" if option == SPACE else " "
    typed = option if value is None else f"{option}{assign}{value}"
    return say("{typed:setting}[ (now {now:code})]", typed=typed, now=None if now is None else str(now))


def typed_bytes(count: int, *, exact: bool = False) -> str:
    """Return a number of bytes in the form that vLLM's options accept, rounded up: ``32M``.

    Args:
        count: More than 0.
        exact: Whether to keep the exact number: ``4M`` and ``4194305``.
    """
    for suffix, unit in UNITS.items():
        if count % unit == 0 if exact else count >= LEAST_UNITS * unit:
            return f"{-(-count // unit)}{suffix}"
    return str(count)


def kv_bytes(timeline: Timeline, blocks: int | None) -> int | None:
    """Return the bytes of this many blocks on each device; None if unknown or if stages may differ."""
    header = timeline.header
    configured, total = header.settings.get("cache_config.kv_cache_memory_bytes"), header.kv_blocks_total
    if blocks is None or (header.pipeline_parallel_size or 1) > 1:
        return None
    if header.kv_block_bytes:
        return blocks * header.kv_block_bytes
    if isinstance(configured, int) and total:  # an older trace: a block has at most this
        return -(-blocks * configured // total)
    return None


def batched_tokens(timeline: Timeline) -> int:
    """Return ``--max-num-batched-tokens``; the steps' budget if the header does not record it."""
    return timeline.header.scheduler_config.get("max_num_batched_tokens") or timeline.token_budget


class Decodes(NamedTuple):
    """Tokens that a step needs for a decode of each request that the seats hold."""

    each: int
    """Tokens of a decode: one, and the drafts that it verifies."""
    seats: int
    """Number of seats, but at most the largest number of requests that were present at once."""
    batched_tokens: int
    """Smallest ``--max-num-batched-tokens`` with room for these decodes and for the slots reserved for
    drafts."""

    @property
    def total_tokens(self) -> int:
        """Tokens of all these decodes."""
        return self.seats * self.each


def decodes_of_all(timeline: Timeline) -> Decodes:
    """Return the tokens that decodes in all seats need.

    Each decode has the configured number of drafts or, if that is not recorded, the largest number in the
    trace.
    """
    drafts = timeline.header.settings.get("speculative_config.num_speculative_tokens")
    if not isinstance(drafts, int):
        drafts = int(timeline.stretches.select(pl.col("draft_tokens").max()).collect().item() or 0)
    seats = min(timeline.seats, timeline.demand.requests or 1)
    slots = max(0, batched_tokens(timeline) - timeline.token_budget)
    return Decodes(1 + drafts, seats, seats * (1 + drafts) + slots)


def smallest_batched_tokens(timeline: Timeline) -> int | None:
    """Return the smallest ``--max-num-batched-tokens`` that vLLM accepts; None if unknown.

    vLLM refuses a value below ``max_num_seqs`` and, without chunked prefill, below ``max_model_len``.
    """
    header = timeline.header
    seats = header.scheduler_config.get("max_num_seqs") or header.max_num_running_reqs
    is_chunked = header.scheduler_config.get("enable_chunked_prefill")
    length = 1 if is_chunked else None if is_chunked is None else header.max_model_len
    return None if seats is None or length is None else max(seats, length)


def can_lower_batched_tokens(timeline: Timeline) -> bool | None:
    """Return whether vLLM accepts a smaller ``--max-num-batched-tokens``; False if a request waited for more.

    None: what vLLM accepts is not known.
    """
    smallest = smallest_batched_tokens(timeline)
    spent = (pl.col("remaining_budget") == 0) & (pl.col("num_waiting_after") > 0)
    if not timeline.steps.filter(spent).is_empty():
        return False
    return None if smallest is None else smallest < batched_tokens(timeline)


def seats_setting(timeline: Timeline) -> Setting:
    """Return the setting that limits how many requests run at once."""
    return Setting(f"--{timeline.seats_name.replace('_', '-')}")


def most_seats(timeline: Timeline) -> int:
    """Return the largest value that vLLM accepts for ``seats_setting``."""
    most = batched_tokens(timeline)
    return timeline.header.max_num_running_reqs or most if timeline.active_limit else most


def threshold(timeline: Timeline) -> int:
    """Return ``long_prefill_token_threshold``; 0 if it is not set."""
    return int(timeline.header.scheduler_config.get("long_prefill_token_threshold") or 0)


def replay_advice(setting: Setting) -> Advice:
    """Return advice on a setting that moves waits between requests; only a replay shows a good value."""
    return advise(
        "{option}, if a replay of this load shows a value that helps: {command:code}",
        option=setting,
        command="schedtrace analyze --predict",
    )


def async_scheduling() -> Advice:
    """Return the advice to hide the host's work behind the device's by asynchronous scheduling."""
    return advise(
        "{option} (now off): vLLM then schedules the next step while the device computes",
        setting="async_scheduling",
        value=True,
    )


def more_adapters(timeline: Timeline, name: str = "max_loras") -> Advice | None:
    """Return the advice to make room for every adapter; None if there is room, or if that is unknown.

    Args:
        timeline: Timeline of the engine.
        name: ``max_loras`` for room on the device, ``max_cpu_loras`` for room in the host's memory.
    """
    now = timeline.header.settings.get(f"lora_config.{name}")
    adapters = timeline.known_requests["lora"].drop_nulls().n_unique()
    if not isinstance(now, int) or adapters <= now:
        return None
    return advise(
        "{option} {value:n} (now {now:n})",
        setting=name,
        value=adapters,
        now=now,
        costs=f"{ADAPTER_MEMORY[name]} memory for every further adapter.",
    )


def current_value_note(timeline: Timeline, name: str) -> Message:
    """Return `` (now 256)``, or nothing if the header does not record this setting."""
    value = timeline.header.scheduler_config.get(name)
    return NOTHING if value is None else say(" (now {value:n})", value=value)


def seats_cost(timeline: Timeline) -> Message:
    """Return the time that each additional request adds to a step, if steps of several sizes show it."""
    unknown = say("Longer steps: a longer time per output token.")
    model = timeline.step_time
    decoding = timeline.steps.filter((pl.col("decode_tokens") > 0) & (pl.col("prefill_tokens") == 0))
    if model is None or decoding.is_empty():
        return unknown
    fewest, most, context, step_us = decoding.select(
        pl.col("total_requests").min().alias("fewest"),
        pl.col("total_requests").max().alias("most"),
        (pl.col("context_tokens").sum() / pl.col("total_requests").sum()).alias("context"),
        pl.col("busy_us").median().alias("step"),
    ).row(0)
    each_us = model.per_decode_token_us + model.per_context_token_us * (context or 0.0)
    if step_us is None or each_us * (most - fewest) <= max(model.error_frac, LEAST_COST) * step_us:
        return unknown  # the steps' noise hides it
    return say(
        "Longer steps: each additional request adds about {each:us} to the time per output token (measured "
        "in steps of {fewest:n} to {most:n request}).",
        fewest=fewest,
        most=most,
        each=each_us,
    )
