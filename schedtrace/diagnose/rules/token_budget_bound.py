"""``token-budget-bound``: requests waited for tokens of the steps' budget."""

import polars as pl

from schedtrace.diagnose.gains import fewer_steps, peak_requests, saturated, ttft_gain
from schedtrace.diagnose.rules.allowed import BATCHED_TOKENS, batched_tokens
from schedtrace.diagnose.rules.common import wait_finding
from schedtrace.diagnose.waits import Charged, charged
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import (
    NOTHING,
    Count,
    Duration,
    Message,
    Number,
    Request,
    Setting,
    Share,
    message,
)
from schedtrace.model.report import Advice, Evidence, Finding, Gain
from schedtrace.timeline.long_prompts import prefills
from schedtrace.timeline.timeline import Timeline

CODE = "token-budget-bound"
SUMMARY = "requests waited for tokens of the steps' budget (max_num_batched_tokens)"
NEEDS = (Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES)
CHARGES = (Cause.TOKEN_BUDGET, Cause.INPUT_BUDGET)

WORTH_FRAC = 0.10
"""The study's border: where twice the budget gains less, the device works on full steps."""


class TokenBudget(Evidence, kw_only=True):
    """Full steps, and what filled them."""

    share_frac: float
    wait_ms: float
    requests: int
    longest_ms: float
    longest_request: str
    full_steps: int
    steps: int
    token_budget: int
    decode_frac: float
    prefill_frac: float
    largest_prefill: str | None
    largest_prefill_frac: float | None
    draft_slots: int
    proposed: int


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/token-budget-bound.md``."""
    waits = charged(timeline, *CHARGES)
    if waits is None or not timeline.token_budget:
        return []
    evidence = _evidence(timeline, waits)
    gain = _gain(timeline, evidence, waits)
    full = gain is not None and gain.change_frac < WORTH_FRAC
    drafts = (
        int(waits.rows.filter(pl.col("charge") == Cause.INPUT_BUDGET)["time_us"].sum()) > waits.time_us / 2
    )
    return [
        wait_finding(
            timeline,
            waits,
            code=CODE,
            title=message("The steps are full") if full else message("Token budget too small"),
            verdict=_verdict(evidence, full=full),
            holder=_holder(evidence),
            gain=gain,
            cause=Cause.INPUT_BUDGET if drafts else Cause.TOKEN_BUDGET,
            message=message(
                "The budget was spent in {full} of {steps} while requests waited; {requests} waited, "
                "{longest} the longest ({wait}).",
                full=Number(evidence.full_steps),
                steps=Count(evidence.steps, "step"),
                requests=Count(waits.requests, "request"),
                longest=Request(waits.longest_id),
                wait=Duration(waits.longest_us),
            ),
            advice=[] if full else _advice(timeline, evidence, drafts=drafts),
            evidence=evidence,
        )
    ]


def _evidence(timeline: Timeline, waits: Charged) -> TokenBudget:
    steps = waits.steps
    used = max(1, int(steps["used_tokens"].sum()))
    decodes = int(steps["decode_tokens"].sum())
    ours = prefills(timeline).join(steps.select("step"), on="step", how="semi")
    each = (
        ours.group_by("request_id")
        .agg(pl.col("scheduled_tokens").sum())
        .sort("scheduled_tokens", "request_id", descending=[True, False])
    )
    prefill = max(1, int(each["scheduled_tokens"].sum()))
    wanted = int(
        steps.select((pl.col("used_tokens") + pl.col("waiting_tokens_after").fill_null(0)).max()).item() or 0
    )
    return TokenBudget(
        share_frac=waits.share_frac,
        wait_ms=waits.time_us / 1e3,
        requests=waits.requests,
        longest_ms=waits.longest_us / 1e3,
        longest_request=waits.longest_id,
        full_steps=steps.height,
        steps=timeline.steps.height,
        token_budget=timeline.token_budget,
        decode_frac=decodes / used,
        prefill_frac=1 - decodes / used,
        largest_prefill=each["request_id"][0] if each.height else None,
        largest_prefill_frac=int(each["scheduled_tokens"][0]) / prefill if each.height else None,
        draft_slots=max(0, batched_tokens(timeline) - timeline.token_budget),
        proposed=_proposed(batched_tokens(timeline), wanted),
    )


def _proposed(budget: int, wanted: int) -> int:
    """A power of two that holds what was wanted at once: at least twice the budget, at most about 8 times."""
    value = 1 << (2 * budget - 1).bit_length()
    while value < min(wanted, MOST_TIMES * budget):
        value *= 2
    return value


MOST_TIMES = 8
"""Further the linear model of step times is not to be trusted."""


def _gain(timeline: Timeline, evidence: TokenBudget, waits: Charged) -> Gain | None:
    """Full steps become fewer; each one less saves what a step costs besides its tokens."""
    room = evidence.token_budget * evidence.prefill_frac
    more = evidence.proposed - batched_tokens(timeline)
    if room <= 0:
        return None
    # The decodes of these steps have to be made all the same, as many at once as requests and seats allow.
    at_once = min(peak_requests(timeline), timeline.seats or peak_requests(timeline))
    decodes = int(waits.steps["decode_tokens"].sum()) / at_once
    kept = max(decodes, waits.steps.height * room / (room + more))
    gain = fewer_steps(timeline, waits.steps.height - kept)
    if gain is None or gain.change_frac < WORTH_FRAC or saturated(timeline):
        return gain
    return ttft_gain(timeline, waits)


def _verdict(evidence: TokenBudget, *, full: bool) -> Message:
    share = Share(evidence.share_frac)
    if full:
        return message(
            "The device is the limit: requests spent {share} of their time waiting for the token budget, "
            "but the steps are full and a larger budget would hardly raise throughput.",
            share=share,
        )
    return message(
        "The token budget limits this run: requests spent {share} of their time waiting for it ({budget} per "
        "step).",
        share=share,
        budget=Count(evidence.token_budget, "token"),
    )


def _holder(evidence: TokenBudget) -> Message:
    parts = message(
        "Decodes took {decode} of the tokens of these steps, prefills {prefill}",
        decode=Share(evidence.decode_frac),
        prefill=Share(evidence.prefill_frac),
    )
    largest = NOTHING
    if evidence.largest_prefill and (evidence.largest_prefill_frac or 0) >= 0.25:  # noqa: PLR2004  # a quarter
        largest = message(
            ", {request} {share} of these",
            request=Request(evidence.largest_prefill),
            share=Share(evidence.largest_prefill_frac),
        )
    slots = NOTHING
    if evidence.draft_slots:
        slots = message(
            "; {slots} of the budget are kept for drafts", slots=Count(evidence.draft_slots, "token")
        )
    return message("{parts}{largest}{slots}.", parts=parts, largest=largest, slots=slots)


def _advice(timeline: Timeline, evidence: TokenBudget, *, drafts: bool) -> list[Advice]:
    raise_it = Advice(
        message=message(
            "{setting} {value} (now {now})",
            setting=BATCHED_TOKENS,
            value=Number(evidence.proposed),
            now=Number(batched_tokens(timeline)),
        ),
        setting="max_num_batched_tokens",
        value=evidence.proposed,
        costs=message("Longer steps with prefills: a higher inter-token latency meanwhile."),
    )
    fewer = Advice(
        message=message("fewer drafts ({setting})", setting=Setting("num_speculative_tokens")),
        costs=message("Fewer tokens per step where drafts are accepted."),
    )
    return [raise_it, fewer] if drafts else [raise_it]
