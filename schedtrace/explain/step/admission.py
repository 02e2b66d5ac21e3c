"""Who of the queue would fit into what a step left over."""

from dataclasses import dataclass
from typing import cast

import polars as pl

from schedtrace.diagnose.queue.refused_heads import Need, need_of, refused_heads
from schedtrace.diagnose.rules.common import counted
from schedtrace.explain.step.why import names
from schedtrace.model.story import Waiter
from schedtrace.timeline.per_step import blocks_needed
from schedtrace.timeline.timeline import Timeline

MOST_BLOCKS_FRAC = 1.05
"""Blocks in use over those that the running requests' tokens need; above it the cache is not understood."""


@dataclass(frozen=True)
class Left:
    """What a step left over."""

    budget: int
    blocks: int
    seats: int


@dataclass(frozen=True)
class Admission:
    """Those who fit; false if nobody does."""

    request_ids: list[str]
    tokens: int
    blocks: int
    ended: str
    """Why nobody more."""
    cut: bool
    """The last one would have got only a part of its prompt."""

    def __bool__(self) -> bool:
        return bool(self.request_ids)

    def in_words(self, noun: str) -> str:
        """``2 more requests (a and b, 1,536 tokens)``."""
        count = len(self.request_ids)
        part = ", the last one in part" if self.cut else ""
        tokens = counted(self.tokens, "token")
        return f"{counted(count, noun)} ({names(self.request_ids, count)}, {tokens}{part})"


def admit(need: Need, waiting: list[Waiter], left: Left) -> Admission:
    """Take the waiting requests in their order until one does not fit, as the waiting loop does.

    With ``need.whole`` a request has to fit whole, but takes only the blocks of its first chunk.
    """
    budget, blocks = left.budget, left.blocks
    taken: list[str] = []
    cut = False
    ended = "nobody would have waited any more"
    for one in waiting:
        tokens = need.tokens(one.wanted_tokens, budget)
        wanted = need.blocks(one.wanted_tokens if need.whole else tokens)
        if budget <= 0:
            ended = "then the budget would have been spent"
        elif len(taken) == left.seats:
            ended = "then as many would run as max_num_seqs allows"
        elif not tokens:
            ended = (
                f"{one.request_id} ({one.wanted_tokens:,} tokens) would not have fitted into the rest of it"
            )
        elif wanted > blocks:
            free = max(0, blocks)
            ended = f"{one.request_id} would have needed {counted(wanted, 'KV block')} with {free:,} free"
        else:
            budget, blocks = budget - tokens, blocks - need.blocks(tokens)
            cut = tokens < one.wanted_tokens
            taken.append(one.request_id)
            continue
        break
    return Admission(taken, left.budget - budget, left.blocks - blocks, ended, cut)


def known_need(timeline: Timeline) -> Need | None:
    """What a request takes; None where KV blocks in use and tokens do not go together."""
    if timeline.header.block_size is None:
        return None
    need = need_of(timeline, refused_heads(timeline))
    all_scheduled = timeline.steps.filter(pl.col("num_running_after") == pl.col("total_requests"))
    in_use = pl.col("kv_blocks_total") - 1 - pl.col("kv_blocks_free_after")
    used = (
        blocks_needed(timeline.stretches, timeline.steps, need.block_size)
        .with_columns(blocks=(pl.col("blocks") + int(need.drafts) * pl.col("requests")) * need.groups)
        .filter(pl.col("requests") > 0)
        .join(all_scheduled, on="step")
        .select(in_use / pl.col("blocks"))
        .to_series()
        .median()
    )
    return need if used is not None and cast("float", used) <= MOST_BLOCKS_FRAC else None
