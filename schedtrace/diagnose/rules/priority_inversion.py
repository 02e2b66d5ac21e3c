"""``priority-inversion``: more urgent requests waited while less urgent ones ran, or were admitted."""

import numpy as np
import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import most_seats, seats_cost
from schedtrace.diagnose.rules.common import Waited, advise, by_class, listed, wait_figures, wait_finding
from schedtrace.diagnose.waits import ClassTime, charged, running_classes
from schedtrace.model.causes import Cause
from schedtrace.model.message import Message
from schedtrace.model.report import Advice
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.charges import PRIORITY_INVERSION
from schedtrace.timeline.timeline import Timeline

COLUMNS = {
    "step": pl.Int64,
    "trial": pl.Int64,
    "request_id": pl.String,
    "priority": pl.Int64,
    "by": pl.String,
    "by_priority": pl.Int64,
}


def priority_inversions(timeline: Timeline) -> pl.DataFrame:
    """Return a row per step that scheduled a request from the queue but left a more urgent, ready one.

    There are rows only with ``--scheduling-policy priority``, where smaller numbers go first. A request that
    the step skipped or refused individually does not count. Columns: ``step``, ``trial``; ``request_id`` and
    ``priority`` of the most urgent request left waiting; ``by`` and ``by_priority``, the id and priority of
    the least urgent request scheduled.
    """
    queue = timeline.waits
    if timeline.header.scheduler_config.get("policy") != "priority" or queue.is_empty():
        return pl.DataFrame(schema=COLUMNS)
    since, left = queue["since_step"].to_numpy(), queue["left_step"].to_numpy()
    urgency, ids = queue["priority"].to_numpy(), queue["request_id"].to_numpy()
    named = set(timeline.exits.filter(pl.col("loop") == "waiting")[["step", "request_id"]].iter_rows())
    asked = timeline.known_requests[["request_id", "priority"]]
    admitted = (
        timeline.admitted.lazy()
        .select("step", "trial", "request_id")
        .collect()
        .join(asked, on="request_id")
        .sort("step", "priority", descending=[False, True])
        .unique("step", keep="first", maintain_order=True)
    )
    rows = []
    for step, trial, by, by_priority in admitted.iter_rows():
        behind = np.flatnonzero((since <= step) & (step < left) & (urgency < by_priority))
        ready = [at for at in behind if (step, ids[at]) not in named]
        if ready:
            first = min(ready, key=lambda at: (urgency[at], at))
            rows.append((step, trial, str(ids[first]), int(urgency[first]), by, by_priority))
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


class Inversion(Waited, kw_only=True):
    """Urgent requests that waited while less urgent requests ran."""

    waited_for: list[str]
    """Causes of the waits of urgent requests, the cause with the most time first."""
    classes: list[ClassTime]
    """Priorities of the requests that ran in the steps with waits."""
    admitted_before: int
    """Number of steps that admitted a less urgent request although a more urgent one, which no exit of the
    step's waiting loop names, waited before and after the step."""


def _find(timeline: Timeline) -> Findings:
    waits = charged(timeline, PRIORITY_INVERSION)
    if waits is None:
        return
    causes = waits.rows.group_by("cause").agg(pl.col("time_us").sum()).sort("time_us", descending=True)
    waited_for = causes["cause"].to_list()
    classes = running_classes(timeline, waits.steps)
    yield wait_finding(
        timeline,
        waits,
        evidence=Inversion(
            **wait_figures(waits),
            waited_for=waited_for,
            classes=classes,
            admitted_before=priority_inversions(timeline).height,
        ),
        title="Urgent requests wait for less urgent ones",
        verdict="Priority does not hold: more urgent requests spent {share:%} of all requests' time "
        "waiting for {resource} that less urgent ones held.",
        holder="Meanwhile {ran} ran on average (lower is more urgent).",
        cause=waited_for[0],
        message="{requests:n request} waited {wait_ms:ms} in total, {longest_request:id} the longest "
        "({longest_ms:ms}). vLLM preempts nobody for a waiting request, however urgent."
        "[ {admitted_before:n step} even admitted a less urgent request before a more urgent one.]",
        values={
            "resource": listed([_resource(cause) for cause in waited_for]),
            "ran": by_class(classes),
        },
        advice=_advice(timeline),
    )


def _resource(cause: str) -> Message:
    return {str(Cause.MAX_NUM_SEQS): say("seats"), str(Cause.KV_BLOCKS): say("KV blocks")}.get(
        cause, say("{cause:cause}", cause=cause)
    )


def _advice(timeline: Timeline) -> list[Advice]:
    findings = [
        advise(
            "send less urgent requests to an engine of their own, or limit how many are sent",
            costs="Idle capacity while there are few urgent requests.",
        )
    ]
    value = min(2 * timeline.seats, most_seats(timeline))
    if value > timeline.seats:
        findings.append(
            advise(
                "{option} {value:n} (now {seats:n}), where the KV cache has room",
                timeline,
                setting=timeline.seats_name,
                value=value,
                costs=seats_cost(timeline),
            )
        )
    return findings


RULE = Rule(
    code="priority-inversion",
    summary="more urgent requests waited while less urgent ones ran",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES}),
    find=_find,
    specific=True,
    proven=(("max_num_seqs", "max_num_seqs"),),
)
