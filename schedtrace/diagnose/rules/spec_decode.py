"""``spec-decode``: verifying drafts costs more than they save, or fewer and fewer drafts are accepted."""

import math
from typing import NamedTuple

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import Cost, StepExample, advise, share_of_requests, step_finding
from schedtrace.model.causes import Cause
from schedtrace.model.message import Message, joined
from schedtrace.model.report import Advice, Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

FEWEST_STEPS = 20
LEAST_CHANGE = 0.02
"""Least relative change that exceeds the variation between runs."""
FEWEST_REQUESTS = 20
"""Fewest finished requests in whose order a trend is looked for."""
CERTAIN = 4.0
"""Least number of standard deviations by which a rank correlation differs from chance."""
LEAST_FALL = 0.1
"""Least part of the tokens per step and request that falling acceptance takes away."""


class DraftStep(StepExample, kw_only=True):
    """Step that verified drafts."""

    total_requests: int
    """Number of requests that the step scheduled."""
    draft_tokens: int
    """Number of tokens that were drafted."""
    output_tokens: int
    """Number of output tokens."""
    busy_us: int
    """Time from the step's start to its output."""


class SpecDecode(Evidence, kw_only=True):
    """Cost and benefit of drafts in steps without prefill."""

    method: str | None
    """Drafting method; None: not recorded."""
    num_speculative_tokens: int | None
    """Tokens drafted per step and request; None: not recorded."""
    draft_tokens: int
    """Tokens drafted in these steps."""
    accepted_tokens: int
    """Tokens accepted: ``output_tokens - total_requests``."""
    acceptance_frac: float
    """Share of the draft tokens that were accepted."""
    early_frac: float | None
    """The same for the first quarter of the finished requests; None: acceptance does not fall over time."""
    late_frac: float | None
    """The same for the last quarter."""
    wasted_frac: float
    """Share of the steps' scheduled tokens that were rejected drafts."""
    verify_us_per_token: float
    """Time that a decode token adds to a step."""
    output_tokens_per_s: float
    """Output rate in these steps."""
    without_drafts_tokens_per_s: float
    """Output rate that the step-time model predicts without drafts."""
    draft_slot_steps: int
    """Number of steps that refused a request with cause ``input_budget``: some drafting methods take slots
    of the budget besides the tokens."""
    draft_slot_tokens: int
    """Token budget that was left in these steps."""
    examples: list[DraftStep]
    """Steps that took the longest."""


def _find(timeline: Timeline) -> Findings:
    model, steps = timeline.step_time, _draft_steps(timeline)
    if model is None or steps.height < FEWEST_STEPS or not model.per_decode_token_us:
        return
    requests, drafts, output, busy_us = (
        int(steps[name].sum()) for name in ("total_requests", "draft_tokens", "output_tokens", "busy_us")
    )
    plain_us = busy_us - model.per_decode_token_us * drafts
    if plain_us <= 0:
        return
    rate, plain_rate = output / busy_us * 1e6, requests / plain_us * 1e6
    change = plain_rate / rate - 1 if rate else 0.0
    loses = change > max(LEAST_CHANGE, model.error_frac)
    accepted = max(0, output - requests)
    fall = _falling_acceptance(timeline, drafts / requests)
    if not loses and fall is None:
        return
    of_slots = timeline.exits.filter("refusal").filter(pl.col("cause") == str(Cause.INPUT_BUDGET))
    settings = timeline.header.settings
    evidence = SpecDecode(
        method=settings.get("speculative_config.method"),
        num_speculative_tokens=settings.get("speculative_config.num_speculative_tokens"),
        draft_tokens=drafts,
        accepted_tokens=accepted,
        acceptance_frac=accepted / drafts,
        early_frac=None if fall is None else fall.early,
        late_frac=None if fall is None else fall.late,
        wasted_frac=(drafts - accepted) / int(steps["used_tokens"].sum()),
        verify_us_per_token=model.per_decode_token_us,
        output_tokens_per_s=rate,
        without_drafts_tokens_per_s=plain_rate,
        draft_slot_steps=of_slots["step"].n_unique(),
        draft_slot_tokens=int(of_slots.unique("step", keep="last")["budget_left"].sum()),
        examples=DraftStep.largest(steps, "busy_us"),
    )
    speed = rate / plain_rate if loses or fall is None else fall.speed(accepted / drafts)
    lost_us = busy_us * (1 - speed)
    yield step_finding(
        timeline,
        steps,
        evidence,
        title="Drafts cost more than they give" if loses else "Fewer and fewer drafts are accepted",
        verdict="Speculative decoding slows this run: {acceptance_frac:%} of its draft tokens are "
        "accepted, and decode steps would finish {change:%} more tokens a second without them."
        if loses
        else "Speculative decoding gets worse over time: {early_frac:%} of the draft tokens of the first "
        "quarter of the requests were accepted, {late_frac:%} of those of the last quarter.",
        share_frac=_share(timeline, steps, speed),
        holder=_holder(evidence),
        tokens=drafts - accepted,
        message="{steps:n step} without prefill verified {draft_tokens:n draft token} and accepted "
        "{accepted_tokens:n}. By the model of step times, a draft token takes {verify_us_per_token:us}; "
        "the drafter's own time is not in the trace"
        + (", so the loss is at least this." if loses else ".")
        + "[ Acceptance falls with the order in which requests finish, from {early:%} of the first quarter "
        "to {late_frac:%} of the last.]",
        values={"change": change, "early": evidence.early_frac if loses else None},
        advice=_advice(evidence, loses=loses),
        example="{at} verified {draft_tokens:n draft token} for {total_requests:n request} in "
        "{busy_us:us} and finished {output_tokens:n token}.",
        cost=Cost(lost_us / 1e3, lost_us / timeline.busy_us, model.error_frac if loses else None),
    )


