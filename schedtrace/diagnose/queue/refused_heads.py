"""Steps whose waiting loop ended at a request that was too large, and what the others behind it need."""

from dataclasses import dataclass

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.timeline.timeline import Timeline
from schedtrace.timeline.waits import mismatches, waits

OF_ITS_OWN_SIZE = (
    Cause.KV_BLOCKS,
    Cause.CHUNKED_PREFILL_OFF,
    Cause.ENCODER_BUDGET,
    Cause.MAMBA_ALIGNMENT,
    Cause.PREFILL_LOOKAHEAD,
    Cause.SPEC_DECODE_PADDING,
)
"""Causes that refuse this request and say nothing about a smaller one."""


@dataclass(frozen=True)
class Need:
    """What a waiting request takes to be admitted, at most: hits in the prefix cache are unknown."""

    block_size: int
    groups: int
    """KV cache groups: each takes blocks of its own for the same tokens."""
    drafts: bool
    """Each request takes room for drafts, too: at most one more block."""
    chunked: bool
    most_at_once: int
    """``long_prefill_token_threshold``; 0: none."""
    whole: bool
    """``scheduler_reserve_full_isl``: there must be room for all of it, not only for its first chunk."""
    kept_free: int
    """Blocks of ``--watermark``."""

    def tokens(self, wanted: int, budget: int) -> int:
        """Tokens of its first chunk; 0 if none fits."""
        chunk = min(wanted, self.most_at_once or wanted)
        if self.chunked:
            return min(chunk, budget)
        return chunk if chunk <= budget else 0

    def blocks(self, tokens: int) -> int:
        """KV blocks for so many tokens."""
        return (-(-tokens // self.block_size) + self.drafts) * self.groups


def refused_heads(timeline: Timeline) -> pl.DataFrame:
    """Steps that were left at a refused request's own size: one row each.

    Steps are left out where the queue that ``waits`` reconstructs has another length than the recorded one.

    Columns: ``step``, ``trial``, ``head`` (its id), ``order`` (its place in ``waits``), ``head_tokens``,
    ``fresh`` (it was not preempted before), ``cause``, ``detail``, ``location``, ``via``, ``blocks_needed``,
    ``num_not_ready_after`` and ``budget_left``, ``kv_blocks_free`` and ``seats_left`` after the step.
    """
    queue = waits(timeline)
    left_over = timeline.steps.select(
        "step",
        "num_not_ready_after",
        pl.col("remaining_budget").alias("budget_left"),
        pl.col("kv_blocks_free_after").alias("kv_blocks_free"),
        seats_left=timeline.seats - pl.col("num_running_after"),
    )
    refused = (
        timeline.exits.filter(
            (pl.col("loop") == "waiting")
            & (pl.col("kind") == "break")
            & pl.col("cause").is_in(OF_ITS_OWN_SIZE)
            & pl.col("refusal")
        )
        .drop("budget_left")
        .unique("step", keep="last", maintain_order=True)
        .join(left_over, on="step", maintain_order="left")
        .join(mismatches(timeline, queue), on="step", how="anti", maintain_order="left")
        .filter(pl.col("kv_blocks_free").is_not_null())
    )
    places = queue.select(
        "request_id",
        "since_step",
        "left_step",
        "order",
        pl.col("wanted_tokens").alias("head_tokens"),
        fresh=~pl.col("preempted"),
    )
    return (
        refused.join(places, on="request_id", maintain_order="left")
        .filter((pl.col("since_step") <= pl.col("step")) & (pl.col("step") < pl.col("left_step")))
        .rename({"request_id": "head"})
        .select(
            "step",
            "trial",
            "head",
            "order",
            "head_tokens",
            "fresh",
            "cause",
            "detail",
            "location",
            "via",
            "blocks_needed",
            "num_not_ready_after",
            "budget_left",
            "kv_blocks_free",
            "seats_left",
        )
    )


def need_of(timeline: Timeline, heads: pl.DataFrame) -> Need:
    """What this engine asks of a request; ``heads`` tell how many KV cache groups a token takes blocks in."""
    config, header = timeline.header.scheduler_config, timeline.header
    block_size = header.block_size or 1
    kept_free = int(float(config.get("watermark") or 0) * (header.kv_blocks_total or 0))
    drafts = int(timeline.steps["draft_tokens"].sum()) > 0
    told = heads.filter(pl.col("fresh") & pl.col("blocks_needed").is_not_null())
    own = (pl.col("head_tokens") + block_size - 1) // block_size + int(drafts)
    groups = told.select((pl.col("blocks_needed") / own).ceil().max()).item()
    return Need(
        block_size=block_size,
        groups=max(1, int(groups or 1)),
        drafts=drafts,
        chunked=bool(config.get("enable_chunked_prefill", True)),
        most_at_once=int(config.get("long_prefill_token_threshold") or 0),
        whole=bool(config.get("scheduler_reserve_full_isl")),
        kept_free=kept_free,
    )
