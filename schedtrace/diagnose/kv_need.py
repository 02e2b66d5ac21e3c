"""How many KV blocks the running requests held, the next one needed, and all of them would have needed."""

from dataclasses import dataclass
from typing import Any

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.timeline.timeline import Timeline


@dataclass(frozen=True)
class Need:
    """KV blocks at one refusal: all of one step, so that they add up. None: not recorded."""

    held_step: int | None
    """That step: of the refusal that lasted longest, where holders are recorded; else one that holds as many
    blocks as the median of the refused ones."""
    running: int | None
    blocks_held: int | None
    blocks_free: int | None
    blocks_needed: int | None
    blocks_total: int | None
    blocks_for_all: int | None
    """For the most requests that were there at once, as far as seats allow; None: the cache has these."""
    largest_holder: str | None
    largest_holder_blocks: int | None

    def holdings(self) -> dict[str, Any]:
        """The fields by name."""
        return vars(self)


def kv_need(timeline: Timeline, request_id: str | None = None) -> Need:
    """From the refusals in the waiting loop; where there are none, from all steps.

    Args:
        timeline: The engine's.
        request_id: Only of this request, as far as it is recorded whose they are; None: of all.
    """
    refused = timeline.exits.filter(
        (pl.col("loop") == "waiting") & (pl.col("cause") == Cause.KV_BLOCKS) & pl.col("refusal")
    )
    if request_id is not None:
        refused = refused.filter((pl.col("request_id") == request_id).fill_null(value=True))
    of_step = timeline.steps.select("step", "kv_blocks_total", "kv_blocks_free_after", "num_running_after")
    seen = refused.select("step", "blocks_needed", "blocks_free").join(of_step, on="step", how="inner")
    if seen.is_empty():
        seen = of_step.with_columns(blocks_needed=pl.lit(None, pl.Int64), blocks_free=pl.lit(None, pl.Int64))
    free = pl.coalesce("blocks_free", "kv_blocks_free_after")
    seen = seen.with_columns(free=free, held=pl.col("kv_blocks_total") - 1 - free)  # 1: the null block
    held_each = seen.select((pl.col("held") / pl.col("num_running_after")).median()).item()
    step, holder, blocks = _longest_refusal(timeline, seen["step"])
    at = seen if step is None else seen.filter(pl.col("step") == step)
    at = at.drop_nulls("held").sort("held", "blocks_needed", "step")
    one = at.row((at.height - 1) // 2, named=True) if at.height else {}
    return Need(
        held_step=one.get("step"),
        running=one.get("num_running_after"),
        blocks_held=one.get("held"),
        blocks_free=one.get("free"),
        blocks_needed=one.get("blocks_needed"),
        blocks_total=timeline.header.kv_blocks_total,
        blocks_for_all=_for_all(timeline, held_each),
        largest_holder=holder,
        largest_holder_blocks=blocks,
    )


def _for_all(timeline: Timeline, held_each: float | None) -> int | None:
    """Blocks for all requests at once: each as long as it got, or as much as one was seen to hold on average.

    Blocks by tokens are right where there is one cache group of full attention; state blocks of hybrid models
    do not follow from tokens, so there what was held counts.
    """
    size, groups = timeline.header.block_size, timeline.header.cache_groups
    ended = timeline.finishes.filter(pl.col("output_tokens") > 0)
    there = pl.col("num_running_after") + pl.col("num_waiting_after").fill_null(0)
    peak = int(timeline.steps.select(there.max()).item() or 0)
    peak = min(peak, timeline.seats) if timeline.seats else peak
    each = held_each
    if len(groups) <= 1 and size is not None and not ended.is_empty():
        tokens = pl.col("prompt_tokens") + pl.col("output_tokens")
        each = float(ended.select((-(-tokens // size)).mean()).item())
    if each is None:
        return None
    wanted = round(peak * each) + 1  # vLLM keeps one block for itself
    return wanted if wanted > (timeline.header.kv_blocks_total or 0) else None


def _longest_refusal(timeline: Timeline, steps: pl.Series) -> tuple[int | None, str | None, int | None]:
    """Of the refusal that lasted longest, of these steps: the step, who held the most blocks, how many."""
    if "refusals" not in timeline.lists:
        return None, None, None
    rows = timeline.lists["refusals"].select("step", "holders", "held").collect()
    lasted = pl.col("step").shift(-1).fill_null(timeline.steps["step"].max()) - pl.col("step")
    known = rows.with_columns(lasted=lasted).filter(
        (pl.col("holders").list.len() > 0) & pl.col("step").is_in(steps.implode())
    )
    if known.is_empty():
        return None, None, None
    longest = known.sort("lasted", "step", descending=[True, False]).row(0, named=True)
    return longest["step"], longest["holders"][0], sum(group[0] for group in longest["held"] if group)
