"""What a different limit would have allowed in one step, where the trace has enough to compute it.

Only the limit that stopped this step changes, and only this step counts: the waiting requests are taken in
the order of the queue until one does not fit into what the step left over. Where anything that decides is not
recorded there is no answer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from schedtrace.explain.leftover import Left, admit
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.message import Message, Number, Requests, Setting, joined
from schedtrace.model.say import say
from schedtrace.model.story import Scheduled, Stop, Waiter, WhatIf
from schedtrace.timeline.admission import Need
from schedtrace.timeline.timeline import Timeline


@dataclass(frozen=True)
class Question:
    """A step, what it left over, and who wanted more."""

    timeline: Timeline
    need: Need
    left: Left
    token_budget: int
    waiting: list[Waiter]
    """In the order of the queue."""
    scheduled: list[Scheduled]
    stops: list[Stop]

    @property
    def end(self) -> Stop | None:
        """The exit that ended the waiting loop."""
        ends = [stop for stop in self.stops if stop.loop == "waiting" and stop.kind != "continue"]
        return ends[-1] if ends else None

    @property
    def seats_name(self) -> str:
        """The setting that limits how many run."""
        return "max_num_active_seqs" if self.timeline.active_limit else "max_num_seqs"

    @property
    def budget_name(self) -> str:
        """The setting that the token budget comes from."""
        given = self.timeline.header.scheduler_config.get("max_num_scheduled_tokens")
        return "max_num_scheduled_tokens" if given else "max_num_batched_tokens"

    def cut_by(self, cap: str) -> list[Scheduled]:
        """Requests whose chunk this limit made smaller at last."""
        return [request for request in self.scheduled if request.caps and request.caps[-1] == cap]


def what_if(
    timeline: Timeline,
    row: dict[str, Any],
    *,
    need: Need | None,
    waiting: list[Waiter],
    scheduled: list[Scheduled],
    stops: list[Stop],
) -> list[WhatIf]:
    """The answers for one step.

    Args:
        timeline: The engine's trace.
        row: The step's row of ``timeline.steps``.
        need: The room that a request needs (``admission.known_need``).
        waiting: Who waited after it, in order; empty where that is not known for certain.
        scheduled: What each scheduled request got.
        stops: The step's exits.
    """
    free = row["kv_blocks_free_after"]
    if need is None or free is None:
        return []
    left = Left(row["remaining_budget"], free - need.kept_free, timeline.seats - row["num_running_after"])
    question = Question(timeline, need, left, row["token_budget"], waiting, scheduled, stops)
    found = list(_longer_chunks(question))
    all_ready = not row["num_not_ready_after"] and not timeline.arrivals["lora"].drop_nulls().len()
    if question.end and waiting and all_ready:
        found += _ANSWERS.get(question.end.cause, _no_answer)(question)
    return found


def _no_answer(_: Question) -> Iterator[WhatIf]:
    yield from ()


def _more_seats(asked: Question) -> Iterator[WhatIf]:
    left = Left(asked.left.budget, asked.left.blocks, len(asked.waiting))
    more = admit(asked.need, asked.waiting, left, seats_name=asked.seats_name)
    limit, now = asked.seats_name, asked.timeline.seats
    then = now + len(more.request_ids) if more else None
    sentence = say(
        "A higher {limit:setting} alone would have admitted no request: {next}.",
        limit=limit,
        next=more.limit,
    )
    if then is not None:
        sentence = say(
            "{changed}, {more} would have fitted into the budget left and the free KV blocks; {next}.",
            changed=_changed(limit, now, then),
            more=more.described("more request"),
            next=more.limit,
        )
    yield WhatIf(
        limit=limit, now=now, then=then, request_ids=more.request_ids, tokens=more.tokens, message=sentence
    )


def _more_budget(asked: Question) -> Iterator[WhatIf]:
    if any(stop.loop == "running" and stop.cause == Cause.TOKEN_BUDGET for stop in asked.stops):
        return  # running requests would have come first, and what they wanted is not recorded
    cut = asked.cut_by(Cap.TOKEN_BUDGET)
    lacking = _lacking(cut)
    blocks = asked.left.blocks - (asked.need.blocks(lacking) if lacking else 0)
    everything = sum(request.wanted_tokens for request in asked.waiting)
    left = Left(everything, blocks, asked.left.seats)
    more = admit(asked.need, asked.waiting, left, seats_name=asked.seats_name)
    now, then = asked.token_budget, asked.token_budget + lacking + more.tokens
    cut_ids = [request.request_id for request in cut]
    parts = [_longer(cut_ids, lacking)] if cut else []
    if more:
        parts.append(
            say(
                "{more} would have fitted within {seats:setting} and the free KV blocks; {next}",
                more=more.described("more request"),
                seats=asked.seats_name,
                next=more.limit,
            )
        )
    if then > now and blocks >= 0:
        yield WhatIf(
            limit=asked.budget_name,
            now=now,
            then=then,
            request_ids=cut_ids + more.request_ids,
            tokens=then - now,
            message=say(
                "{changed}, {gained}.",
                changed=_changed(asked.budget_name, now, then),
                gained=joined(parts, " and "),
            ),
        )


def _longer_chunks(asked: Question) -> Iterator[WhatIf]:
    """Without ``long_prefill_token_threshold``, what its victims would have got of the budget left."""
    cut = asked.cut_by(Cap.LONG_PREFILL)
    tokens = min(asked.left.budget, _lacking(cut))
    if tokens <= 0 or asked.need.blocks(tokens) > asked.left.blocks:
        return
    request_ids = [request.request_id for request in cut]
    yield WhatIf(
        limit=Cap.LONG_PREFILL,
        now=asked.need.most_at_once,
        then=0,
        request_ids=request_ids,
        tokens=tokens,
        message=say(
            "Without {limit:setting} {now:n}, {gained} of the budget left.",
            limit=Cap.LONG_PREFILL,
            now=asked.need.most_at_once,
            gained=_longer(request_ids, tokens),
        ),
    )


def _more_blocks(asked: Question) -> Iterator[WhatIf]:
    """How many more free blocks the refused request needed; without ``scheduler_reserve_full_isl``, none."""
    stop, head, need = asked.end, asked.waiting[0], asked.need
    if stop is None or stop.blocks_needed is None or stop.blocks_free is None:
        return
    if stop.request_ids != [head.request_id] or stop.detail not in {"free", "full_sequence", "watermark"}:
        return
    now, then = stop.blocks_free, stop.blocks_needed + need.kept_free
    tokens = need.tokens(head.wanted_tokens, asked.left.budget)
    sentence = say(
        "With {more:n more free KV block} ({then:n} instead of {now:n}), {head:id} "
        "({tokens:n token}) would have been admitted.",
        more=then - now,
        then=then,
        now=now,
        head=head.request_id,
        tokens=tokens,
    )
    endless = sum(need.blocks(request.wanted_tokens) for request in asked.waiting)
    left = Left(asked.left.budget, endless, asked.left.seats)
    every = admit(need, asked.waiting, left, seats_name=asked.seats_name)
    if len(every.request_ids) > 1:
        room = say(
            "The budget left had room for {requests}, which take {blocks:n block}; {next}.",
            requests=every.described("request"),
            blocks=every.blocks,
            next=every.limit,
        )
        sentence = joined([sentence, room])
    yield WhatIf(
        limit="kv_blocks", now=now, then=then, request_ids=[head.request_id], tokens=tokens, message=sentence
    )
    if stop.detail == "full_sequence":
        yield WhatIf(
            limit="scheduler_reserve_full_isl",
            now=1,
            then=0,
            request_ids=[head.request_id],
            tokens=tokens,
            message=say(
                "Without {limit:setting}, {head:id} would have been admitted with a first chunk of "
                "{tokens:n token}.",
                limit="scheduler_reserve_full_isl",
                head=head.request_id,
                tokens=tokens,
            ),
        )


def _chunked_prefill(asked: Question) -> Iterator[WhatIf]:
    """Chunked prefill on, or a budget that holds the next prompt whole."""
    head, need, left = asked.waiting[0], asked.need, asked.left
    fits = need.blocks(head.wanted_tokens) <= left.blocks
    tokens = min(head.wanted_tokens, left.budget)
    if fits or (not need.whole and need.blocks(tokens) <= left.blocks):
        yield WhatIf(
            limit="enable_chunked_prefill",
            now=0,
            then=1,
            request_ids=[head.request_id],
            tokens=tokens,
            message=say(
                "With chunked prefill, {head:id} would have got {tokens:n} of the {wanted:n token} "
                "that it wants.",
                head=head.request_id,
                tokens=tokens,
                wanted=head.wanted_tokens,
            ),
        )
    if fits and head.wanted_tokens > left.budget:
        now, then = asked.token_budget, asked.token_budget + head.wanted_tokens - left.budget
        yield WhatIf(
            limit=asked.budget_name,
            now=now,
            then=then,
            request_ids=[head.request_id],
            tokens=head.wanted_tokens,
            message=say(
                "{changed}, {head:id} would have fitted whole.",
                changed=_changed(asked.budget_name, now, then),
                head=head.request_id,
            ),
        )


def _lacking(scheduled: list[Scheduled]) -> int:
    """Tokens that these requests wanted and did not get."""
    return sum(
        (request.wanted_tokens or request.scheduled_tokens) - request.scheduled_tokens
        for request in scheduled
    )


def _changed(limit: str, now: int, then: int) -> Message:
    template = "With {limit} {then} instead of {now}"
    return say(template, limit=Setting(limit), then=Number(then), now=Number(now))


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
