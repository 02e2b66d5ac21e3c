"""The events of a request's life, in order: arrival, waits, chunks, decodes, preemptions, end."""

from collections.abc import Iterator
from itertools import groupby

import msgspec
import polars as pl

from schedtrace.explain.exit_sentences import preempted_for
from schedtrace.explain.request_rows import RequestRows, Row, Wait
from schedtrace.explain.step_facts import MISSES, entries
from schedtrace.model.life import LifeEvent
from schedtrace.model.message import NOTHING, Duration, Message, Request, joined
from schedtrace.model.say import say

SHORTEST_WAIT_MS = 0.05
"""A shorter wait is no wait: the next step scheduled it."""


def life_events(rows: RequestRows, waited: list[Wait]) -> list[LifeEvent]:
    """Everything from its arrival to its end; successive decodes are one event."""
    found = [
        *_arrival(rows),
        *request_facts(rows),
        *_computing(rows, waited),
        *_preemptions(rows),
        *_set_aside(rows),
        *_waits_in_vain(rows, waited),
        *_end(rows),
    ]
    return sorted(found, key=lambda event: event.at_ms)


def _arrival(rows: RequestRows) -> Iterator[LifeEvent]:
    came = rows.arrival
    if came is None:
        return
    most = came["max_tokens"]
    about = [
        say("{tokens:n prompt token}", tokens=came["prompt_tokens"]),
        NOTHING if most is None else say("at most {tokens:n} to generate", tokens=most),
        say("priority {priority:n}", priority=came["priority"]) if came["priority"] else NOTHING,
        say("LoRA {name:code}", name=came["lora"]) if came["lora"] else NOTHING,
    ]
    described = joined(about, ", ")
    if came["arrived_us"] is None:
        sentence = say("in the scheduler's queue: {about}", about=described)
        yield rows.event(came["queued_us"], "queued", sentence)
        return
    yield rows.event(came["arrived_us"], "arrived", say("at the front end: {about}", about=described))
    yield rows.event(came["queued_us"], "queued", say("in the scheduler's queue"))


def _computing(rows: RequestRows, waited: list[Wait]) -> Iterator[LifeEvent]:
    """Admissions, chunks of prefill, the first token, runs of decodes."""
    waits = {wait.left_step: wait for wait in waited}
    first_token = rows.first_token_us
    if first_token is not None:
        step = next((row["step"] for row in rows.scheduled if row["output_us"] == first_token), None)
        yield rows.event(first_token, "first_token", say("first token back"), step)
    for (work, _), group in groupby(rows.scheduled, key=_same_work):
        run = list(group)
        first = run[0]
        if first["phase"] != "running":
            again = first["phase"] == "resumed"
            sentence = _admitted(waits.get(first["step"]), again=again)
            yield rows.event(first["start_us"], "resumed" if again else "scheduled", sentence, first["step"])
        if work == "decode":
            yield _decodes(rows, run)
        else:
            for row in run:
                yield rows.event(row["start_us"], "chunk", _chunk(rows, row), row["step"])


def _same_work(row: Row) -> tuple[str, int]:
    """Decodes go together until the next preemption."""
    return (row["work"] or "decode", row["lost_tokens"])


def _chunk(rows: RequestRows, row: Row) -> Message:
    start, end = row["computed_tokens"], row["computed_tokens"] + row["scheduled_tokens"]
    lost, caps = row["lost_tokens"], rows.caps.get(row["step"], [])
    work = say(
        "{work} of {tokens:n token}",
        work=row["work"] or "computation",
        tokens=row["scheduled_tokens"],
    )
    if row["work"] == "recompute" and end > lost and lost < (row["prompt_tokens"] or 0):
        work = say(
            "recompute of {again:n} and prefill of {tokens:n token}",
            again=lost - start,
            tokens=end - lost,
        )
    cached = NOTHING
    if row["phase"] != "running" and start:
        cached = say(", {start:n} found in a cache", start=start)
    cut = joined([say("{cap:cause}", cap=cap) for cap in caps], ", ")
    return say(
        "{work}, to {end:n} of {whole:n}{cached}{cut}",
        work=work,
        end=end,
        whole=max(row["prompt_tokens"] or 0, lost, end),
        cached=cached,
        cut=say(", cut by {caps}", caps=cut) if caps else NOTHING,
    )


