"""``refused-at-door``: the front end turned requests away before any engine saw them."""

from collections import Counter

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import seats_cost
from schedtrace.diagnose.rules.common import advise, listed, severity, step_finding
from schedtrace.model.manifest import RequestRefusal
from schedtrace.model.message import NOTHING, Message, Steps
from schedtrace.model.report import Advice, Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.request_states import refused_states as waits_for_a_cause
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.timeline.timeline import Timeline

LEADS_FROM_FRAC = 0.05
"""Minimum share of refused requests at which the finding leads the report."""
CRITICAL_FRAC = 0.25
"""Minimum share of refused requests for a critical finding."""


class AtDoor(Evidence, kw_only=True):
    """Requests that the front end turned away."""

    refused: int
    """Number of requests that were turned away."""
    refused_frac: float
    """Share of ``refused`` in all requests that were turned away or reached an engine."""
    by_reason: dict[str, int]
    """Number of requests that were turned away, by limit."""
    waited_for: dict[str, float]
    """Share of the time that requests waited in the engine's queue between the first and the last refusal, by
    cause; empty: no request waited."""


def _find(timeline: Timeline) -> Findings:
    """Yield the finding about the front end's refusals, which rank 0 reports for all ranks."""
    refused = _refused(timeline)
    if not refused or timeline.front_end is None:
        return
    anchor = timeline.header.wall_anchor_us
    first_us, last_us = refused[0].at_unix_us - anchor, refused[-1].at_unix_us - anchor
    evidence = AtDoor(
        refused=len(refused),
        refused_frac=len(refused) / (len(refused) + timeline.front_end.arrived),
        by_reason=dict(Counter(line.reason for line in refused).most_common()),
        waited_for=_waited_for(timeline, first_us, last_us),
    )
    ends = pl.coalesce("output_us", "end_us")
    in_progress = (pl.col("start_us") <= last_us) & (ends >= first_us)
    steps = timeline.steps.sort("start_us").filter(in_progress)[["step", "trial"]]
    limits = {
        reason: say(
            "{limit:setting}{now}",
            limit=reason,
            now=NOTHING if (value := _value(timeline, reason)) is None else say(" ({value:n})", value=value),
        )
        for reason in evidence.by_reason
    }
    reasons = [
        say("{requests:n request} by {limit}", requests=count, limit=limits[reason])
        for reason, count in evidence.by_reason.items()
    ]
    yield step_finding(
        timeline,
        steps,
        evidence,
        severity=severity(evidence.refused_frac, LEADS_FROM_FRAC, CRITICAL_FRAC),
        title="Requests turned away at the door",
        verdict="The front end turned {refused_frac:%} of the requests away ({refused:n}): {limits}.",
        holder=_holder(evidence),
        leads=evidence.refused_frac >= LEADS_FROM_FRAC,
        count=evidence.refused,
        message="Turned away within {span:us}, before an engine saw them: {reasons}.",
        values={
            "limits": listed([*limits.values()]),
            "reasons": listed(reasons),
            "span": last_us - first_us,
        },
        advice=[_advice(timeline, reason) for reason in evidence.by_reason],
        example=say("no step ran meanwhile.")
        if steps.is_empty()
        else say(
            "during {steps}, the front end turned requests away.",
            steps=Steps(steps["step"][0], steps["step"][-1]),
        ),
    )


def _refused(timeline: Timeline) -> list[RequestRefusal]:
    """Return the refusals after the warm-up; empty except at rank 0, which has those of all ranks."""
    first_us = timeline.known_requests.select(pl.coalesce("arrived_us", "queued_us").min()).item()
    if timeline.front_end is None or timeline.rank or first_us is None:
        return []
    first_us += timeline.header.wall_anchor_us
    return [line for line in timeline.front_end.refused if line.at_unix_us >= first_us]


def _waited_for(timeline: Timeline, first_us: int, last_us: int) -> dict[str, float]:
    rows = (
        waits_for_a_cause(timeline.request_states)
        .with_columns(pl.col("begin_us", "end_us").clip(first_us, max(last_us, first_us + 1)))
        .group_by("cause")
        .agg(LENGTH_US.sum().alias("us"))
        .filter(pl.col("us") > 0)
        .sort("us", "cause", descending=[True, False])
    )
    total = rows["us"].sum()
    return {cause: us / total for cause, us in rows.iter_rows()}


def _value(timeline: Timeline, limit: str) -> int | None:
    """Return the limit's current value; None if not recorded."""
    value = timeline.header.scheduler_config.get(limit)
    return value if isinstance(value, int) else None


def _holder(evidence: AtDoor) -> Message:
    if not evidence.waited_for:
        return say("Meanwhile no request waited in the engine's queue: none of its limits was reached.")
    cause, share = next(iter(evidence.waited_for.items()))
    return say(
        "Meanwhile the engine's queue waited for {cause:cause} ({share:%} of the waiting).",
        cause=cause,
        share=share,
    )


def _advice(timeline: Timeline, reason: str) -> Advice:
    """Return advice on the limit; a limit below the number of seats leaves some of them empty."""
    value = _value(timeline, reason)
    now = NOTHING if value is None else say(" (now {value:n})", value=value)
    if reason == "max_num_queued_reqs" and value is not None and value < timeline.seats:
        return advise(
            "Raise {option}{now} to {value:n} or more: it also counts running requests, so a limit below the "
            "number of seats keeps seats empty.",
            setting=reason,
            value=timeline.seats,
            now=now,
            costs=seats_cost(timeline),
        )
    return advise(
        "Raise {option}{now} if clients can rather wait than retry.",
        setting=reason,
        now=now,
        costs="The requests then wait in the queue: the time to first token grows.",
    )


RULE = Rule(
    code="refused-at-door",
    summary="the front end turned requests away: max_num_queued_reqs or max_num_queued_tokens was reached",
    needs=frozenset({Fact.TIMES, Fact.QUEUE, Fact.LIVES, Fact.CONFIG}),
    find=_find,
)
