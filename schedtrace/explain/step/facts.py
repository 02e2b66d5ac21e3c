"""What a step's line says beside the decisions, in sentences: holders, caches, execution, who is in limbo."""

from collections.abc import Iterator
from typing import Any

import polars as pl

from schedtrace.diagnose.rules.common import counted
from schedtrace.timeline.timeline import Timeline

Row = dict[str, Any]

MOST_NAMED = 5
MISSES = {
    "skipped": "vLLM does not look for such a request",
    "short": "no longer than one block",
    "not_cached": "nobody else has the first block",
    "other_group": "only some cache groups have the first block",
}
"""Why a lookup found nothing; ``unknown`` is not among them."""


def step_facts(timeline: Timeline, row: Row) -> list[str]:
    """The facts of a step, a row of ``timeline.steps``; none where the trace has none."""
    parts = (
        _refusals(timeline, row),
        _hits(timeline, row),
        _execution(row),
        _limbo(row),
        _encoder(row),
        _ranks(row),
    )
    return [sentence for part in parts for sentence in part]


def entries(timeline: Timeline, name: str, which: pl.Expr) -> list[Row]:
    """The entries of one of the trace's lists of facts."""
    table = timeline.lists.get(name)
    return [] if table is None else table.filter(which).collect().to_dicts()


def _refusals(timeline: Timeline, row: Row) -> Iterator[str]:
    for one in entries(timeline, "refusals", pl.col("step") == row["step"]):
        needed, free = sum(one["blocks_needed"]), one["blocks_free"]
        if needed and free is not None:
            blocks = f"{counted(needed, 'KV block')}{_by_group(timeline, one)}"
            yield f"{one['request_id']} needs {blocks}, {free:,} free."
        sums = [sum(blocks) for blocks in zip(*(group for group in one["held"] if group), strict=True)]
        if not sums:
            continue
        rest = sum(one["other_held"]) + sum(sums[MOST_NAMED:])
        others = one["other_holders"] + len(sums[MOST_NAMED:])
        gone = set(one["finished_holders"])
        named = [
            f"{holder} {blocks:,}{' (finished)' if holder in gone else ''}"
            for holder, blocks in list(zip(one["holders"], sums, strict=True))[:MOST_NAMED]
        ]
        more = f", {counted(others, 'more request')} {rest:,}" if others else ""
        holders = counted(len(sums) + one["other_holders"], "request")
        held = counted(sum(sums) + sum(one["other_held"]), "block")
        verb = "holds" if holders == "1 request" else "hold"
        shared = " (shared blocks count for each)" if timeline.header.enable_prefix_caching else ""
        yield f"{holders} {verb} {held}{shared}: {', '.join(named)}{more}."


def _by_group(timeline: Timeline, refusal: Row) -> str:
    kinds = [group.kind for group in timeline.header.cache_groups]
    if len(refusal["blocks_needed"]) < 2 or len(kinds) != len(refusal["blocks_needed"]):  # noqa: PLR2004  # one group needs no naming
        return ""
    each = [f"{kind} {blocks:,}" for kind, blocks in zip(kinds, refusal["blocks_needed"], strict=True)]
    return f" ({', '.join(each)})"


def _hits(timeline: Timeline, row: Row) -> Iterator[str]:
    came = entries(timeline, "admitted", pl.col("step") == row["step"])
    local = sum(one["local_tokens"] or 0 for one in came)
    external = sum(one["external_tokens"] or 0 for one in came)
    if local or external:
        brought = f", a KV connector brought {external:,}" if external else ""
        yield f"New requests found {counted(local, 'token')} in the prefix cache{brought}."
    for reason, why in MISSES.items():
        missed = [one["request_id"] for one in came if one["miss"] == reason]
        if missed:
            yield f"{counted(len(missed), 'new request')} found nothing in the prefix cache: {why}."


def _execution(row: Row) -> Iterator[str]:
    after_us, took_us = row.get("execute_after_us"), row.get("execute_us")
    if after_us is not None and took_us is not None:
        yield (
            f"The worker began to execute it {after_us / 1e3:,.1f} ms after the step began and took "
            f"{took_us / 1e3:,.1f} ms."
        )


def _limbo(row: Row) -> Iterator[str]:
    if count := row.get("finished_holding"):
        yield f"{counted(count, 'finished request')} kept KV blocks, for a transfer or a batch in flight."
    if count := row.get("deferred_free_blocks"):
        yield f"{counted(count, 'KV block')} cannot be freed until a batch in flight is back."
    if count := row.get("kv_loads_parked"):
        yield f"{counted(count, 'request')} waited for KV blocks from elsewhere."
    if count := row.get("sessions_paused"):
        yield f"{counted(count, 'streaming session')} waited for input."


def _encoder(row: Row) -> Iterator[str]:
    free, freeable = row.get("encoder_slots_free"), row.get("encoder_slots_freeable")
    if free is not None and freeable is not None:
        yield f"The encoder cache had room for {free:,} embeddings, {freeable:,} with what nobody uses."


def _ranks(row: Row) -> Iterator[str]:
    if row.get("dummy_us"):
        took = f"{row['dummy_us'] / 1e3:,.1f} ms"
        yield f"This rank ran {row['dummy_batches']:,} dummy batches before it, {took} in all."
    if row.get("wave") is not None:
        yield f"Wave {row['wave']} of the data-parallel ranks, pass {row['step_counter']}."
