"""``interruption``: the engine was paused, did something else, or took far too long for a step."""

import polars as pl

from schedtrace.diagnose.rule import Rule, Threshold, share_frac
from schedtrace.diagnose.rules.common import (
    StepExample,
    severity_by_weight,
    step_numbers,
    trial_numbers,
)
from schedtrace.diagnose.step_groups import slow_groups
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Count, Duration, Message, Number, Steps
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline import events
from schedtrace.timeline.pieces import LENGTH_US
from schedtrace.timeline.timeline import Timeline

CODE = "interruption"

LEAST_FRAC = 0.01
"""Of the requests' time: what is less moves none of their latencies."""

WHOLE_FROM = 10.0
"""Times as long: so far with a decimal."""

WHERE = {
    "device": "on the device",
    "schedule": "in schedule()",
    "update": "in update_from_output()",
    "host_gap": "in the engine process, between two steps",
}
"""``part`` of an event, in words."""


class Interruption(StepExample, kw_only=True):
    """One of them: ``step`` is the slow step, or the first one afterwards."""

    begin_us: int
    length_us: int
    part: str
    factor: float | None


class Interruptions(Evidence, kw_only=True):
    """All of one kind."""

    kind: str
    first_step: int | None
    last_step: int | None
    times: int
    time_ms: float
    requests_ms: float
    requests: int
    longest_request: str
    part: str
    factor: float | None
    detail: str | None
    period_steps: float | None
    period_ms: float | None
    examples: list[Interruption]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/interruption.md``."""
    found = timeline.events
    if found.is_empty() or not timeline.requests_us:
        return []
    kinds = [(str(kind), rows) for (kind,), rows in found.group_by("kind", maintain_order=True)]
    findings = [
        _finding(timeline, kind, rows) for kind, rows in kinds if not _explained(timeline, kind, rows)
    ]
    return [finding for finding in findings if (finding.share_frac or 0) >= LEAST_FRAC]


def _explained(timeline: Timeline, kind: str, rows: pl.DataFrame) -> bool:
    """Whether these steps are slow for what they share, which is ``slow-steps``'s."""
    if kind not in (events.SCATTERED, events.EPISODE, events.SLOWER):
        return False
    shared = slow_groups(timeline)[:1]
    members = shared[0].steps["step"].implode() if shared else pl.Series([[]], dtype=pl.List(pl.Int64))
    return 2 * rows.filter(pl.col("step").is_in(members)).height > rows.height


def _finding(timeline: Timeline, kind: str, rows: pl.DataFrame) -> Finding:
    requests = events.kept(timeline, rows)
    cost_us, time_us = events.cost_us(timeline, rows), int(rows.select(LENGTH_US.sum()).item())
    share = min(1.0, cost_us / timeline.requests_us)
    longest = rows.with_columns(length_us=LENGTH_US).sort("length_us", "begin_us", descending=[True, False])
    examples = Interruption.first(longest.drop_nulls("step"))
    parts = (
        rows.group_by("part").agg(LENGTH_US.sum().alias("us")).sort("us", "part", descending=[True, False])
    )
    period_us = rows["period_us"].mean()
    evidence = Interruptions(
        kind=kind,
        first_step=rows["step"].min(),  # type: ignore[arg-type]  # of integers
        last_step=rows["step"].max(),  # type: ignore[arg-type]  # likewise
        times=rows.height,
        time_ms=time_us / 1e3,
        requests_ms=cost_us / 1e3,
        requests=len(requests),
        longest_request=requests[0] if requests else "",
        part=str(parts["part"][0]),
        factor=None if (factor := rows["factor"].median()) is None else float(factor),  # type: ignore[arg-type]
        detail=rows["detail"].drop_nulls().mode().sort().first(),  # type: ignore[arg-type]  # a string
        period_steps=rows["period_steps"].mean(),  # type: ignore[arg-type]  # of numbers
        period_ms=None if period_us is None else float(period_us) / 1e3,  # type: ignore[arg-type]
        examples=examples,
    )
    return Finding(
        code=CODE,
        severity=severity_by_weight(None, share),
        title=_title(evidence),
        verdict=say("{what}: {share:%} of the requests' time.", what=_what(evidence, time_us), share=share),
        share_frac=share,
        holder=NOTHING,
        cause=kind,
        via="recorded",
        engine_rank=timeline.rank,
        count=rows.height,
        trials=trial_numbers(rows),
        steps=step_numbers(rows.drop_nulls("step")),
        tokens=0,
        message=_message(evidence),
        advice=_advice(evidence),
        evidence=evidence,
        example=_described(examples[0]) if examples else None,
        cost_ms=time_us / 1e3,
        cost_frac=time_us / timeline.busy_us,
    )


def _title(evidence: Interruptions) -> Message:  # noqa: PLR0911  # one kind a line
    match evidence.kind:
        case events.PAUSED:
            return say("The scheduler was paused")
        case events.ASLEEP:
            return say("The engine was asleep, or on its way")
        case events.CALLED:
            return say("Other calls kept the engine busy")
        case events.NO_CALL:
            return say("No schedule() call while requests waited")
        case events.FIRST:
            return say("The first steps are slow")
        case events.PERIODIC:
            return say("Periodic slow steps")
        case events.EPISODE:
            return say("Slow steps in a row")
        case events.SLOWER:
            return say("The device was slower for a time")
        case _:
            return say("Slow steps now and then")


