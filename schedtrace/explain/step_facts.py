"""What a trace records beside the decisions: holders of KV blocks, caches, execution, requests in between."""

from collections.abc import Iterator
from typing import Any

import polars as pl

from schedtrace.model.message import NOTHING, Count, Message, joined
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline

Row = dict[str, Any]

MOST_NAMED = 5
MISSES = {
    "skipped": "vLLM does not look up such a request",
    "short": "no longer than one block",
    "not_cached": "no other request has the first block",
    "other_group": "only some cache groups have the first block",
}
"""Why a lookup found nothing; ``unknown`` is not among them."""


def step_facts(timeline: Timeline, row: Row) -> list[Message]:
    """The facts of a step, a row of ``timeline.steps``; none where the trace has none."""
    parts = (
        _refusals(timeline, row),
        _hits(timeline, row),
        _execution(row),
        _in_between(row),
        _encoder(row),
        _ranks(row),
    )
    return [sentence for part in parts for sentence in part]


def entries(timeline: Timeline, name: str, which: pl.Expr) -> list[Row]:
    """The entries of one of the trace's lists of facts."""
    table = timeline.lists.get(name)
    return [] if table is None else table.filter(which).collect().to_dicts()


def _refusals(timeline: Timeline, row: Row) -> Iterator[Message]:
    for refusal in entries(timeline, "refusals", pl.col("step") == row["step"]):
        needed, free = sum(refusal["blocks_needed"]), refusal["blocks_free"]
        if needed and free is not None:
            yield say(
                "{request:id} needs {blocks:n KV block}{by_group}, {free:n} free.",
                request=refusal["request_id"],
                blocks=needed,
                by_group=_by_group(timeline, refusal),
                free=free,
            )
        yield from _holders(timeline, refusal)


def _by_group(timeline: Timeline, refusal: Row) -> Message:
    kinds = [group.kind for group in timeline.header.cache_groups]
    if len(refusal["blocks_needed"]) < 2 or len(kinds) != len(refusal["blocks_needed"]):  # noqa: PLR2004  # one group needs no naming
        return NOTHING
    each = [
        say("{kind:code} {blocks:n}", kind=kind, blocks=blocks)
        for kind, blocks in zip(kinds, refusal["blocks_needed"], strict=True)
    ]
    return say(" ({groups})", groups=joined(each, ", "))


def _holders(timeline: Timeline, refusal: Row) -> Iterator[Message]:
    """Who holds the KV blocks, the largest holders by name."""
    held = [sum(blocks) for blocks in zip(*(group for group in refusal["held"] if group), strict=True)]
    if not held:
        return
    finished = set(refusal["finished_holders"])
    named = [
        say(
            "{holder:id} {blocks:n}{finished}",
            holder=holder,
            blocks=blocks,
            finished=" (finished)" if holder in finished else "",
        )
        for holder, blocks in list(zip(refusal["holders"], held, strict=True))[:MOST_NAMED]
    ]
    if others := refusal["other_holders"] + len(held[MOST_NAMED:]):
        rest = sum(refusal["other_held"]) + sum(held[MOST_NAMED:])
        more = say("{others:n more request} {rest:n}", others=others, rest=rest)
        named.append(more)
    holders = len(held) + refusal["other_holders"]
    shared = " (shared blocks count for each)" if timeline.header.enable_prefix_caching else ""
    yield say(
        "{holders:n request} {hold} {blocks:n block}{shared}: {named}.",
        holders=holders,
        hold="holds" if holders == 1 else "hold",
        blocks=sum(held) + sum(refusal["other_held"]),
        shared=shared,
        named=joined(named, ", "),
    )


def _hits(timeline: Timeline, row: Row) -> Iterator[Message]:
    came = entries(timeline, "admitted", pl.col("step") == row["step"])
    local = sum(request["local_tokens"] or 0 for request in came)
    external = sum(request["external_tokens"] or 0 for request in came)
    if local or external:
        yield say(
            "New requests found {local:n token} in the prefix cache{brought}.",
            local=local,
            brought=say(", a KV connector brought {external:n}", external=external) if external else NOTHING,
        )
    for miss, reason in MISSES.items():
        missed = sum(request["miss"] == miss for request in came)
        if missed:
            yield say(
                "{requests:n new request} found nothing in the prefix cache: {reason}.",
                requests=missed,
                reason=reason,
            )


def _execution(row: Row) -> Iterator[Message]:
    after_us, took_us = row.get("execute_after_us"), row.get("execute_us")
    if after_us is not None and took_us is not None:
        yield say(
            "The worker began to execute it {after:us} after the step began and took {took:us}.",
            after=after_us,
            took=took_us,
        )


_IN_BETWEEN = (
    ("finished_holding", "finished request", "{count} kept KV blocks, for a transfer or a batch in flight."),
    ("deferred_free_blocks", "KV block", "{count} cannot be freed until a batch in flight is back."),
    ("kv_loads_parked", "request", "{count} waited for KV blocks from elsewhere."),
    ("sessions_paused", "streaming session", "{count} waited for input."),
)
"""Columns of a step about requests and blocks that are neither in use nor free."""


def _in_between(row: Row) -> Iterator[Message]:
    for column, noun, sentence in _IN_BETWEEN:
        if count := row.get(column):
            yield say(sentence, count=Count(count, noun))


def _encoder(row: Row) -> Iterator[Message]:
    free, freeable = row.get("encoder_slots_free"), row.get("encoder_slots_freeable")
    if free is not None and freeable is not None:
        yield say(
            "The encoder cache had room for {free:n embedding}, {freeable:n} with those that no "
            "request uses.",
            free=free,
            freeable=freeable,
        )


def _ranks(row: Row) -> Iterator[Message]:
    if row.get("dummy_us"):
        yield say(
            "This rank ran {batches:n dummy batch/dummy batches} before it, {took:us} in total.",
            batches=row["dummy_batches"],
            took=row["dummy_us"],
        )
    if row.get("wave") is not None:
        yield say(
            "Wave {wave:n} of the data-parallel ranks, pass {counter:n}.",
            wave=row["wave"],
            counter=row["step_counter"],
        )