def _decodes(rows: RequestRows, run: list[Row]) -> LifeEvent:
    first, last = run[0], run[-1]
    drafts = sum(row["draft_tokens"] for row in run)
    steps = rows.timeline.steps.filter(
        (pl.col("step") >= first["step"]) & (pl.col("step") <= last["step"]) & (pl.col("total_requests") > 0)
    ).height
    without = NOTHING
    if steps > len(run):
        without = say(
            "; {steps:n step} between went without it{causes}",
            steps=steps - len(run),
            causes=_stalled_by(rows, first, last),
        )
    sentence = say(
        "decoded in {steps:n step}, {tokens:n token} scheduled{drafts}{without}",
        steps=len(run),
        tokens=sum(row["scheduled_tokens"] for row in run),
        drafts=say(", {drafts:n} of them drafts", drafts=drafts) if drafts else NOTHING,
        without=without,
    )
    event = rows.event(first["start_us"], "decode", sentence, first["step"])
    return msgspec.structs.replace(event, last_step=last["step"])


def _stalled_by(rows: RequestRows, first: Row, last: Row) -> Message:
    """The causes with which the running loop skipped it, with the number of steps of each."""
    causes = (
        rows.timeline.exits.filter(
            (pl.col("request_id") == rows.request_id)
            & (pl.col("loop") == "running")
            & pl.col("step").is_between(first["step"], last["step"])
        )
        .unique(["step", "cause"])
        .group_by("cause")
        .len()
        .sort("len", "cause", descending=[True, False])
    )
    each = [say("{steps:n} {cause:cause}", steps=steps, cause=cause) for cause, steps in causes.iter_rows()]
    return say(" ({causes})", causes=joined(each, ", ")) if each else NOTHING


def _admitted(wait: Wait | None, *, again: bool) -> Message:
    if wait is None or wait.wait_ms < SHORTEST_WAIT_MS:
        return say("scheduled {again}at once", again="again " if again else "")
    return say(
        "scheduled {again}after {waited:us} in the queue{causes}",
        again="again " if again else "",
        waited=wait.wait_ms * 1e3,
        causes=_causes_of(wait),
    )


def _causes_of(wait: Wait) -> Message:
    """``: 3 steps kv_blocks (9 ms)``; nothing where it did not wait through a step."""
    parts = [
        say(
            "{steps:n step} {cause:cause} ({waited:us})",
            steps=cause.steps,
            cause=cause.cause,
            waited=cause.wait_ms * 1e3,
        )
        for cause in wait.causes
    ]
    if wait.causes and wait.before_step_ms >= SHORTEST_WAIT_MS:
        before = Duration(wait.before_step_ms * 1e3)
        parts.append(say("{waited} until a step began", waited=before))
    return say(": {causes}", causes=joined(parts, ", ")) if parts else NOTHING


def _preemptions(rows: RequestRows) -> Iterator[LifeEvent]:
    for row in rows.preemptions:
        sentence = say(
            "preempted {reason}: {lost:n computed token} lost",
            reason=preempted_for(row, Request(row["for_request_id"] or "")),
            lost=row["lost_tokens"],
        )
        yield rows.event(row["start_us"], "preempted", sentence, row["step"])


def _set_aside(rows: RequestRows) -> Iterator[LifeEvent]:
    for row in rows.set_aside:
        held = row["blocks_held"]
        sentence = say(
            "set aside by its scheduler{held}",
            held=NOTHING if held is None else say(": it keeps {blocks:n KV block}", blocks=held),
        )
        yield rows.event(row["start_us"], "set_aside", sentence, row["step"])


def _waits_in_vain(rows: RequestRows, waited: list[Wait]) -> Iterator[LifeEvent]:
    """A wait that no step ended: it was aborted meanwhile, or the trace ends with it."""
    for wait in waited:
        if wait.left_step is None and wait.since_step is not None:
            sentence = say(
                "waited {waited:us} and was not scheduled{causes}",
                waited=wait.wait_ms * 1e3,
                causes=_causes_of(wait),
            )
            since_us = rows.begin_us + round(1e3 * wait.from_ms)
            yield rows.event(since_us, "waited", sentence, wait.since_step)


