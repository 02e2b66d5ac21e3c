"""Sentences about a step: exits, preemptions, and recorded facts other than decisions.

Beside them stand holders of KV blocks, what the caches gave, the worker's time, requests in between.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import polars as pl

from schedtrace.model.message import (
    NOTHING,
    Count,
    Duration,
    Message,
    Number,
    Request,
    Requests,
    Value,
    joined,
)
from schedtrace.model.say import say
from schedtrace.model.story import Stop, Victim
from schedtrace.model.trace import Header
from schedtrace.model.vocabulary import reason
from schedtrace.timeline.timeline import Timeline

_ACTIONS = {"gate": "was not entered", "continue": "skipped a request"}
"""Kinds of exits in words; any other exit ended its loop."""
SAME_STOP = ("loop", "kind", "cause", "detail", "location", "guard", "via")

Row = dict[str, Any]
Values = dict[str, Value]


def step_stops(timeline: Timeline, number: int) -> list[Stop]:
    """Return a step's exits in order; successive exits of the same kind are one entry."""
    rows = stop_rows(timeline.exits.filter(pl.col("step") == number)).to_dicts()
    own = set(Stop.__struct_fields__) - {"message"}
    return [
        Stop(
            **{name: row[name] for name in own}, message=stop_message(timeline.header, row, stop_values(row))
        )
        for row in rows
    ]


def stop_rows(exits: pl.DataFrame) -> pl.DataFrame:
    """Merge successive exits of the same kind: the columns of ``Stop``, ``step`` and ``guard``.

    Args:
        exits: Rows of ``timeline.exits``, in their order.
    """
    named = pl.col("request_id").filter(pl.col("request_id").is_not_null() & (pl.col("request_id") != ""))
    return (
        exits.group_by(pl.struct("step", *SAME_STOP).rle_id().alias("run"), maintain_order=True)
        .agg(
            pl.col("step", *SAME_STOP, "budget_left", "blocks_needed", "blocks_free").first(),
            pl.col("count").sum(),
            values=pl.when(pl.col("values").n_unique() == 1).then(pl.col("values").first()),
            request_ids=named.unique(maintain_order=True),
        )
        .drop("run")
    )


def stop_values(row: Row) -> Values:
    """Return what differs between two exits of one kind; ``row`` is of ``stop_rows``."""
    return {
        "requests": Requests(row["request_ids"], row["count"]),
        "needed": Count(row["blocks_needed"] or 0, "block"),
        "free": Number(row["blocks_free"]),
        "left": Count(row["budget_left"], "token"),
    }


def stop_message(header: Header, row: Row, values: Values) -> Message:
    """Say an exit, or several alike, in a sentence.

    Args:
        header: Header of the trace.
        row: Row of ``stop_rows``; it decides what the sentence says.
        values: ``stop_values`` of a row, or slots for them.
    """
    skips, named = row["kind"] == "continue", bool(row["request_ids"])
    counted = skips and (named or row["count"] > 1)
    return say(
        "The {loop} loop {action}[ {requests}{counted:?}][ at {location:code}][ (inferred){inferred:?}]: "
        "{reason}[ ({needed} needed, {free} free){lacked:?}][ ({guard:code}[, where {compared:code}])]; "
        "[{requests} next in line, {waited:?}][at {requests}, {ran:?}]{left} of budget left.",
        SimpleNamespace(**row),
        action="skipped" if counted else _ACTIONS.get(row["kind"], "ended"),
        counted=counted,
        inferred=row["via"] == "inferred",
        reason=reason(header, loop=row["loop"], cause=row["cause"], detail=row["detail"]),
        lacked=row["blocks_needed"] is not None and row["blocks_free"] is not None,
        compared=row["values"],
        waited=named and not skips and row["loop"] == "waiting",
        ran=named and not skips and row["loop"] != "waiting",
        **values,
    )


