"""Parts of advice on settings: what vLLM accepts in the recorded configuration, with present values."""

import polars as pl

from schedtrace.model.message import NOTHING, Message, Number, Setting, message
from schedtrace.timeline.timeline import Timeline


def more_kv_space(timeline: Timeline) -> Message:
    """The settings that make this engine's KV cache larger; an override of its blocks rules alone."""
    settings = timeline.header.settings
    if settings.get("cache_config.num_gpu_blocks_override"):
        return message("{override}", override=Setting("--num-gpu-blocks-override"))
    memory = Setting("--kv-cache-memory-bytes")
    if timeline.header.device == "cpu":
        return message(
            "{memory} or the variable {space}", memory=memory, space=Setting("VLLM_CPU_KVCACHE_SPACE")
        )
    return message("{memory} or {share}", memory=memory, share=Setting("--gpu-memory-utilization"))


BATCHED_TOKENS = Setting("--max-num-batched-tokens")


def batched_tokens(timeline: Timeline) -> int:
    """``--max-num-batched-tokens``; the steps' budget where the header does not record it."""
    return timeline.header.scheduler_config.get("max_num_batched_tokens") or timeline.token_budget


def smallest_batched_tokens(timeline: Timeline) -> int | None:
    """The smallest ``--max-num-batched-tokens`` that vLLM accepts; None where that is not known.

    vLLM refuses one below ``max_num_seqs`` and, without chunked prefill, one below ``max_model_len``.
    """
    header = timeline.header
    seats = header.scheduler_config.get("max_num_seqs") or header.max_num_running_reqs
    length = 1 if header.scheduler_config.get("enable_chunked_prefill") else header.max_model_len
    return None if seats is None or length is None else max(seats, length)


def can_lower_batched_tokens(timeline: Timeline) -> bool:
    """Whether vLLM accepts a smaller ``--max-num-batched-tokens``, and no request waited for a larger one."""
    smallest = smallest_batched_tokens(timeline)
    spent = (pl.col("remaining_budget") == 0) & (pl.col("num_waiting_after") > 0)
    wanted = not timeline.steps.filter(spent).is_empty()
    return not wanted and smallest is not None and smallest < batched_tokens(timeline)


def seats_setting(timeline: Timeline) -> Setting:
    """The setting that limits how many requests run at once."""
    return Setting("--max-num-active-seqs" if timeline.active_limit else "--max-num-seqs")


def threshold(timeline: Timeline) -> int:
    """``long_prefill_token_threshold``; 0: not set."""
    return int(timeline.header.scheduler_config.get("long_prefill_token_threshold") or 0)


def watermark(timeline: Timeline) -> Message:
    """``keep a reserve with a larger --watermark (now 0)``; nothing for a vLLM without this setting."""
    config = timeline.header.scheduler_config
    if "watermark" not in config:
        return NOTHING
    return message(
        "keep a reserve with a larger {watermark} (now {now})",
        watermark=Setting("--watermark"),
        now=Number(config["watermark"] or 0),
    )


def now(timeline: Timeline, name: str) -> Message:
    """`` (now 256)``; nothing where the header does not record this setting."""
    value = timeline.header.scheduler_config.get(name)
    return NOTHING if value is None else message(" (now {value})", value=Number(value))
