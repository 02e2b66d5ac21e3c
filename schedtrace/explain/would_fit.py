"""Effect of a different limit in a step, if the trace records enough to compute it.

Only the limit that stopped this step is changed, and only this step is considered: waiting requests are
admitted in queue order until a request does not fit into the resources that the step left unused. If a
necessary value is not recorded, there is no answer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import polars as pl

from schedtrace.model.causes import Cap, Cause
from schedtrace.model.message import NOTHING, Count, Message, Requests, joined
from schedtrace.model.say import say
from schedtrace.model.story import Scheduled, Stop, Waiter, WhatIf
from schedtrace.timeline.queue_waits import AdmissionNeed, need_of
from schedtrace.timeline.timeline import Timeline

STEPS_LOOKED_AT = 64
MOST_BLOCKS_FRAC = 1.05
"""Ratio of used blocks to those that running requests need, above which other holders of blocks must exist.
"""


@dataclass(frozen=True)
class Left:
    """Resources that a step left unused."""

    budget: int
    blocks: int
    seats: int


@dataclass(frozen=True)
class FittingRequests:
    """Requests that fit; false if no request does."""

    request_ids: list[str]
    tokens: int
    blocks: int
    limit: Message
    """Reason why the next request would not have fitted."""
    cut: bool
    """Whether the last request that fits would have got only a part of its prompt."""

    def __bool__(self) -> bool:
        return bool(self.request_ids)

    def described_as(self, noun: str) -> Message:
        """Describe the requests: ``2 more requests (a and b, 1,536 tokens)``."""
        count = len(self.request_ids)
        return say(
            "{count} ({requests}, {tokens:n token}[, the last one in part{cut:?}])",
            self,
            count=Count(count, noun),
            requests=Requests(self.request_ids, count),
        )


def admit(need: AdmissionNeed, waiting: list[Waiter], left: Left, *, seats_name: str) -> FittingRequests:
    """Return the waiting requests that fit, in queue order up to the first that does not.

    As in vLLM, if ``need.whole`` is set, the whole request must fit, but it takes only the blocks of its
    first chunk.
    """
    budget, blocks = left.budget, left.blocks
    taken: list[str] = []
    cut = False
    limit = say("no request would have been left waiting")
    for request in waiting:
        tokens = need.first_chunk(request.wanted_tokens, budget)
        wanted = need.blocks_asked(request.wanted_tokens, tokens)
        if budget <= 0:
            limit = say("then the budget would have been spent")
        elif len(taken) == left.seats:
            limit = say("then as many would run as {seats:setting} allows", seats=seats_name)
        elif not tokens:
            limit = say(
                "{request_id:id} ({wanted_tokens:n token}) would not have fitted into the rest of it", request
            )
        elif wanted > blocks:
            limit = say(
                "{request_id:id} would have needed {wanted:n KV block} with {free:n} free",
                request,
                wanted=wanted,
                free=max(0, blocks),
            )
        else:
            budget, blocks = budget - tokens, blocks - need.blocks_held(tokens)
            cut = tokens < request.wanted_tokens
            taken.append(request.request_id)
            continue
        break
    return FittingRequests(taken, left.budget - budget, left.blocks - blocks, limit, cut)


def known_need(timeline: Timeline) -> AdmissionNeed | None:
    """Return what a request needs to be admitted; None if blocks cannot be derived from tokens."""
    need = need_of(timeline, timeline.refused_heads)
    if need is None:
        return None
    in_use = pl.col("kv_blocks_total") - 1 - pl.col("kv_blocks_free_after")
    all_scheduled = timeline.steps.select(
        "step", "num_running_after", "total_requests", in_use=in_use
    ).filter(pl.col("num_running_after") == pl.col("total_requests"), pl.col("in_use") != 0)
    steps = all_scheduled.gather_every(max(1, all_scheduled.height // STEPS_LOOKED_AT)).sort("step")
    numbers = pl.lit(steps["step"].cast(pl.Int64))
    first = numbers.search_sorted(pl.col("step").cast(pl.Int64), side="left").cast(pl.Int64)
    after = numbers.search_sorted(pl.col("last_step").cast(pl.Int64), side="right").cast(pl.Int64)
    rows = (
        timeline.stretches.filter(first < after)
        .with_columns(at=pl.int_ranges(first, after))
        .explode("at")
        .collect()
    )
    rows = rows.with_columns(in_use=steps["in_use"][rows["at"]], at=steps["step"][rows["at"]])
    before = pl.col("computed_tokens") + (pl.col("at") - pl.col("step")) * pl.col("scheduled_tokens")
    scheduled = rows.select("at", "in_use", computed=before, tokens=before + pl.col("scheduled_tokens"))
    counted: dict[int, int] = {}
    used: dict[int, int] = {}
    for step, blocks, computed, tokens in scheduled.iter_rows():
        used[step] = blocks
        counted[step] = counted.get(step, 0) + need.blocks_held(tokens, computed)
    shares = [used[step] / blocks for step, blocks in counted.items() if blocks]
    return need if shares and median(shares) <= MOST_BLOCKS_FRAC else None


@dataclass(frozen=True)
class Question:
    """Step with its unused budget and blocks, and the requests that wanted more."""

    timeline: Timeline
    need: AdmissionNeed
    left: Left
    token_budget: int
    waiting: list[Waiter]
    """Waiting requests in the order of the queue."""
    scheduled: list[Scheduled]
    stops: list[Stop]

    @property
    def loop_exit(self) -> Stop | None:
        """Exit that ended the waiting loop."""
        ends = [stop for stop in self.stops if stop.loop == "waiting" and stop.kind != "continue"]
        return ends[-1] if ends else None

    @property
    def budget_name(self) -> str:
        """Name of the setting that determines the token budget."""
        configured = self.timeline.header.scheduler_config.get("max_num_scheduled_tokens")
        return "max_num_scheduled_tokens" if configured else "max_num_batched_tokens"

    def cut_by(self, cap: str) -> list[Scheduled]:
        """Return the requests whose chunk was last made smaller by this limit."""
        return [request for request in self.scheduled if request.caps and request.caps[-1] == cap]

    def more_blocks(self, requests: list[Scheduled], tokens: int) -> int:
        """Return the KV blocks needed to give requests ``tokens`` more tokens, one request after another."""
        blocks = 0
        for request in requests:
            more = min(tokens, _lacking([request]))
            tokens -= more
            before = request.computed_tokens
            after = before + request.scheduled_tokens
            blocks += self.need.blocks_held(after + more, before) - self.need.blocks_held(after, before)
        return blocks


def what_if(
    timeline: Timeline,
    row: dict[str, Any],
    *,
    need: AdmissionNeed | None,
    waiting: list[Waiter],
    scheduled: list[Scheduled],
    stops: list[Stop],
) -> list[WhatIf]:
    """Return the answers for one step.

    Args:
        timeline: Timeline of the engine.
        row: Row of the step in ``timeline.steps``.
        need: Resources that a request needs (``known_need``); None if unknown.
        waiting: Requests that waited after the step, in order; empty if unknown.
        scheduled: Tokens that each scheduled request got.
        stops: Exits of the step.
    """
    free = row["kv_blocks_free_after"]
    if need is None or free is None:
        return []
    left = Left(row["remaining_budget"], free - need.kept_free, timeline.seats - row["num_running_after"])
    question = Question(timeline, need, left, row["token_budget"], waiting, scheduled, stops)
    answers = list(_longer_chunks(question))
    all_ready = not row["num_not_ready_after"] and not timeline.known_requests["lora"].drop_nulls().len()
    if question.loop_exit and waiting and all_ready and question.loop_exit.cause in _ANSWERS:
        answers += _ANSWERS[question.loop_exit.cause](question)
    return answers


def _answer(
    sentence: str, limit: str, now: int, then: int | None, request_ids: list[str], tokens: int, **values: Any
) -> WhatIf:
    """Return an answer whose sentence may refer to its fields and to ``values``."""
    answer = WhatIf(limit=limit, now=now, then=then, request_ids=request_ids, tokens=tokens, message=NOTHING)
    answer.message = say(sentence, answer, **values)
    return answer


def _more_seats(asked: Question) -> Iterator[WhatIf]:
    left = Left(asked.left.budget, asked.left.blocks, len(asked.waiting))
    more = admit(asked.need, asked.waiting, left, seats_name=asked.timeline.seats_name)
    now = asked.timeline.seats
    yield _answer(
        "[With {limit:setting} {then:n} instead of {now:n}, {more} would have fitted into the budget left "
        "and the free KV blocks; {next}.][A higher {limit:setting} alone would have admitted no request: "
        "{next}.{then:!}]",
        asked.timeline.seats_name,
        now,
        now + len(more.request_ids) if more else None,
        more.request_ids,
        more.tokens,
        more=more.described_as("more request"),
        next=more.limit,
    )


def _more_budget(asked: Question) -> Iterator[WhatIf]:
    if any(stop.loop == "running" and stop.cause == Cause.TOKEN_BUDGET for stop in asked.stops):
        return  # running requests would have come first, and what they wanted is not recorded
    if asked.token_budget < asked.timeline.token_budget:
        return  # schedule() worked with less than the setting allows
    cut = asked.cut_by(Cap.TOKEN_BUDGET)
    lacking = _lacking(cut)
    blocks = asked.left.blocks - asked.more_blocks(cut, lacking)
    everything = sum(request.wanted_tokens for request in asked.waiting)
    left = Left(everything, blocks, asked.left.seats)
    more = admit(asked.need, asked.waiting, left, seats_name=asked.timeline.seats_name)
    now, then = asked.token_budget, asked.token_budget + lacking + more.tokens
    cut_ids = [request.request_id for request in cut]
    parts = [_longer(cut_ids, lacking)] if cut else []
    if more:
        parts.append(
            say(
                "{more} would have fitted within {seats:setting} and the free KV blocks; {next}",
                more=more.described_as("more request"),
                seats=asked.timeline.seats_name,
                next=more.limit,
            )
        )
    if then > now and blocks >= 0:
        yield _answer(
            "With {limit:setting} {then:n} instead of {now:n}, {gained}.",
            asked.budget_name,
            now,
            then,
            cut_ids + more.request_ids,
            then - now,
            gained=joined(parts, " and "),
        )


def _longer_chunks(asked: Question) -> Iterator[WhatIf]:
    """Yield the tokens that requests would have got without ``long_prefill_token_threshold``."""
    cut = asked.cut_by(Cap.LONG_PREFILL)
    tokens = min(asked.left.budget, _lacking(cut))
    if tokens <= 0 or asked.more_blocks(cut, tokens) > asked.left.blocks:
        return
    request_ids = [request.request_id for request in cut]
    yield _answer(
        "Without {limit:setting} {now:n}, {gained} of the budget left.",
        Cap.LONG_PREFILL,
        asked.need.most_at_once,
        0,
        request_ids,
        tokens,
        gained=_longer(request_ids, tokens),
    )


def _more_blocks(asked: Question) -> Iterator[WhatIf]:
    """Yield the effect of more free blocks, and of no ``scheduler_reserve_full_isl`` if that refused it."""
    stop, head, need = asked.loop_exit, asked.waiting[0], asked.need
    if stop is None or stop.blocks_needed is None or stop.blocks_free is None:
        return
    if stop.request_ids != [head.request_id] or stop.detail not in {"free", "full_sequence", "watermark"}:
        return
    now, then = stop.blocks_free, stop.blocks_needed + need.kept_free
    tokens = need.first_chunk(head.wanted_tokens, asked.left.budget)
    wanted = ((request.wanted_tokens, request.wanted_tokens) for request in asked.waiting)
    endless = sum(need.blocks_asked(*tokens) for tokens in wanted)
    left = Left(asked.left.budget, endless, asked.left.seats)
    every = admit(need, asked.waiting, left, seats_name=asked.timeline.seats_name)
    yield _answer(
        "With {more:n more free KV block} ({then:n} instead of {now:n}), {head:id} ({tokens:n token}) would "
        "have been admitted.[ The budget left had room for {requests}, which take {blocks:n block}; "
        "{next}.{several:?}]",
        "kv_blocks",
        now,
        then,
        [head.request_id],
        tokens,
        more=then - now,
        head=head.request_id,
        requests=every.described_as("request"),
        blocks=every.blocks,
        next=every.limit,
        several=len(every.request_ids) > 1,
    )
    if stop.detail == "full_sequence":
        yield _answer(
            "Without {limit:setting}, {head:id} would have been admitted with a first chunk of "
            "{tokens:n token}.",
            "scheduler_reserve_full_isl",
            1,
            0,
            [head.request_id],
            tokens,
            head=head.request_id,
        )


def _chunked_prefill(asked: Question) -> Iterator[WhatIf]:
    """Yield the effect of chunked prefill, or of a budget large enough for the next prompt."""
    head, need, left = asked.waiting[0], asked.need, asked.left
    fits = need.blocks_asked(head.wanted_tokens, head.wanted_tokens) <= left.blocks
    tokens = min(head.wanted_tokens, left.budget)
    if need.blocks_asked(head.wanted_tokens, tokens) <= left.blocks:
        yield _answer(
            "With chunked prefill, {head:id} would have got {tokens:n} of the {wanted:n token} that it "
            "wants.",
            "enable_chunked_prefill",
            0,
            1,
            [head.request_id],
            tokens,
            head=head.request_id,
            wanted=head.wanted_tokens,
        )
    if fits and head.wanted_tokens > left.budget:
        yield _answer(
            "With {limit:setting} {then:n} instead of {now:n}, {head:id} would have fitted whole.",
            asked.budget_name,
            asked.token_budget,
            asked.token_budget + head.wanted_tokens - left.budget,
            [head.request_id],
            head.wanted_tokens,
            head=head.request_id,
        )


def _lacking(scheduled: list[Scheduled]) -> int:
    """Return the number of tokens that these requests wanted but did not get."""
    return sum(
        (request.wanted_tokens or request.scheduled_tokens) - request.scheduled_tokens
        for request in scheduled
    )


def _longer(request_ids: list[str], tokens: int) -> Message:
    return say(
        "{requests} would have got {tokens:n more token}",
        requests=Requests(request_ids, len(request_ids)),
        tokens=tokens,
    )


_ANSWERS: dict[str, Callable[[Question], Iterator[WhatIf]]] = {
    Cause.MAX_NUM_SEQS: _more_seats,
    Cause.TOKEN_BUDGET: _more_budget,
    Cause.KV_BLOCKS: _more_blocks,
    Cause.CHUNKED_PREFILL_OFF: _chunked_prefill,
}
