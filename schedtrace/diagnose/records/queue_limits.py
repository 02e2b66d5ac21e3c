"""Probable limit that requests wait for when vLLM reports a queue: KV cache, seats, or unknown."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from schedtrace.model.message import NOTHING, Message, Worded
from schedtrace.model.records import Certainty, Range, Statement
from schedtrace.model.say import say

NEARLY_FULL = 0.9
"""KV cache usage from which the next request is probably refused for lack of blocks."""
HALF_FULL = 0.5
"""KV cache usage up to which the cache is not the probable limit: even a large request would fit."""
NEARLY_ALL = 0.8
"""Share of the seats from which all may have been taken: vLLM counts after requests have finished."""
LEAST_EQUAL = 3
"""Snapshots with a queue that must show the same number of running requests to suggest a limit on it."""

Limit = Literal["kv", "some_kv", "seats", "both", "prompts", "none_run", "several", "unknown"]


class Moment(NamedTuple):
    """A moment at which requests wait for capacity."""

    running: int
    waiting: int
    kv_cache_usage_frac: float | None
    prompts: bool | None
    """Whether prompts were computed at about this moment; None: the record does not say."""
    is_idle: bool
    """Whether no token was computed at about this moment, as far as the record shows."""


def queue_statement(
    moments: Sequence[Moment],
    *,
    seats: int | None,
    engine_rank: int | None,
    of: int,
    noun: str = "snapshot",
    most_running: int = 0,
) -> Statement | None:
    """Return a statement about what requests waited for at these moments; None if no request waited.

    Args:
        moments: Those with waiting requests.
        seats: Limit on running requests, where the record has it.
        engine_rank: Engine that the statement names.
        of: Number of all moments, with a queue or without.
        noun: What a moment is.
        most_running: Largest number of running requests, with a queue or without.
    """
    if not moments:
        return None
    constant = len(moments) >= LEAST_EQUAL and len({moment.running for moment in moments}) == 1
    limits = Counter(_limit(moment, seats, constant=constant) for moment in moments)
    limit, at = limits.most_common(1)[0]
    if limit == "unknown" or 2 * at <= len(moments) or (limit == "prompts" and limits.keys() & _SURER):
        limit, at = "unknown", len(moments)
    candidates = _candidates(limit, moments, seats, max(most_running, *(each.running for each in moments)))
    if len(candidates) > 1:
        limit = "several"
    running, usage = _range([moment.running for moment in moments]), _usage(moments)
    waiting = _range([moment.waiting for moment in moments])
    counted = say(
        "in {queued} {noun}, {waiting} {verb} waiting[ and {running}][; KV cache usage is {usage}]",
        queued=_out_of(len(moments), of),
        noun=noun if of == 1 else f"{noun}s",
        waiting=amount(waiting),
        verb="is" if waiting.high == 1 else "are",
        running=say(
            "{running} {verb} running",
            running=amount(running, noun=""),
            verb="is" if running.high == 1 else "are",
        ),
        usage=None if usage is None else _share(usage),
    )
    wording = _WORDINGS[limit]
    values: dict[str, Worded] = {
        "counted": counted,
        "shown": say("in {at:n} of these {all:n}", at=at, all=len(moments)) if len(moments) > 1 else None,
        "seats": seats,
        "candidates": f"{', '.join(candidates[:-1])} or {candidates[-1]}" if candidates else None,
        "constant": None if seats is not None else round(running.high),
        "setting": "max_num_seqs",
        "full": sum((moment.kv_cache_usage_frac or 0) >= NEARLY_FULL for moment in moments),
    }
    certainty = wording.certainty
    if limit == "seats" and seats is None and not any(moment.prompts for moment in moments):
        certainty = "possible"  # nothing shows that one request took the seat of another
    named = {name: value for name, value in values.items() if re.search(rf"\{{{name}\b", wording.template)}
    return Statement(
        code=wording.code,
        certainty=certainty,
        at=at,
        snapshots=len(moments),
        engine_rank=engine_rank,
        text=say(wording.template, **named),
        advice=wording.advice,
    )


_SURER: frozenset[Limit] = frozenset({"kv", "both"})
"""Limits that prompts being computed do not make unlikely."""


def _candidates(limit: Limit, moments: Sequence[Moment], seats: int | None, most_running: int) -> list[str]:
    """Return what requests may wait for where the moments suggest a limit that is possible only.

    If the limit on running requests is unknown, it is at least the largest number of them.
    """
    if limit not in {"some_kv", "prompts"}:
        return []
    candidates = ["KV cache space"] if limit == "some_kv" else []
    near = sum(moment.running >= NEARLY_ALL * (seats or most_running) for moment in moments)
    if 2 * near > len(moments):
        candidates.append("a seat")
    if any(moment.prompts is not False for moment in moments):
        candidates.append("the token budget")
    return candidates


def _limit(moment: Moment, seats: int | None, *, constant: bool) -> Limit:
    """Return the limit that requests probably wait for at a moment.

    vLLM checks for a free seat before it checks for KV blocks: if all known seats are taken, nothing else
    refuses a request.
    """
    usage = moment.kv_cache_usage_frac
    if moment.running == 0:  # between two steps, none may run although the next step admits the first one
        return "none_run" if moment.is_idle else "unknown"
    if seats is not None and moment.running >= seats:
        return "seats"
    if usage is None:
        return "unknown"
    if seats is None and constant:
        return "seats" if usage < HALF_FULL else "both"
    if usage >= HALF_FULL:
        return "kv" if usage >= NEARLY_FULL else "some_kv"
    return "prompts" if moment.prompts else "unknown"


class _Wording(NamedTuple):
    """Code, certainty, sentence and advice for one limit."""

    code: str
    certainty: Certainty
    template: str
    advice: Message = NOTHING


_WORDINGS: dict[Limit, _Wording] = {
    "kv": _Wording(
        "kv-cache-full",
        "likely",
        "Requests are probably waiting for KV cache space: {counted}[ (90 % or more {shown})].",
        say(
            "If a recording confirms this, a higher {memory:setting} or {dtype:setting} gives the KV cache "
            "more room.",
            memory="--gpu-memory-utilization",
            dtype="--kv-cache-dtype fp8",
        ),
    ),
    "some_kv": _Wording(
        "kv-cache-possible",
        "possible",
        "Requests may be waiting for KV cache space: {counted}; the next request may need more blocks than "
        "are free.",
    ),
    "none_run": _Wording(
        "none-admitted",
        "likely",
        "Requests are waiting although none is running[ {shown}]: {counted}. Probably the first request can "
        "never be admitted, the scheduler is paused, or the requests wait for something else than capacity, "
        "such as a KV transfer.",
        say(
            "While it lasts, {queue:code} shows what each request waits for.",
            queue="schedtrace queue",
        ),
    ),
    "seats": _Wording(
        "seats-taken",
        "likely",
        "Requests are probably waiting for a seat: [all {seats:n seat} ({setting:setting}) are taken]"
        "[the number of running requests stays at exactly {constant:n}, as under a limit ({setting:setting})]"
        "[ {shown}]; {counted}"
        "[. In {full:n} of them, the KV cache is nearly full, too: more seats alone would not help].",
        say("If a recording confirms this, raise {setting:setting}.", setting="--max-num-seqs"),
    ),
    "both": _Wording(
        "seats-or-kv-cache",
        "possible",
        "Requests are waiting for a seat or for KV cache space; this record does not show which: {counted}"
        "; the number of running requests stays at exactly {constant:n}, and the KV cache is at least half "
        "full[ {shown}].",
    ),
    "prompts": _Wording(
        "prompts-pending",
        "possible",
        "Prompts may be waiting for earlier prompts, that is, for token budget: {counted}; prompts are "
        "being computed[ {shown}], and nothing suggests another limit.",
    ),
    "several": _Wording(
        "several-limits",
        "possible",
        "Requests may wait for {candidates}, which this record cannot tell apart: {counted}.",
    ),
    "unknown": _Wording(
        "unexplained-queue",
        "recorded",
        "Requests are waiting, but this record does not show what for: {counted}.",
    ),
}


def _range(values: Sequence[float]) -> Range:
    return Range(min(values), max(values))


def _usage(moments: Sequence[Moment]) -> Range | None:
    usages = [moment.kv_cache_usage_frac for moment in moments if moment.kv_cache_usage_frac is not None]
    return _range(usages) if usages else None


def amount(range_: Range, noun: str = "request") -> Message:
    """Return the smallest and the largest of some counts, or the only one, with a noun if it has any."""
    low, high = int(range_.low), int(range_.high)
    counted = say("{high:n request}", high=high) if noun else say("{high:n}", high=high)
    return counted if low == high else say("{low:n} to {counted}", low=low, counted=counted)


def _out_of(number: int, total: int) -> Message:
    return (
        say("all {total:n}", total=total)
        if 1 < number == total
        else say("{number:n} of {total:n}", number=number, total=total)
    )


def _share(share: Range) -> Message:
    if round(share.low, 2) == round(share.high, 2):
        return say("{high:%}", high=share.high)
    return say("{low:%} to {high:%}", low=share.low, high=share.high)
