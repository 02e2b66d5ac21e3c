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
    set_aside: int
    """Requests that hold blocks and do not run."""

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
    of_step = _with_set_aside(
        timeline,
        timeline.steps.select("step", "kv_blocks_total", "kv_blocks_free_after", "num_running_after"),
    )
    seen = refused.select("step", "blocks_needed", "blocks_free").join(of_step, on="step", how="inner")
    if seen.is_empty():
        seen = of_step.with_columns(blocks_needed=pl.lit(None, pl.Int64), blocks_free=pl.lit(None, pl.Int64))
    free = pl.coalesce("blocks_free", "kv_blocks_free_after")
    seen = seen.with_columns(free=free, held=pl.col("kv_blocks_total") - 1 - free)  # 1: the null block
    holders = pl.col("num_running_after") + pl.col("set_aside")
    held_each = (
        seen.filter(pl.col("num_running_after") > 0).select((pl.col("held") / holders).median()).item()
    )
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
        set_aside=one.get("set_aside", 0),
    )


def _with_set_aside(timeline: Timeline, steps: pl.DataFrame) -> pl.DataFrame:
    """Steps with how many requests were ``set_aside`` after each."""
    aside = timeline.waits.filter(pl.col("set_aside"))
    changes = (
        pl.concat([aside.select(step="since_step", change=1), aside.select(step="left_step", change=-1)])
        .group_by("step")
        .agg(pl.col("change").sum())
        .sort("step")
        .select("step", set_aside=pl.col("change").cum_sum())
    )
    of_steps = steps.with_columns(pl.col("step").cast(pl.Int64)).sort("step")
    return of_steps.join_asof(changes, on="step").with_columns(pl.col("set_aside").fill_null(0))


def _for_all(timeline: Timeline, held_each: float | None) -> int | None:
    """Blocks for all requests at once: each as long as it got, or as much as one was seen to hold on average.

    Blocks by tokens are right where there is one cache group of full attention; state blocks of hybrid models
    do not follow from tokens, so there what was held counts.
    """
    peak = timeline.demand.requests
    peak = min(peak, timeline.seats) if timeline.seats else peak
    each = held_each
    if len(timeline.header.cache_groups) <= 1:
        each = timeline.demand.blocks_each or held_each
    if each is None:
        return None
    wanted = round(peak * each) + 1  # vLLM keeps one block for itself
    return wanted if wanted > (timeline.header.kv_blocks_total or 0) else None


def _longest_refusal(timeline: Timeline, steps: pl.Series) -> tuple[int | None, str | None, int | None]:
    """Of the refusal that lasted longest, of these steps: the step, who held the most blocks, how many."""
    if "refusals" not in timeline.lists:
        return None, None, None
    rows = timeline.lists["refusals"].select("step", "holders", "held").collect()
    last = pl.lit(timeline.steps["step"].max())
    lasted = pl.col("step").shift(-1).fill_null(last) - pl.col("step")
    known = rows.with_columns(lasted=lasted).filter(
        (pl.col("holders").list.len() > 0) & pl.col("step").is_in(steps.implode())
    )
    if known.is_empty():
        return None, None, None
    longest = known.sort("lasted", "step", descending=[True, False]).row(0, named=True)
    return longest["step"], longest["holders"][0], sum(group[0] for group in longest["held"] if group)
