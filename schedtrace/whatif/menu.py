"""The changes of one setting that are worth a trial on a recorded load, in both directions.

What vLLM refuses in this configuration is left to vLLM: a replay of it ends before it begins.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from schedtrace.diagnose.rules.allowed_settings import why_no_async_scheduling
from schedtrace.diagnose.uneven_ranks import prefill_interval
from schedtrace.model.causes import Cause
from schedtrace.timeline.timeline import Timeline
from schedtrace.whatif.prediction import Recorded
from schedtrace.whatif.replays import BLOCKS

Change = tuple[str, Any]
"""An argument of vLLM and its value."""
FAMILIES = {
    "max_num_active_seqs": "max_num_seqs",
    "kv_cache_memory_bytes": BLOCKS,
    "gpu_memory_utilization": BLOCKS,
    "kv_cache_dtype": BLOCKS,
}
"""Settings by the one that acts on the same resource."""
FEWEST_TOKENS = 16
"""Of a budget or a threshold: with less a step computes next to nothing."""


def family(setting: str) -> str:
    """What a setting acts on: the name of one of the settings that do."""
    return FAMILIES.get(setting, setting)


def menu(base: Recorded, now: Mapping[str, Any]) -> list[Change]:
    """Single changes, each of which could alter a step of this load.

    Args:
        base: The recorded load.
        now: Options of the recorded engine, as ``engine_options`` gives them.
    """
    found: dict[Change, None] = {}
    if not now.get("enable_prefix_caching") and _begin_alike(base):
        found["enable_prefix_caching", True] = None
    for part in (_seats, _budget, _blocks, _thresholds, _switches, _cadence):
        for name, value in part(base.timelines, now):
            if now.get("num_blocks" if name == BLOCKS else name) != value:
                found[name, value] = None
    return list(found)


def _begin_alike(base: Recorded) -> bool:
    """Whether two prompts have their first block in common."""
    firsts = [request.prefix[0] for load in base.loads for request in load if request.prefix]
    return len(set(firsts)) < len(firsts)


def _seats(timelines: list[Timeline], now: Mapping[str, Any]) -> Iterator[Change]:
    """Fewer as well as more; no more than were there at once."""
    seats, most = now["max_num_seqs"], _peak(timelines, pl.col("num_running_after") + _WAITING)
    taken = _peak(timelines, pl.col("num_running_after"))
    fewer = {taken // 2, taken // 4, 3 * taken // 4}
    more = {min(one, most) for one in (2 * seats, 4 * seats, most)} if most > seats else set()
    yield from (("max_num_seqs", one) for one in sorted(fewer | more) if one)


def _budget(timelines: list[Timeline], now: Mapping[str, Any]) -> Iterator[Change]:
    """Fewer as well as more tokens; no more than ever were wanted in a step."""
    budget = now["max_num_batched_tokens"]
    wanted = _peak(timelines, pl.col("used_tokens") + pl.col("waiting_tokens_after").fill_null(0))
    used = _peak(timelines, pl.col("used_tokens"))
    least = max(now["max_num_seqs"], FEWEST_TOKENS)
    if not now.get("enable_chunked_prefill", True):
        least = max(least, now["max_model_len"])
    fewer = {max(used // part, least) for part in (2, 4, 8)}
    more = {budget * times for times in (2, 4, 8) if budget * times < 2 * wanted}
    yield from (("max_num_batched_tokens", one) for one in sorted(fewer | more) if one != budget)


def _blocks(timelines: list[Timeline], now: Mapping[str, Any]) -> Iterator[Change]:
    """More KV cache where somebody was refused blocks, or ever a tenth of it or less was free."""
    blocks = now["num_blocks"]
    free = min(
        (
            timeline.steps.select((pl.col("kv_blocks_free_after") / pl.col("kv_blocks_total")).min()).item()
            or 0.0
        )
        for timeline in timelines
    )
    refused = any((timeline.exits["cause"] == Cause.KV_BLOCKS).any() for timeline in timelines)
    if blocks and (refused or free <= 0.1):  # noqa: PLR2004  # see above
        yield from ((BLOCKS, int(blocks * times)) for times in (1.5, 2, 3))


def _thresholds(timelines: list[Timeline], now: Mapping[str, Any]) -> Iterator[Change]:
    """Parts of the budget below the longest prompt, and none."""
    name = "long_prefill_token_threshold"
    if not now.get("enable_chunked_prefill", True):
        return
    longest = max(int(timeline.arrivals["prompt_tokens"].max() or 0) for timeline in timelines)  # type: ignore[arg-type]  # integers
    budget = now["max_num_batched_tokens"]
    for part in (2, 4, 8):
        if FEWEST_TOKENS <= budget // part < longest:
            yield name, budget // part
    if now.get(name):
        yield name, 0


def _switches(timelines: list[Timeline], now: Mapping[str, Any]) -> Iterator[Change]:
    """Settings that are on or off."""
    header = timelines[0].header
    preempted = any(timeline.preemptions.height for timeline in timelines)
    priorities = {one for timeline in timelines for one in timeline.arrivals["priority"].unique().to_list()}
    if not now.get("async_scheduling") and not why_no_async_scheduling(timelines[0]):
        yield "async_scheduling", True
    if not now.get("enable_chunked_prefill", True):
        yield "enable_chunked_prefill", True
    if now.get("scheduling_policy") == "priority":
        yield "scheduling_policy", "fcfs"
    elif len(priorities) > 1:
        yield "scheduling_policy", "priority"
    if preempted and "watermark" in header.scheduler_config and not now.get("watermark"):
        yield "watermark", 0.05
    if preempted and "scheduler_reserve_full_isl" in header.scheduler_config:
        yield "scheduler_reserve_full_isl", not now.get("scheduler_reserve_full_isl")


def _cadence(timelines: list[Timeline], now: Mapping[str, Any]) -> Iterator[Change]:
    """Prefills of data-parallel ranks in the same steps; vLLM 0.24 and newer."""
    if len(timelines) > 1 and now.get("lockstep") and prefill_interval(timelines[0].header) is not None:
        yield from (("prefill_schedule_interval", every) for every in (1, 4, 16))


_WAITING = pl.col("num_waiting_after").fill_null(0)


def _peak(timelines: list[Timeline], value: pl.Expr) -> int:
    """The largest value of any step, at least 1."""
    peaks = [timeline.steps.select(value.cast(pl.Int64).max()).item() or 1 for timeline in timelines]
    return max(1, *peaks)
