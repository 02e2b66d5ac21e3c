"""``other-limit``: requests waited for a limit that no other rule is about: one finding per cause."""

import polars as pl

from schedtrace.diagnose.limit_holders import holder_of
from schedtrace.diagnose.rules.allowed import batched_tokens
from schedtrace.diagnose.rules.common import wait_finding
from schedtrace.diagnose.waits import Charged, charged, mean
from schedtrace.model.causes import ASKED_FOR, CAUSES, Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import (
    NOTHING,
    CauseWord,
    Code,
    Count,
    Duration,
    Message,
    Number,
    Request,
    Setting,
    Share,
    message,
)
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.vocabulary import advice, reason
from schedtrace.timeline.charges import CHARGES as NAMED
from schedtrace.timeline.timeline import Timeline

CODE = "other-limit"
SUMMARY = (
    "requests waited for another limit: LoRA slots, a grammar, a KV transfer, the encoder, ...; one per cause"
)
NEEDS = (Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES)

OWN_RULES = (Cause.KV_BLOCKS, Cause.MAX_NUM_SEQS, Cause.TOKEN_BUDGET, Cause.INPUT_BUDGET)
"""Causes with a rule of their own."""


class LimitWait(Evidence, kw_only=True):
    """Waiting for one limit."""

    share_frac: float
    wait_ms: float
    requests: int
    longest_ms: float
    longest_request: str
    refused_steps: int
    steps: int
    mean_budget_left_frac: float | None


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/other-limit.md``."""
    if timeline.charges.is_empty():
        return []
    known = {*NAMED, *(str(cause) for cause in OWN_RULES)}
    causes = [cause for cause in timeline.charges["charge"].unique().sort().to_list() if cause not in known]
    return [finding for cause in causes for finding in _find(timeline, cause)]


def _find(timeline: Timeline, cause: str) -> list[Finding]:
    waits = charged(timeline, cause)
    if waits is None:
        return []
    header = timeline.header
    title = CAUSES[cause].entry.title if cause in CAUSES else ""
    known = timeline.exits.filter((pl.col("cause") == cause) & pl.col("refusal"))
    detail = known["detail"].drop_nulls().mode().sort().to_list()[:1] or [None]
    stalls = (waits.rows["state"] == "stalled").all()
    why = reason(header, loop="running" if stalls else "waiting", cause=cause, detail=detail[0])
    return [
        wait_finding(
            timeline,
            waits,
            code=CODE,
            title=message(title or "Waiting for {cause}", **({} if title else {"cause": CauseWord(cause)})),
            verdict=_verdict(waits, cause, why) if known.height else _unknown(waits),
            holder=_guard(known) if cause == Cause.OTHER else holder_of(timeline, cause, waits),
            cause=cause,
            message=message(
                "{refused} of {steps} refused or passed over a request for it; {requests} waited, "
                "{longest} the longest ({wait}).",
                refused=Number(known["step"].n_unique()),
                steps=Count(timeline.steps.height, "step"),
                requests=Count(waits.requests, "request"),
                longest=Request(waits.longest_id),
                wait=Duration(waits.longest_us),
            ),
            advice=_advice(timeline, cause, detail[0]) if known.height else [],
            evidence=LimitWait(
                share_frac=waits.share_frac,
                wait_ms=waits.time_us / 1e3,
                requests=waits.requests,
                longest_ms=waits.longest_us / 1e3,
                longest_request=waits.longest_id,
                refused_steps=known["step"].n_unique(),
                steps=timeline.steps.height,
                mean_budget_left_frac=mean(waits.steps, pl.col("remaining_budget") / pl.col("token_budget")),
            ),
        )
    ]


def _guard(known: pl.DataFrame) -> Message:
    """The condition of the scheduler that refused most of them."""
    told = known.filter(pl.col("guard").is_not_null() & pl.col("location").is_not_null())
    if told.is_empty():
        return NOTHING
    often = (
        told.group_by("guard", "location")
        .agg(pl.col("count").sum(), pl.col("values").drop_nulls().mode().sort().first())
        .sort("count", "location", descending=[True, False])
        .row(0, named=True)
    )
    return message(
        "Most often {guard} held at {place}{values}.",
        guard=Code(often["guard"]),
        place=Code(often["location"]),
        values=message(", with {values}", values=Code(often["values"])) if often["values"] else NOTHING,
    )


def _verdict(waits: Charged, cause: str, why: Message) -> Message:
    return message(
        "Requests spent {share} of their time waiting because {why} ({cause}).",
        share=Share(waits.share_frac),
        why=why,
        cause=CauseWord(cause),
    )


def _unknown(waits: Charged) -> Message:
    """No exit of the trace explains these waits, as with streaming sessions."""
    return message(
        "Requests spent {share} of their time waiting for something that the trace does not record.",
        share=Share(waits.share_frac),
    )


def _advice(timeline: Timeline, cause: str, detail: str | None) -> list[Advice]:
    """With a value where one is known to be legal; nothing where a client asked for the wait."""
    if cause in ASKED_FOR or cause == Cause.OTHER:
        return []
    match cause:
        case Cause.LORA_CAP:
            now = timeline.header.settings.get("lora_config.max_loras")
            adapters = timeline.arrivals["lora"].drop_nulls().n_unique()
            if isinstance(now, int) and adapters > now:
                return [_set("max_loras", now, adapters, message("Device memory for every further adapter."))]
        case (
            Cause.MAMBA_ALIGNMENT | Cause.PREFILL_LOOKAHEAD | Cause.ENCODER_BUDGET | Cause.SPEC_DECODE_PADDING
        ):
            now = batched_tokens(timeline)
            costs = message("Longer steps with prefills: a higher inter-token latency meanwhile.")
            if now and detail != "max_model_len":
                return [_set("max_num_batched_tokens", now, 2 * now, costs)]
        case Cause.CHUNKED_PREFILL_OFF:
            text = message(
                "{setting} (now off): the next prompt then takes what is left of a step's budget",
                setting=Setting("--enable-chunked-prefill"),
            )
            costs = message("Steps that mix prefills and decodes.")
            return [Advice(message=text, setting="enable_chunked_prefill", value=True, costs=costs)]
    return [Advice(message=advice(timeline.header, cause=cause, detail=detail))]


def _set(name: str, now: int, value: int, costs: Message) -> Advice:
    return Advice(
        message=message(
            "{setting} {value} (now {now})",
            setting=Setting(f"--{name.replace('_', '-')}"),
            value=Number(value),
            now=Number(now),
        ),
        setting=name,
        value=value,
        costs=costs,
    )
