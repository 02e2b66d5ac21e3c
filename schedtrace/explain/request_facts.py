"""Events of a request beside its scheduling: on its way in, in the caches, on its way out."""

from collections.abc import Iterator

import polars as pl

from schedtrace.explain.facts import MISSES, entries
from schedtrace.explain.rows import RequestRows, Row
from schedtrace.model.life import LifeEvent
from schedtrace.model.message import NOTHING, Count, Duration, Message, Number, joined, message


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
