"""What a different limit would have allowed in one step, where the trace tells enough to compute it.

Only the limit that stopped this step is changed, and only this step is told: the waiting requests are taken
in the order of the queue until one does not fit into what the step left over. Where anything that decides is
not recorded there is no answer.
"""

from collections.abc import Callable, Iterator
from typing import Any

from schedtrace.explain.step.admission import Left, admit, known_need
from schedtrace.explain.step.more_room import chunked_prefill, more_blocks
from schedtrace.explain.step.question import Question, missing
from schedtrace.explain.step.why import names
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.story import Scheduled, Stop, Waiter, WhatIf
from schedtrace.timeline.timeline import Timeline


def what_if(
    timeline: Timeline,
    row: dict[str, Any],
    *,
    waiting: list[Waiter],
    shares: list[Scheduled],
    stops: list[Stop],
) -> list[WhatIf]:
    """The answers for one step.

    Args:
        timeline: The engine's trace.
        row: The step's row of ``timeline.steps``.
        waiting: Who waited after it, in order; empty where that is not known for certain.
        shares: What each scheduled request got.
        stops: The step's exits.
    """
    need, free = known_need(timeline), row["kv_blocks_free_after"]
    if need is None or free is None:
        return []
    left = Left(row["remaining_budget"], free - need.kept_free, timeline.seats - row["num_running_after"])
    question = Question(timeline, need, left, row["token_budget"], waiting, shares, stops)
    found = list(_longer_chunks(question))
    all_ready = not row["num_not_ready_after"] and not timeline.arrivals["lora"].drop_nulls().len()
    if question.end and waiting and all_ready:
        found += _ANSWERS.get(question.end.cause, _no_answer)(question)
    return found


def _no_answer(_: Question) -> Iterator[WhatIf]:
    yield from ()


def _more_seats(asked: Question) -> Iterator[WhatIf]:
    more = admit(asked.need, asked.waiting, Left(asked.left.budget, asked.left.blocks, len(asked.waiting)))
    limit, now = asked.seats_name, asked.timeline.seats
    then = now + len(more.request_ids) if more else None
    message = f"A higher {limit} alone would have admitted nobody: {more.ended}."
    if more:
        message = (
            f"With {limit} {then:,} instead of {now:,}, {more.in_words('more request')} would have fitted "
            f"into the budget left and the free KV blocks; {more.ended}."
        )
    yield WhatIf(
        limit=limit, now=now, then=then, request_ids=more.request_ids, tokens=more.tokens, message=message
    )


def _more_budget(asked: Question) -> Iterator[WhatIf]:
    if any(stop.loop == "running" and stop.cause == Cause.TOKEN_BUDGET for stop in asked.stops):
        return  # running requests would have come first, and what they wanted is not recorded
    cut = asked.cut_by(Cap.TOKEN_BUDGET)
    lacking = missing(cut)
    blocks = asked.left.blocks - (asked.need.blocks(lacking) if lacking else 0)
    everything = sum(one.wanted_tokens for one in asked.waiting)
    more = admit(asked.need, asked.waiting, Left(everything, blocks, asked.left.seats))
    now, then = asked.token_budget, asked.token_budget + lacking + more.tokens
    cut_ids = [share.request_id for share in cut]
    parts = [f"{names(cut_ids, len(cut))} would have got {lacking:,} tokens more"] if cut else []
    if more:
        parts.append(
            f"{more.in_words('more request')} would have fitted within {asked.seats_name} and the free KV "
            f"blocks; {more.ended}"
        )
    if then > now and blocks >= 0:
        yield WhatIf(
            limit=asked.budget_name,
            now=now,
            then=then,
            request_ids=cut_ids + more.request_ids,
            tokens=then - now,
            message=f"With {asked.budget_name} {then:,} instead of {now:,}, {' and '.join(parts)}.",
        )


def _longer_chunks(asked: Question) -> Iterator[WhatIf]:
    """Without ``long_prefill_token_threshold``, what its victims would have got of the budget left."""
    cut = asked.cut_by(Cap.LONG_PREFILL)
    tokens = min(asked.left.budget, missing(cut))
    if tokens <= 0 or asked.need.blocks(tokens) > asked.left.blocks:
        return
    whom = [share.request_id for share in cut]
    message = (
        f"Without {Cap.LONG_PREFILL} {asked.need.most_at_once:,}, {names(whom, len(whom))} would have got "
        f"{tokens:,} tokens more of the budget left."
    )
    yield WhatIf(
        limit=Cap.LONG_PREFILL,
        now=asked.need.most_at_once,
        then=0,
        request_ids=whom,
        tokens=tokens,
        message=message,
    )


_ANSWERS: dict[str, Callable[[Question], Iterator[WhatIf]]] = {
    Cause.MAX_NUM_SEQS: _more_seats,
    Cause.TOKEN_BUDGET: _more_budget,
    Cause.KV_BLOCKS: more_blocks,
    Cause.CHUNKED_PREFILL_OFF: chunked_prefill,
}
