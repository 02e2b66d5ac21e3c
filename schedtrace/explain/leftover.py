"""Who of the queue would fit into what a step left over."""

from dataclasses import dataclass
from typing import cast

import polars as pl

from schedtrace.model.message import Count, Message, Requests
from schedtrace.model.say import say
from schedtrace.model.story import Waiter
from schedtrace.timeline.admission import Need, blocks_needed, need_of, refused_heads
from schedtrace.timeline.timeline import Timeline

MOST_BLOCKS_FRAC = 1.05
"""Blocks in use over those that the running requests' tokens need; above it, something else holds blocks."""


@dataclass(frozen=True)
class Left:
    """What a step left over."""

    budget: int
    blocks: int
    seats: int


@dataclass(frozen=True)
class Admission:
    """The requests that fit; false if none does."""

    request_ids: list[str]
    tokens: int
    blocks: int
    limit: Message
    """Why the next one would not have fitted."""
    cut: bool
    """The last one would have got only a part of its prompt."""

    def __bool__(self) -> bool:
        return bool(self.request_ids)

    def described(self, noun: str) -> Message:
        """``2 more requests (a and b, 1,536 tokens)``."""
        count = len(self.request_ids)
        return say(
            "{count} ({requests}, {tokens:n token}{part})",
            count=Count(count, noun),
            requests=Requests(self.request_ids, count),
            tokens=self.tokens,
            part=", the last one in part" if self.cut else "",
        )


def admit(need: Need, waiting: list[Waiter], left: Left, *, seats_name: str) -> Admission:
    """Take the waiting requests in their order until one does not fit, as the waiting loop does.

    With ``need.whole`` a request has to fit whole, but takes only the blocks of its first chunk.
    """
    budget, blocks = left.budget, left.blocks
    taken: list[str] = []
    cut = False
    limit = say("no request would have been left waiting")
    for request in waiting:
        tokens = need.tokens(request.wanted_tokens, budget)
        wanted = need.blocks(request.wanted_tokens if need.whole else tokens)
        if budget <= 0:
            limit = say("then the budget would have been spent")
        elif len(taken) == left.seats:
            limit = say("then as many would run as {seats:setting} allows", seats=seats_name)
        elif not tokens:
            limit = say(
                "{request:id} ({tokens:n token}) would not have fitted into the rest of it",
                request=request.request_id,
                tokens=request.wanted_tokens,
            )
        elif wanted > blocks:
            limit = say(
                "{request:id} would have needed {wanted:n KV block} with {free:n} free",
                request=request.request_id,
                wanted=wanted,
                free=max(0, blocks),
            )
        else:
            budget, blocks = budget - tokens, blocks - need.blocks(tokens)
            cut = tokens < request.wanted_tokens
            taken.append(request.request_id)
            continue
        break
    return Admission(taken, left.budget - budget, left.blocks - blocks, limit, cut)


def known_need(timeline: Timeline) -> Need | None:
    """The room that a request needs; None where the blocks in use are not those of the tokens."""
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
