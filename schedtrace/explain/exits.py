"""The exits and preemptions of a step, with a sentence for each."""

from itertools import groupby
from typing import Any

import polars as pl

from schedtrace.model.message import NOTHING, Code, Count, Message, Number, Request, Requests, message
from schedtrace.model.story import Stop, Victim
from schedtrace.model.vocabulary import reason
from schedtrace.timeline.timeline import Timeline

SAME_STOP = ("loop", "kind", "cause", "detail", "location", "guard", "via")

Row = dict[str, Any]


def stops(timeline: Timeline, number: int) -> list[Stop]:
    """A step's exits in order; successive exits of the same kind are one entry."""
    exits = timeline.exits.filter(pl.col("step") == number).to_dicts()
    own = set(Stop.__struct_fields__) - {"count", "request_ids", "message"}
    found = []
    for _, alike in groupby(exits, key=lambda exit_: [exit_[name] for name in SAME_STOP]):
        group = list(alike)
        first, count = group[0], sum(exit_["count"] for exit_ in group)
        named = list(dict.fromkeys(exit_["request_id"] for exit_ in group if exit_["request_id"]))
        found.append(
            Stop(
                **{name: first[name] for name in own},
                count=count,
                request_ids=named,
                message=_stopped(timeline, first, Requests(named, count)),
            )
        )
    return found


def _stopped(timeline: Timeline, exit_: Row, requests: Requests) -> Message:
    """One exit, or several alike.

    Args:
        timeline: The engine's trace.
        exit_: With the columns of ``model.trace.Exit``.
        requests: Those that it skipped, or that were next.
    """
    loop, place = exit_["loop"], exit_["location"]
    return message(
        "The {loop} loop {action}{place}{inferred}: {reason}{evidence}; {next}{left} of budget left.",
        loop=loop,
        action=_action(exit_, requests),
        place=message(" at {place}", place=Code(place)) if place else NOTHING,
        inferred=" (inferred)" if exit_["via"] == "inferred" else "",
        reason=reason(timeline.header, loop=loop, cause=exit_["cause"], detail=exit_["detail"]),
        evidence=_evidence(exit_),
        next=_next(exit_, requests),
        left=Count(exit_["budget_left"], "token"),
    )


def _action(exit_: Row, requests: Requests) -> Message:
    if exit_["kind"] != "continue":
        return message("was not entered" if exit_["kind"] == "gate" else "ended")
    if requests.request_ids or requests.count > 1:
        return message("skipped {requests}", requests=requests)
    return message("skipped a request")


def _next(exit_: Row, requests: Requests) -> Message:
    """The request at which a loop ended."""
    if exit_["kind"] == "continue" or not requests.request_ids:
        return NOTHING
    template = "{requests} next in line, " if exit_["loop"] == "waiting" else "at {requests}, "
    return message(template, requests=requests)


def _evidence(exit_: Row) -> Message:
    """The blocks that an allocation lacked, and a guard that no rule knows."""
    needed, free, guard = exit_["blocks_needed"], exit_["blocks_free"], exit_["guard"]
    blocks = NOTHING
    if needed is not None and free is not None:
        blocks = message(" ({needed} needed, {free} free)", needed=Count(needed, "block"), free=Number(free))
    return message(
        "{blocks}{guard}", blocks=blocks, guard=message(" ({guard})", guard=Code(guard)) if guard else NOTHING
    )


def victims(timeline: Timeline, number: int) -> list[Victim]:
    """The requests that lost their blocks in a step."""
    own = set(Victim.__struct_fields__) - {"message"}
    lost = timeline.preemptions.filter(pl.col("step") == number).to_dicts()
    return [Victim(**{name: row[name] for name in own}, message=_preempted(row)) for row in lost]


def _preempted(row: Row) -> Message:
    freed, times = row["blocks_freed"], row["num_preemptions"] or 0
    return message(
        "vLLM preempted {victim} {reason}: {victim} lost {lost}{freed}{again}.",
        victim=Request(row["request_id"]),
        reason=_preemption_reason(row),
        lost=Count(row["lost_tokens"], "computed token"),
        freed=NOTHING
        if freed is None
        else message(" and freed {blocks} at once", blocks=Count(freed, "block")),
        again=message(" (preempted {times} times so far)", times=Number(times)) if times > 1 else NOTHING,
    )


def _preemption_reason(row: Row) -> Message:
    needed = row["blocks_needed"]
    if needed is None or row["for_request_id"] == row["request_id"]:
        return preempted_for(row)
    return message(
        "{reason}, which needed {needed}",
        reason=preempted_for(row),
        needed=Count(needed, "more KV block"),
    )


def preempted_for(row: Row) -> Message:
    """The request that a preemption made room for; ``row`` is of ``timeline.preemptions``."""
    if not row["in_schedule"]:
        return message("outside schedule(), in a reset of the prefix cache")
    if row["for_request_id"] == row["request_id"]:
        return message("because it needed blocks itself and no other request was left to preempt")
    if row["for_request_id"]:
        return message("for {request}", request=Request(row["for_request_id"]))
    return message("for a request that is not recorded")
