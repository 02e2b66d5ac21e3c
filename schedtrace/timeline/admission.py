"""Admission by size: steps that refused a request for its size, and the room that a request needs."""

from dataclasses import dataclass

import polars as pl

from schedtrace.model.causes import OF_ITS_OWN_SIZE
from schedtrace.timeline.queue_waits import mismatches
from schedtrace.timeline.timeline import Timeline


@dataclass(frozen=True)
class Need:
    """The room that a waiting request needs, at most: hits in the prefix cache are unknown."""

    block_size: int
    groups: int
    """KV cache groups: each takes blocks of its own for the same tokens."""
    drafts: bool
    """Each request takes room for drafts, at most one more block."""
    chunked: bool
    most_at_once: int
    """``long_prefill_token_threshold``; 0: none."""
    whole: bool
    """``scheduler_reserve_full_isl``: there must be room for all of it, not only for its first chunk."""
    kept_free: int
    """Blocks of ``--watermark``."""

    def tokens(self, wanted: int, budget: int) -> int:
        """Tokens of the first chunk; 0 if none fits."""
        chunk = min(wanted, self.most_at_once or wanted)
        if self.chunked:
            return min(chunk, budget)
        return chunk if chunk <= budget else 0

    def blocks(self, tokens: int) -> int:
        """KV blocks for so many tokens."""
        return (-(-tokens // self.block_size) + self.drafts) * self.groups


def refused_heads(timeline: Timeline) -> pl.DataFrame:
    """Steps whose waiting loop ended at a request that was too large: one row each.

    Without the steps for which ``waits`` reconstructs a queue of another length than the recorded one.

    Columns: ``step``, ``trial``, ``head`` (its id), ``order`` (its place in ``waits``), ``head_tokens``,
    ``fresh`` (it was not preempted before), ``cause``, ``detail``, ``location``, ``via``, ``blocks_needed``,
    ``num_not_ready_after`` and ``budget_left``, ``kv_blocks_free`` and ``seats_left`` after the step.
    """
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
        .join(mismatches(timeline), on="step", how="anti", maintain_order="left")
        .filter(pl.col("kv_blocks_free").is_not_null())
    )
    places = timeline.waits.select(
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
    """The room that a request needs on this engine.

    Args:
        timeline: The engine's trace.
        heads: ``refused_heads(timeline)``, whose recorded needs show how many KV cache groups there are.
    """
    config, header = timeline.header.scheduler_config, timeline.header
    block_size = header.block_size or 1
    kept_free = int(float(config.get("watermark") or 0) * (header.kv_blocks_total or 0))
    drafts = int(timeline.steps["draft_tokens"].sum()) > 0
    recorded = heads.filter(pl.col("fresh") & pl.col("blocks_needed").is_not_null())
    own = (pl.col("head_tokens") + block_size - 1) // block_size + int(drafts)
    groups = recorded.select((pl.col("blocks_needed") / own).ceil().max()).item()
    return Need(
        block_size=block_size,
        groups=max(1, int(groups or 1)),
        drafts=drafts,
        chunked=bool(config.get("enable_chunked_prefill", True)),
        most_at_once=int(config.get("long_prefill_token_threshold") or 0),
        whole=bool(config.get("scheduler_reserve_full_isl")),
        kept_free=kept_free,
    )
