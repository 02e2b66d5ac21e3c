"""The events of a request's life, in order: arrival, waits, chunks, decodes, preemptions, end."""

from collections.abc import Iterator
from itertools import groupby

import msgspec
import polars as pl

from schedtrace.explain.exit_sentences import preempted_for
from schedtrace.explain.request_rows import RequestRows, Row, Wait
from schedtrace.explain.step_facts import MISSES, entries
from schedtrace.model.life import LifeEvent
from schedtrace.model.message import (
    NOTHING,
    CauseWord,
    Code,
    Count,
    Duration,
    Message,
    Number,
    Request,
    joined,
    message,
)

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
        message("{tokens}", tokens=Count(came["prompt_tokens"], "prompt token")),
        NOTHING if most is None else message("at most {tokens} to generate", tokens=Number(most)),
        message("priority {priority}", priority=Number(came["priority"])) if came["priority"] else NOTHING,
        message("LoRA {name}", name=Code(came["lora"])) if came["lora"] else NOTHING,
    ]
    described = joined(about, ", ")
    if came["arrived_us"] is None:
        sentence = message("in the scheduler's queue: {about}", about=described)
        yield rows.event(came["queued_us"], "queued", sentence)
        return
    yield rows.event(came["arrived_us"], "arrived", message("at the front end: {about}", about=described))
    yield rows.event(came["queued_us"], "queued", message("in the scheduler's queue"))


def _computing(rows: RequestRows, waited: list[Wait]) -> Iterator[LifeEvent]:
    """Admissions, chunks of prefill, the first token, runs of decodes."""
    waits = {wait.left_step: wait for wait in waited}
    first_token = rows.first_token_us
    if first_token is not None:
        step = next((row["step"] for row in rows.scheduled if row["output_us"] == first_token), None)
        yield rows.event(first_token, "first_token", message("first token back"), step)
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
    work = message(
        "{work} of {tokens}",
        work=row["work"] or "computation",
        tokens=Count(row["scheduled_tokens"], "token"),
    )
    if row["work"] == "recompute" and end > lost and lost < (row["prompt_tokens"] or 0):
        work = message(
            "recompute of {again} and prefill of {tokens}",
            again=Number(lost - start),
            tokens=Count(end - lost, "token"),
        )
    cached = NOTHING
    if row["phase"] != "running" and start:
        cached = message(", {start} found in a cache", start=Number(start))
    cut = joined([message("{cap}", cap=CauseWord(cap)) for cap in caps], ", ")
    return message(
        "{work}, to {end} of {whole}{cached}{cut}",
        work=work,
        end=Number(end),
        whole=Number(max(row["prompt_tokens"] or 0, lost, end)),
        cached=cached,
        cut=message(", cut by {caps}", caps=cut) if caps else NOTHING,
    )