def _end(rows: RequestRows) -> Iterator[LifeEvent]:
    gone = rows.finish
    if gone is not None:
        sentence = say(
            "{status:code} with {tokens:n output token}",
            status=gone["status"],
            tokens=gone["output_tokens"],
        )
        yield rows.event(gone["finished_us"], "finished", sentence)


def request_facts(rows: RequestRows) -> Iterator[LifeEvent]:
    """Events, where the trace has them."""
    its = pl.col("request_id") == rows.request_id
    if rows.arrival is not None:
        yield from _received(rows, rows.arrival)
    for grammar in entries(rows.timeline, "grammars", its):
        yield rows.event(grammar["compiled_us"], "grammar", _grammar(grammar))
    for load in entries(rows.timeline, "kv_loads", its):
        yield rows.event(load["at_us"], "kv_load", _kv_load(load))
    for admitted in entries(rows.timeline, "admitted", its):
        if sentence := _cached(admitted):
            yield rows.event(admitted["start_us"], "cached", sentence, admitted["step"])
    if rows.finish is not None:
        yield from _left(rows, rows.finish)


def _received(rows: RequestRows, came: Row) -> Iterator[LifeEvent]:
    received, queued = came["received_us"], came["input_queue_us"]
    if received is not None and queued is not None:
        sentence = say(
            "received by the engine: {prepared:us} to prepare, {lay:us} in its input queue",
            prepared=queued - received,
            lay=max(0, came["queued_us"] - queued),
        )
        yield rows.event(received, "received", sentence)
    if asked := list(_asked_for(came)):
        sentence = say("asks for {features}", features=joined(asked, ", "))
        yield rows.event(came["queued_us"], "asked", sentence)


def _asked_for(came: Row) -> Iterator[Message]:
    if came["structured"]:
        yield say("structured output")
    for column, where in (("logprobs", "output"), ("prompt_logprobs", "prompt")):
        if came[column] is not None:
            yield say("{count:n} logprobs per {where} token", count=came[column], where=where)
    if came["min_tokens"]:
        yield say("at least {tokens:n token}", tokens=came["min_tokens"])
    if came["logit_bias"]:
        yield say("a bias on {tokens:n token}", tokens=came["logit_bias"])


def _grammar(grammar: Row) -> Message:
    waited = NOTHING
    if grammar["submitted_us"] is not None:
        waited_us = max(0, grammar["started_us"] - grammar["submitted_us"])
        waited = say(", after {waited:us} of waiting for a thread", waited=waited_us)
    return say(
        "its grammar {outcome} in {took:us}{waited}",
        outcome="failed to compile" if grammar["failed"] else "was compiled",
        took=grammar["compiled_us"] - grammar["started_us"],
        waited=waited,
    )


def _kv_load(load: Row) -> Message:
    holding = NOTHING
    if load["blocks"]:
        holding = say(", holding {blocks:n KV block}", blocks=sum(load["blocks"]))
    return say("KV load from elsewhere {event}{holding}", event=load["event"], holding=holding)


def _cached(admitted: Row) -> Message:
    if admitted["miss"] in MISSES:
        return say("found nothing in the prefix cache: {reason}", reason=MISSES[admitted["miss"]])
    if admitted["external_tokens"]:  # else the chunk says how many were found
        local = NOTHING
        if admitted["local_tokens"]:
            local = say(", {tokens:n} in the prefix cache", tokens=admitted["local_tokens"])
        return say(
            "found {tokens:n token} through a KV connector{local}",
            tokens=admitted["external_tokens"],
            local=local,
        )
    return NOTHING


def _left(rows: RequestRows, gone: Row) -> Iterator[LifeEvent]:
    if gone["abort_us"] is not None:
        yield rows.event(gone["abort_us"], "abort", say("its client's abort reached the engine"))
    if gone["drafts"]:
        invalid = NOTHING
        if gone["drafts_invalid"]:
            invalid = say(", {count:n} forbidden by the grammar", count=gone["drafts_invalid"])
        sentence = say(
            "{accepted:n} of {drafts:n draft token} accepted{invalid}",
            accepted=gone["drafts_accepted"],
            drafts=gone["drafts"],
            invalid=invalid,
        )
        yield rows.event(gone["finished_us"], "drafts", sentence)