def victims(timeline: Timeline, number: int) -> list[Victim]:
    """Return the requests that lost their blocks in a step."""
    own = set(Victim.__struct_fields__) - {"message"}
    lost = timeline.preemptions.filter(pl.col("step") == number).to_dicts()
    return [
        Victim(**{name: row[name] for name in own}, message=preemption_message(row, victim_values(row)))
        for row in lost
    ]


def victim_values(row: Row) -> Values:
    """Return what differs between two preemptions of one kind; ``row`` is of ``timeline.preemptions``."""
    return {
        "victim": Request(row["request_id"]),
        "for": Request(row["for_request_id"] or ""),
        "lost": Count(row["lost_tokens"], "computed token"),
        "needed": Count(row["blocks_needed"] or 0, "more KV block"),
        "freed": Count(row["blocks_freed"] or 0, "block"),
        "times": Number(row["num_preemptions"]),
    }


def preemption_message(row: Row, values: Values) -> Message:
    """Say a preemption in a sentence.

    Args:
        row: Row of ``timeline.preemptions``; it decides what the sentence says.
        values: ``victim_values`` of a row, or slots for them.
    """
    return say(
        "vLLM preempted {victim} {reason}[, which needed {needed}{asked:?}]: {victim} lost {lost}"
        "[ and freed {freed} at once{gave:?}][ (preempted {times} times so far){again:?}].",
        SimpleNamespace(**values),
        reason=preempted_for(row, values["for"]),
        asked=row["blocks_needed"] is not None and row["for_request_id"] != row["request_id"],
        gave=row["blocks_freed"] is not None,
        again=(row["num_preemptions"] or 0) > 1,
    )


def preempted_for(row: Row, request: Value) -> Message:
    """Return the request that a preemption made room for; ``row`` is of ``timeline.preemptions``."""
    if not row["in_schedule"]:
        return say("outside schedule(), in a reset of the prefix cache")
    if row["for_request_id"] == row["request_id"]:
        return say("because it needed blocks itself and no other request was left to preempt")
    if row["for_request_id"]:
        return say("for {request}", request=request)
    return say("for a request that is not recorded")


MOST_NAMED = 5
MISSES = {
    "skipped": "vLLM does not look up such a request",
    "short": "no longer than one block",
    "not_cached": "no other request has the first block",
    "other_group": "only some cache groups have the first block",
}
"""Why a lookup found nothing; ``unknown`` is not among them."""


def step_facts(timeline: Timeline, row: Row) -> list[Message]:
    """Return the facts of a step, a row of ``timeline.steps``; none where the trace has none."""
    return [*_refusals(timeline, row), *_hits(timeline, row), *_step_columns(row)]


def entries(timeline: Timeline, name: str, which: pl.Expr) -> list[Row]:
    """Return the entries of one of the trace's lists of facts."""
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
    """Name the holders of KV blocks, the largest ones first."""
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
    if unnamed := refusal["other_holders"] + len(held[MOST_NAMED:]):
        rest = sum(refusal["other_held"]) + sum(held[MOST_NAMED:])
        named.append(say("{others:n more request} {rest:n}", others=unnamed, rest=rest))
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
    admitted = entries(timeline, "admitted", pl.col("step") == row["step"])
    local = sum(request["local_tokens"] or 0 for request in admitted)
    external = sum(request["external_tokens"] or 0 for request in admitted)
    if local or external:
        yield say(
            "New requests found {local:n token} in the prefix cache[, a KV connector brought {external:n}].",
            local=local,
            external=external,
        )
    for miss, why in MISSES.items():
        missed = sum(request["miss"] == miss for request in admitted)
        if missed:
            yield say(
                "{requests:n new request} found nothing in the prefix cache: {reason}.",
                requests=missed,
                reason=why,
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
"""Sentences for columns of a step; empty where a column is unknown, or a count is 0."""
_COUNTS = (
    *("finished_holding", "deferred_free_blocks", "kv_loads_parked", "sessions_paused"),
    *("dummy_batches", "dummy_us"),
)


def _step_columns(row: Row) -> Iterator[Message]:
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
