"""What-if answers for one request that was too large: more KV blocks, or chunks of it."""

from collections.abc import Iterator

from schedtrace.diagnose.rules.common import counted
from schedtrace.explain.step.admission import Left, admit
from schedtrace.explain.step.question import Question
from schedtrace.model.story import WhatIf


def more_blocks(asked: Question) -> Iterator[WhatIf]:
    """How many more free blocks the refused request needed; without ``scheduler_reserve_full_isl``, none."""
    stop, head, need = asked.end, asked.waiting[0], asked.need
    if stop is None or stop.blocks_needed is None or stop.blocks_free is None:
        return
    if stop.request_ids != [head.request_id] or stop.detail not in {"free", "full_sequence", "watermark"}:
        return
    now, then = stop.blocks_free, stop.blocks_needed + need.kept_free
    tokens = need.tokens(head.wanted_tokens, asked.left.budget)
    message = (
        f"With {counted(then - now, 'more free KV block')} ({then:,} instead of {now:,}), {head.request_id} "
        f"({tokens:,} tokens) would have been admitted."
    )
    endless = sum(need.blocks(one.wanted_tokens) for one in asked.waiting)
    every = admit(need, asked.waiting, Left(asked.left.budget, endless, asked.left.seats))
    if len(every.request_ids) > 1:
        message += (
            f" The budget left had room for {every.in_words('request')}, which take "
            f"{counted(every.blocks, 'block')}; {every.ended}."
        )
    yield WhatIf(
        limit="kv_blocks", now=now, then=then, request_ids=[head.request_id], tokens=tokens, message=message
    )
    if stop.detail == "full_sequence":
        yield WhatIf(
            limit="scheduler_reserve_full_isl",
            now=1,
            then=0,
            request_ids=[head.request_id],
            tokens=tokens,
            message=f"Without scheduler_reserve_full_isl, {head.request_id} would have been admitted with a "
            f"first chunk of {counted(tokens, 'token')}.",
        )


def chunked_prefill(asked: Question) -> Iterator[WhatIf]:
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
            message=f"With chunked prefill, {head.request_id} would have got {tokens:,} of the "
            f"{head.wanted_tokens:,} tokens that it wants.",
        )
    if fits and head.wanted_tokens > left.budget:
        now, then = asked.token_budget, asked.token_budget + head.wanted_tokens - left.budget
        yield WhatIf(
            limit=asked.budget_name,
            now=now,
            then=then,
            request_ids=[head.request_id],
            tokens=head.wanted_tokens,
            message=f"With {asked.budget_name} {then:,} instead of {now:,}, {head.request_id} would have "
            "fitted whole.",
        )