def _decodes(rows: RequestRows, run: list[Row]) -> LifeEvent:
    first, last = run[0], run[-1]
    drafts = sum(row["draft_tokens"] for row in run)
    steps = rows.timeline.steps.filter(
        (pl.col("step") >= first["step"]) & (pl.col("step") <= last["step"]) & (pl.col("total_requests") > 0)
    ).height
    without = NOTHING
    if steps > len(run):
        without = message(
            "; {steps} between went without it{causes}",
            steps=Count(steps - len(run), "step"),
            causes=_stalled_by(rows, first, last),
        )
    sentence = message(
        "decoded in {steps}, {tokens} scheduled{drafts}{without}",
        steps=Count(len(run), "step"),
        tokens=Count(sum(row["scheduled_tokens"] for row in run), "token"),
        drafts=message(", {drafts} of them drafts", drafts=Number(drafts)) if drafts else NOTHING,
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
    each = [
        message("{steps} {cause}", steps=Number(steps), cause=CauseWord(cause))
        for cause, steps in causes.iter_rows()
    ]
    return message(" ({causes})", causes=joined(each, ", ")) if each else NOTHING


def _admitted(wait: Wait | None, *, again: bool) -> Message:
    if wait is None or wait.wait_ms < SHORTEST_WAIT_MS:
        return message("scheduled {again}at once", again="again " if again else "")
    return message(
        "scheduled {again}after {waited} in the queue{causes}",
        again="again " if again else "",
        waited=Duration(wait.wait_ms * 1e3),
        causes=_causes_of(wait),
    )


def _causes_of(wait: Wait) -> Message:
    """``: 3 steps kv_blocks (9 ms)``; nothing where it did not wait through a step."""
    parts = [
        message(
            "{steps} {cause} ({waited})",
            steps=Count(cause.steps, "step"),
            cause=CauseWord(cause.cause),
            waited=Duration(cause.wait_ms * 1e3),
        )
        for cause in wait.causes
    ]
    if wait.causes and wait.before_step_ms >= SHORTEST_WAIT_MS:
        before = Duration(wait.before_step_ms * 1e3)
        parts.append(message("{waited} until a step began", waited=before))
    return message(": {causes}", causes=joined(parts, ", ")) if parts else NOTHING


def _preemptions(rows: RequestRows) -> Iterator[LifeEvent]:
    for row in rows.preemptions:
        sentence = message(
            "preempted {reason}: {lost} lost",
            reason=preempted_for(row, Request(row["for_request_id"] or "")),
            lost=Count(row["lost_tokens"], "computed token"),
        )
        yield rows.event(row["start_us"], "preempted", sentence, row["step"])


def _set_aside(rows: RequestRows) -> Iterator[LifeEvent]:
    for row in rows.set_aside:
        held = row["blocks_held"]
        sentence = message(
            "set aside by its scheduler{held}",
            held=NOTHING if held is None else message(": it keeps {blocks}", blocks=Count(held, "KV block")),
        )
        yield rows.event(row["start_us"], "set_aside", sentence, row["step"])


def _waits_in_vain(rows: RequestRows, waited: list[Wait]) -> Iterator[LifeEvent]:
    """A wait that no step ended: it was aborted meanwhile, or the trace ends with it."""
    for wait in waited:
        if wait.left_step is None and wait.since_step is not None:
            sentence = message(
                "waited {waited} and was not scheduled{causes}",
                waited=Duration(wait.wait_ms * 1e3),
                causes=_causes_of(wait),
            )
            since_us = rows.begin_us + round(1e3 * wait.from_ms)
            yield rows.event(since_us, "waited", sentence, wait.since_step)


def _end(rows: RequestRows) -> Iterator[LifeEvent]:
    gone = rows.finish
    if gone is not None:
        sentence = message(
            "{status} with {tokens}",
            status=Code(gone["status"]),
            tokens=Count(gone["output_tokens"], "output token"),
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
        sentence = message(
            "received by the engine: {prepared} to prepare, {lay} in its input queue",
            prepared=Duration(queued - received),
            lay=Duration(max(0, came["queued_us"] - queued)),
        )
        yield rows.event(received, "received", sentence)
    if asked := list(_asked_for(came)):
        sentence = message("asks for {features}", features=joined(asked, ", "))
        yield rows.event(came["queued_us"], "asked", sentence)


def _asked_for(came: Row) -> Iterator[Message]:
    if came["structured"]:
        yield message("structured output")
    for column, where in (("logprobs", "output"), ("prompt_logprobs", "prompt")):
        if came[column] is not None:
            yield message("{count} logprobs per {where} token", count=Number(came[column]), where=where)
    if came["min_tokens"]:
        yield message("at least {tokens}", tokens=Count(came["min_tokens"], "token"))
    if came["logit_bias"]:
        yield message("a bias on {tokens}", tokens=Count(came["logit_bias"], "token"))


def _grammar(grammar: Row) -> Message:
    waited = NOTHING
    if grammar["submitted_us"] is not None:
        waited_us = max(0, grammar["started_us"] - grammar["submitted_us"])
        waited = message(", after {waited} of waiting for a thread", waited=Duration(waited_us))
    return message(
        "its grammar {outcome} in {took}{waited}",
        outcome="failed to compile" if grammar["failed"] else "was compiled",
        took=Duration(grammar["compiled_us"] - grammar["started_us"]),
        waited=waited,
    )


def _kv_load(load: Row) -> Message:
    holding = NOTHING
    if load["blocks"]:
        holding = message(", holding {blocks}", blocks=Count(sum(load["blocks"]), "KV block"))
    return message("KV load from elsewhere {event}{holding}", event=load["event"], holding=holding)


def _cached(admitted: Row) -> Message:
    if admitted["miss"] in MISSES:
        return message("found nothing in the prefix cache: {reason}", reason=MISSES[admitted["miss"]])
    if admitted["external_tokens"]:  # else the chunk says how many were found
        local = NOTHING
        if admitted["local_tokens"]:
            local = message(", {tokens} in the prefix cache", tokens=Number(admitted["local_tokens"]))
        return message(
            "found {tokens} through a KV connector{local}",
            tokens=Count(admitted["external_tokens"], "token"),
            local=local,
        )
    return NOTHING


def _left(rows: RequestRows, gone: Row) -> Iterator[LifeEvent]:
    if gone["abort_us"] is not None:
        yield rows.event(gone["abort_us"], "abort", message("its client's abort reached the engine"))
    if gone["drafts"]:
        invalid = NOTHING
        if gone["drafts_invalid"]:
            invalid = message(", {count} forbidden by the grammar", count=Number(gone["drafts_invalid"]))
        sentence = message(
            "{accepted} of {drafts} accepted{invalid}",
            accepted=Number(gone["drafts_accepted"]),
            drafts=Count(gone["drafts"], "draft token"),
            invalid=invalid,
        )
        yield rows.event(gone["finished_us"], "drafts", sentence)
