"""The exits and preemptions of a step, with a sentence for each."""

from types import SimpleNamespace
from typing import Any

import polars as pl

from schedtrace.model.message import Count, Message, Number, Request, Requests, Value
from schedtrace.model.say import say
from schedtrace.model.story import Stop, Victim
from schedtrace.model.trace import Header
from schedtrace.model.vocabulary import reason
from schedtrace.timeline.timeline import Timeline

_ACTIONS = {"gate": "was not entered", "continue": "skipped a request"}
"""Kinds of exits in words; any other one ended its loop."""
SAME_STOP = ("loop", "kind", "cause", "detail", "location", "guard", "via")

Row = dict[str, Any]
Values = dict[str, Value]


def stops(timeline: Timeline, number: int) -> list[Stop]:
    """A step's exits in order; successive exits of the same kind are one entry."""
    rows = stop_rows(timeline.exits.filter(pl.col("step") == number)).to_dicts()
    own = set(Stop.__struct_fields__) - {"message"}
    return [
        Stop(**{name: row[name] for name in own}, message=stopped(timeline.header, row, stop_values(row)))
        for row in rows
    ]


def stop_rows(exits: pl.DataFrame) -> pl.DataFrame:
    """Exits with successive ones of the same kind as one: the columns of ``Stop``, ``step`` and ``guard``.

    Args:
        exits: Of ``timeline.exits``, in their order.
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
    """What differs between two exits of one kind; ``row`` is of ``stop_rows``."""
    return {
        "requests": Requests(row["request_ids"], row["count"]),
        "needed": Count(row["blocks_needed"] or 0, "block"),
        "free": Number(row["blocks_free"]),
        "left": Count(row["budget_left"], "token"),
    }


def stopped(header: Header, row: Row, values: Values) -> Message:
    """One exit, or several alike, in a sentence.

    Args:
        header: Of the trace.
        row: Of ``stop_rows``: it decides what the sentence says.
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
    """The requests that lost their blocks in a step."""
    own = set(Victim.__struct_fields__) - {"message"}
    lost = timeline.preemptions.filter(pl.col("step") == number).to_dicts()
    return [
        Victim(**{name: row[name] for name in own}, message=preempted(row, victim_values(row)))
        for row in lost
    ]


def victim_values(row: Row) -> Values:
    """What differs between two preemptions of one kind; ``row`` is of ``timeline.preemptions``."""
    return {
        "victim": Request(row["request_id"]),
        "for": Request(row["for_request_id"] or ""),
        "lost": Count(row["lost_tokens"], "computed token"),
        "needed": Count(row["blocks_needed"] or 0, "more KV block"),
        "freed": Count(row["blocks_freed"] or 0, "block"),
        "times": Number(row["num_preemptions"]),
    }


def preempted(row: Row, values: Values) -> Message:
    """One preemption in a sentence.

    Args:
        row: Of ``timeline.preemptions``: it decides what the sentence says.
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
    """The request that a preemption made room for; ``row`` is of ``timeline.preemptions``."""
    if not row["in_schedule"]:
        return say("outside schedule(), in a reset of the prefix cache")
    if row["for_request_id"] == row["request_id"]:
        return say("because it needed blocks itself and no other request was left to preempt")
    if row["for_request_id"]:
        return say("for {request}", request=request)
    return say("for a request that is not recorded")