def _what(evidence: Interruptions, time_us: int) -> Message:  # noqa: PLR0911  # likewise
    """What happened: the begin of the verdict."""
    time, steps = Duration(time_us), Count(evidence.times, "step")
    times = NOTHING if evidence.times == 1 else say(" {n:n time}", n=evidence.times)
    waited = Count(evidence.requests, "request")
    where = WHERE[evidence.part]
    longer = say("{factor} times as long as its work explains", factor=_factor(evidence))
    match evidence.kind:
        case events.PAUSED:
            return say(
                "The scheduler was paused{times} for {time}, and {waited} waited",
                times=times,
                time=time,
                waited=waited,
            )
        case events.ASLEEP:
            return say(
                "The engine went to sleep or woke up{times}, which took {time} while {waited} waited",
                times=times,
                time=time,
                waited=waited,
            )
        case events.CALLED:
            return say(
                "The engine's thread ran {call:code} for {time} instead of steps while {waited} waited",
                call=evidence.detail or "a call",
                time=time,
                waited=waited,
            )
        case events.NO_CALL:
            return say(
                "The engine did not call schedule() for {time}{times} while {waited} waited",
                time=time,
                times=times,
                waited=waited,
            )
        case events.FIRST:
            first = say("{steps}", steps=steps) if evidence.times > 1 else say("step")
            return say(
                "The first {first} took {time} longer {where} than the same work later, {factor} times as "
                "long",
                first=first,
                time=time,
                where=where,
                factor=_factor(evidence),
            )
        case events.PERIODIC:
            return say(
                "Every {period} one is slow {where}: {steps} took {longer}, {time} in total",
                period=_period(evidence),
                where=where,
                steps=steps,
                longer=longer,
                time=time,
            )
        case events.SLOWER:
            return say(
                "The device was slower in {which}: they took {factor} times as long as the same work in "
                "other steps, {time} in total",
                which=Steps(evidence.first_step or 0, evidence.last_step or 0),
                factor=_factor(evidence),
                time=time,
            )
        case events.EPISODE:
            return say(
                "{steps} in a row took {longer} {where}, {time} in total",
                steps=steps,
                longer=longer,
                where=where,
                time=time,
            )
        case _:
            return say(
                "{steps} took {longer} {where}, {time} in total",
                steps=steps,
                longer=longer,
                where=where,
                time=time,
            )


def _factor(evidence: Interruptions) -> Number:
    factor = evidence.factor or 1.0
    return Number(factor, 0 if factor >= WHOLE_FROM else 1)


def _period(evidence: Interruptions) -> Message:
    if evidence.period_steps is not None:
        return say("{n:n step}", n=round(evidence.period_steps))
    return say("{time:us}", time=1e3 * (evidence.period_ms or 0))


def _message(evidence: Interruptions) -> Message:
    lost = say(
        "{requests:n request} lost {time:us} in total, {longest:id} the most.",
        requests=evidence.requests,
        time=1e3 * evidence.requests_ms,
        longest=evidence.longest_request,
    )
    longest = evidence.examples[0] if evidence.examples else None
    if longest is None:
        return lost
    where = say(
        " The longest took {time:us}{more}, {step}.",
        time=longest.length_us,
        more=NOTHING if evidence.kind in _BETWEEN else say(" more than expected"),
        step=(
            say("before {at}", at=longest.at) if evidence.kind in _BETWEEN else say("in {at}", at=longest.at)
        ),
    )
    state = NOTHING
    if evidence.kind == events.PAUSED and evidence.detail == "PAUSED_NEW":
        state = say(" Requests that ran went on; new ones were not admitted.")
    return say("{lost}{where}{state}", lost=lost, where=where, state=state)


_BETWEEN = (events.PAUSED, events.ASLEEP, events.CALLED, events.NO_CALL)


def _advice(evidence: Interruptions) -> list[Advice]:  # noqa: PLR0911  # likewise
    """What to look at: no setting of the scheduler helps."""
    match evidence.kind, evidence.part:
        case (events.PAUSED, _):
            return [Advice(message=say("Nothing to tune: a client asked for the pause."))]
        case (events.ASLEEP | events.CALLED, _):
            return [Advice(message=say("Send requests to another engine meanwhile: a client asked for it."))]
        case (events.FIRST, _):
            return [
                Advice(
                    message=say(
                        "Send a few requests as a warm-up before the load: first steps compile kernels, "
                        "capture graphs or load code."
                    )
                )
            ]
        case (events.SLOWER, _):
            return [
                Advice(
                    message=say(
                        "Look at the device's clocks, power limit and temperature, and at who else used it "
                        "then: no setting of the scheduler changes that."
                    )
                )
            ]
        case (events.PERIODIC, "device"):
            return [
                Advice(message=say("Profile one of these steps on the device; look for what else uses it."))
            ]
        case (_, "device"):
            return [Advice(message=say("Profile one of these steps: the trace does not see inside a step."))]
        case _:
            return [
                Advice(
                    message=say(
                        "Look for garbage collection of Python in the engine process, and for other work on "
                        "its processor."
                    )
                )
            ]


def _described(example: Interruption) -> Message:
    return say(
        "{time:us}, {begin:us} into the recording ({step}).",
        time=example.length_us,
        begin=example.begin_us,
        step=example.at,
    )


RULE = Rule(
    code=CODE,
    summary="the scheduler was paused, the engine did something else, or some steps took far too long; one "
    "per kind",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES, Fact.QUEUE}),
    find=find,
    specific=True,
    threshold=Threshold(LEAST_FRAC, share_frac),
)
