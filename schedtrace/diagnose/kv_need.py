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
    held_each = held / ran if held is not None and ran else None
    return Need(
        **middle,
        blocks_needed=refused["blocks_needed"].median(),  # type: ignore[arg-type]  # a column of integers
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
    peak = timeline.demand.requests
    peak = min(peak, timeline.seats) if timeline.seats else peak
    each = held_each
    if len(timeline.header.cache_groups) <= 1:
        each = timeline.demand.blocks_each or held_each
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