class _Fall(NamedTuple):
    """Acceptance that falls over time."""

    early: float
    """Share of the draft tokens of the first quarter of the finished requests that were accepted."""
    late: float
    """The same for the last quarter."""
    drafts: float
    """Draft tokens per step and request."""

    def speed(self, accepted: float) -> float:
        """Return the part of the tokens of the early acceptance that another acceptance gives."""
        return (1 + self.drafts * accepted) / (1 + self.drafts * self.early)


def _falling_acceptance(timeline: Timeline, drafts: float) -> _Fall | None:
    """Return the acceptance of early and late requests if it falls with their order, beyond chance."""
    finishes = timeline.finishes
    if not {"drafts", "drafts_accepted"} <= {*finishes.columns}:
        return None
    tried = finishes.filter(pl.col("drafts") > 0).sort("step", maintain_order=True)
    if tried.height < FEWEST_REQUESTS:
        return None
    order = pl.int_range(pl.len())
    accepted = (pl.col("drafts_accepted") / pl.col("drafts")).rank()
    correlation = tried.select(pl.corr(order, accepted)).item()
    if correlation is None or -correlation * math.sqrt(tried.height - 1) < CERTAIN:  # NaN if all are alike
        return None
    quarter = tried.height // 4
    early, late = (
        int(part["drafts_accepted"].sum()) / int(part["drafts"].sum())
        for part in (tried.head(quarter), tried.tail(quarter))
    )
    fall = _Fall(early, late, drafts)
    return fall if 1 - fall.speed(late) >= LEAST_FALL else None


def _advice(evidence: SpecDecode, *, loses: bool) -> list[Advice]:
    """Return the advice: run without drafts if they cost time, and try what shows why acceptance falls."""
    advice = []
    if loses:
        advice += [
            advise(
                "Run without {option}[ (now {method} with {num_speculative_tokens:n token})].",
                evidence,
                setting="speculative_config",
                costs="Requests whose drafts are accepted often get slower.",
            ),
            advise(
                "Or draft fewer tokens with {tokens:setting}: later drafts are accepted less often.",
                tokens="num_speculative_tokens",
            ),
        ]
    if evidence.late_frac is not None:
        advice.append(
            advise(
                "Send requests of the beginning again, then once more after a reset of the prefix cache and "
                "after a restart. If acceptance is still low, their texts are no reason, so the drafter's "
                "state is; if it is high at once, later texts are harder to draft."
            )
        )
    return advice


def _draft_steps(timeline: Timeline) -> pl.DataFrame:
    """Return the steps that verified draft tokens and prefilled nothing, and whose output is known."""
    return timeline.steps.filter(
        (pl.col("draft_tokens") > 0)
        & (pl.col("prefill_tokens") == 0)
        & (pl.col("recomputed_tokens").fill_null(0) == 0)
        & (pl.col("busy_us") > 0)
        & pl.col("output_tokens").is_not_null()
    )


def _share(timeline: Timeline, steps: pl.DataFrame, slower: float) -> float:
    """Return the share of the requests' time, waits included, that the same tokens undrafted would save."""
    running = pl.max_horizontal("num_running_after", "total_requests")
    present = running + pl.col("num_waiting_after").fill_null(0)
    felt_us = int(steps.select((pl.col("busy_us") * present).sum()).item())
    return share_of_requests(timeline, felt_us * (1 - slower)) or 0.0


def _holder(evidence: SpecDecode) -> Message:
    wasted = say("Rejected drafts are {wasted_frac:%} of the tokens that these steps computed.", evidence)
    if not evidence.draft_slot_steps:
        return wasted
    slots = say(
        "Slots for the drafter ended the batch in {draft_slot_steps:n step}, with "
        "{draft_slot_tokens:n token} of the token budget left.",
        evidence,
    )
    return joined([wasted, slots])


RULE = Rule(
    code="spec-decode",
    summary="so few draft tokens are accepted that verifying them costs more than they give",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES, Fact.CONFIG}),
    find=_find,
)
