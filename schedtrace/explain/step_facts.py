"""What a trace records beside the decisions: holders of KV blocks, caches, execution, requests in between."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import polars as pl

from schedtrace.model.message import NOTHING, Count, Duration, Message, Number, Value, joined
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
    return [*_refusals(timeline, row), *_hits(timeline, row), *_of_columns(row)]


def entries(timeline: Timeline, name: str, which: pl.Expr) -> list[Row]:
    """The entries of one of the trace's lists of facts."""
    table = timeline.lists.get(name)
    return [] if table is None else table.filter(which).collect().to_dicts()


def _refusals(timeline: Timeline, row: Row) -> Iterator[Message]:
    for refusal in entries(timeline, "refusals", pl.col("step") == row["step"]):
        needed, free = sum(refusal["blocks_needed"]), refusal["blocks_free"]
        if needed and free is not None:
            yield say(
                "{request_id:id} needs {needed:n KV block}[ ({groups})], {blocks_free:n} free.",
                SimpleNamespace(**refusal),
                needed=needed,
                groups=_by_group(timeline, refusal),
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
    return joined(each, ", ")


def _holders(timeline: Timeline, refusal: Row) -> Iterator[Message]:
    """Who holds the KV blocks, the largest holders by name."""
    held = [sum(blocks) for blocks in zip(*(group for group in refusal["held"] if group), strict=True)]
    if not held:
        return
    finished = set(refusal["finished_holders"])
    named = [
        say(
            "{holder:id} {blocks:n}[ (finished){done:?}]",
            holder=holder,
            blocks=blocks,
            done=holder in finished,
        )
        for holder, blocks in list(zip(refusal["holders"], held, strict=True))[:MOST_NAMED]
    ]
    if others := refusal["other_holders"] + len(held[MOST_NAMED:]):
        rest = sum(refusal["other_held"]) + sum(held[MOST_NAMED:])
        named.append(say("{others:n more request} {rest:n}", others=others, rest=rest))
    holders = len(held) + refusal["other_holders"]
    yield say(
        "{holders:n request} {hold} {blocks:n block}[ (shared blocks count for each){shared:?}]: {named}.",
        holders=holders,
        hold="holds" if holders == 1 else "hold",
        blocks=sum(held) + sum(refusal["other_held"]),
        shared=timeline.header.enable_prefix_caching,
        named=joined(named, ", "),
    )


def _hits(timeline: Timeline, row: Row) -> Iterator[Message]:
    came = entries(timeline, "admitted", pl.col("step") == row["step"])
    local = sum(request["local_tokens"] or 0 for request in came)
    external = sum(request["external_tokens"] or 0 for request in came)
    if local or external:
        yield say(
            "New requests found {local:n token} in the prefix cache[, a KV connector brought {external:n}].",
            local=local,
            external=external,
        )
    for miss, reason in MISSES.items():
        missed = sum(request["miss"] == miss for request in came)
        if missed:
            yield say(
                "{requests:n new request} found nothing in the prefix cache: {reason}.",
                requests=missed,
                reason=reason,
            )


_OF_COLUMNS = (
    "[The worker began to execute it {execute_after} after the step began and took {execute}.]",
    "[{finished_holding:n finished request} kept KV blocks, for a transfer or a batch in flight.]",
    "[{deferred_free_blocks:n KV block} cannot be freed until a batch in flight is back.]",
    "[{kv_loads_parked:n request} waited for KV blocks from elsewhere.]",
    "[{sessions_paused:n streaming session} waited for input.]",
    "[The encoder cache had room for {encoder_free}, {encoder_freeable} with those that no request uses.]",
    "[This rank ran {dummy_batches:n dummy batch/dummy batches} before it, {dummy_us:us} in total.]",
    "[Wave {wave} of the data-parallel ranks, pass {counter}.]",
)
"""What columns of a step say; nothing where one is not known, or a count is 0."""
_COUNTS = (
    *("finished_holding", "deferred_free_blocks", "kv_loads_parked", "sessions_paused"),
    *("dummy_batches", "dummy_us"),
)


def _of_columns(row: Row) -> Iterator[Message]:
    def known(column: str, kind: Callable[[Any], Value]) -> Value | None:
        return None if row.get(column) is None else kind(row[column])

    columns = SimpleNamespace(
        **{column: row.get(column) for column in _COUNTS},
        execute_after=known("execute_after_us", Duration),
        execute=known("execute_us", Duration),
        encoder_free=known("encoder_slots_free", lambda free: Count(free, "embedding")),
        encoder_freeable=known("encoder_slots_freeable", Number),
        wave=known("wave", Number),
        counter=Number(row.get("step_counter")),
    )
    yield from filter(None, (say(template, columns) for template in _OF_COLUMNS))
