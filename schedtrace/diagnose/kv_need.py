"""How many KV blocks the running requests held, the next one needed, and all of them would have needed."""

from dataclasses import dataclass
from typing import Any

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.timeline.timeline import Timeline


@dataclass(frozen=True)
class Need:
    """Medians over the steps that refused a request for KV blocks; None: not recorded."""

    running: float | None
    blocks_held: float | None
    blocks_free: float | None
    blocks_needed: float | None
    blocks_total: int | None
    blocks_for_all: int | None
    """For the most requests that were there at once, as far as seats allow; None: the cache has these."""
    largest_holder: str | None
    largest_holder_blocks: int | None
    set_aside: float
    """Requests that hold blocks and do not run."""

    def holdings(self) -> dict[str, Any]:
        """The fields by name."""
        return vars(self)


def kv_need(timeline: Timeline) -> Need:
    """From the refusals in the waiting loop; where there are none, from all steps."""
    refused = timeline.exits.filter(
        (pl.col("loop") == "waiting") & (pl.col("cause") == Cause.KV_BLOCKS) & pl.col("refusal")
    )
    steps = timeline.steps
    if refused.height:
        steps = steps.join(refused.select("step").unique(), on="step", how="semi")
    total, free = pl.col("kv_blocks_total"), pl.col("kv_blocks_free_after")
    middle = steps.select(
        running=pl.col("num_running_after").median(),
        blocks_held=(total - free).median(),
        blocks_free=free.median(),
    ).row(0, named=True)
    holder, blocks = _largest_holder(timeline)
    held, ran = middle["blocks_held"], middle["running"]
    holders = (ran or 0) + _set_aside(timeline, steps)
    held_each = held / holders if held is not None and ran else None
    return Need(
        **middle,
        blocks_needed=refused["blocks_needed"].median(),  # type: ignore[arg-type]  # a column of integers
        blocks_total=timeline.header.kv_blocks_total,
        blocks_for_all=_for_all(timeline, held_each),
        largest_holder=holder,
        largest_holder_blocks=blocks,
        set_aside=_set_aside(timeline, steps),
    )


def _set_aside(timeline: Timeline, steps: pl.DataFrame) -> float:
    """How many were set aside after these steps, in the median."""
    aside = timeline.waits.filter(pl.col("set_aside"))
    changes = (
        pl.concat(
            [aside.select(step="since_step", change=1), aside.select(step="left_step", change=-1)],
        )
        .group_by("step")
        .agg(pl.col("change").sum())
        .sort("step")
        .with_columns(pl.col("change").cum_sum())
    )
    counts = steps.select(pl.col("step").cast(pl.Int64)).sort("step").join_asof(changes, on="step")
    return float(counts["change"].fill_null(0).median() or 0)  # type: ignore[arg-type]  # integers


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


def _largest_holder(timeline: Timeline) -> tuple[str | None, int | None]:
    """Who held the most blocks during the refusal that lasted longest."""
    if "refusals" not in timeline.lists:
        return None, None
    rows = timeline.lists["refusals"].select("step", "holders", "held").collect()
    lasted = pl.col("step").shift(-1).fill_null(timeline.steps["step"].max()) - pl.col("step")
    known = rows.with_columns(lasted=lasted).filter(pl.col("holders").list.len() > 0)
    if known.is_empty():
        return None, None
    longest = known.sort("lasted", "step", descending=[True, False]).row(0, named=True)
    return longest["holders"][0], sum(group[0] for group in longest["held"] if group)
