"""What a trace says of a request beside its scheduling: on its way in, in the caches, on its way out."""

from collections.abc import Iterator

import polars as pl

from schedtrace.diagnose.rules.common import counted
from schedtrace.explain.request.chunks import event_of
from schedtrace.explain.request.rows import RequestRows, Row
from schedtrace.explain.step.facts import MISSES, entries
from schedtrace.model.life import LifeEvent


def facts(rows: RequestRows) -> Iterator[LifeEvent]:
    """Events, where the trace has them."""
    its = pl.col("request_id") == rows.request_id
    if rows.arrival is not None:
        yield from _received(rows, rows.arrival)
    for one in entries(rows.timeline, "grammars", its):
        yield _grammar(rows, one)
    for one in entries(rows.timeline, "kv_loads", its):
        blocks = f", holding {counted(sum(one['blocks']), 'KV block')}" if one["blocks"] else ""
        yield event_of(rows, one["at_us"], "kv_load", f"KV load from elsewhere {one['event']}{blocks}")
    for one in entries(rows.timeline, "admitted", its):
        if said := _cached(one):
            yield event_of(rows, one["start_us"], "cached", said, one["step"])
    if rows.finish is not None:
        yield from _left(rows, rows.finish)


def _received(rows: RequestRows, came: Row) -> Iterator[LifeEvent]:
    received, queued = came["received_us"], came["input_queue_us"]
    if received is not None and queued is not None:
        took_ms, lay_ms = (queued - received) / 1e3, max(0, came["queued_us"] - queued) / 1e3
        said = f"received by the engine: {took_ms:,.1f} ms to prepare, {lay_ms:,.1f} ms in its input queue"
        yield event_of(rows, received, "received", said)
    if asked := list(_asked_for(came)):
        yield event_of(rows, came["queued_us"], "asked", f"asks for {', '.join(asked)}")


def _asked_for(came: Row) -> Iterator[str]:
    if came["structured"]:
        yield "structured output"
    if came["logprobs"] is not None:
        yield f"{came['logprobs']} logprobs per output token"
    if came["prompt_logprobs"] is not None:
        yield f"{came['prompt_logprobs']} logprobs per prompt token"
    if came["min_tokens"]:
        yield f"at least {counted(came['min_tokens'], 'token')}"
    if came["logit_bias"]:
        yield f"a bias on {counted(came['logit_bias'], 'token')}"


def _grammar(rows: RequestRows, one: Row) -> LifeEvent:
    took_ms = (one["compiled_us"] - one["started_us"]) / 1e3
    said = f"its grammar {'failed to compile' if one['failed'] else 'was compiled'} in {took_ms:,.1f} ms"
    if one["submitted_us"] is not None:
        said += (
            f", after {max(0, one['started_us'] - one['submitted_us']) / 1e3:,.1f} ms of waiting for a thread"
        )
    return event_of(rows, one["compiled_us"], "grammar", said)


def _cached(one: Row) -> str:
    if one["miss"] in MISSES:
        return f"found nothing in the prefix cache: {MISSES[one['miss']]}"
    if one["external_tokens"]:  # else the chunk says how many were found
        local = f", {one['local_tokens']:,} in the prefix cache" if one["local_tokens"] else ""
        return f"found {counted(one['external_tokens'], 'token')} through a KV connector{local}"
    return ""


def _left(rows: RequestRows, gone: Row) -> Iterator[LifeEvent]:
    if gone["abort_us"] is not None:
        yield event_of(rows, gone["abort_us"], "abort", "its client's abort reached the engine")
    if gone["drafts"]:
        invalid = f", {gone['drafts_invalid']:,} forbidden by the grammar" if gone["drafts_invalid"] else ""
        said = f"{gone['drafts_accepted']:,} of {counted(gone['drafts'], 'draft token')} accepted{invalid}"
        yield event_of(rows, gone["finished_us"], "drafts", said)
