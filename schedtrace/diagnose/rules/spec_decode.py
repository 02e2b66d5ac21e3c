"""``spec-decode``: so few drafts are accepted that verifying them costs more than they save."""

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import Cost, StepExample, advise, share_of_requests, step_finding
from schedtrace.model.causes import Cause
from schedtrace.model.message import Message, joined
from schedtrace.model.report import Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

FEWEST_STEPS = 20
LEAST_CHANGE = 0.02
"""Least relative change that exceeds the variation between runs."""


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
    if change <= max(LEAST_CHANGE, model.error_frac):
        return
    accepted = max(0, output - requests)
    slot_steps, slot_tokens = _draft_slots(timeline)
    settings = timeline.header.settings
    evidence = SpecDecode(
        method=settings.get("speculative_config.method"),
        num_speculative_tokens=settings.get("speculative_config.num_speculative_tokens"),
        draft_tokens=drafts,
        accepted_tokens=accepted,
        acceptance_frac=accepted / drafts,
        wasted_frac=(drafts - accepted) / int(steps["used_tokens"].sum()),
        verify_us_per_token=model.per_decode_token_us,
        output_tokens_per_s=rate,
        without_drafts_tokens_per_s=plain_rate,
        draft_slot_steps=slot_steps,
        draft_slot_tokens=slot_tokens,
        examples=DraftStep.largest(steps, "busy_us"),
    )
    lost_us = busy_us * (1 - rate / plain_rate)
    yield step_finding(
        timeline,
        steps,
        evidence,
        title="Drafts cost more than they give",
        verdict="Speculative decoding slows this run: {acceptance_frac:%} of its draft tokens are "
        "accepted, and decode steps would finish {change:%} more tokens a second without them.",
        share_frac=_share(timeline, steps, rate / plain_rate),
        holder=_holder(evidence),
        tokens=drafts - accepted,
        message="{steps:n step} without prefill verified {draft_tokens:n draft token} and accepted "
        "{accepted_tokens:n}. By the model of step times, a draft token takes {verify_us_per_token:us}; "
        "the drafter's own time is not in the trace, so the loss is at least this.",
        values={"change": change},
        advice=[
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
        ],
        example="{at} verified {draft_tokens:n draft token} for {total_requests:n request} in "
        "{busy_us:us} and finished {output_tokens:n token}.",
        cost=Cost(lost_us / 1e3, lost_us / timeline.busy_us, model.error_frac),
    )


def _draft_steps(timeline: Timeline) -> pl.DataFrame:
    """Return the steps that verified draft tokens and prefilled nothing, and whose output is known."""
    return timeline.steps.filter(
        (pl.col("draft_tokens") > 0)
        & (pl.col("prefill_tokens") == 0)
        & (pl.col("recomputed_tokens").fill_null(0) == 0)
        & (pl.col("busy_us") > 0)
        & pl.col("output_tokens").is_not_null()
    )


def _draft_slots(timeline: Timeline) -> tuple[int, int]:
    """Return the number of steps that draft slots ended (input budget), and the tokens left in them."""
    stopped = timeline.exits.filter("refusal").filter(pl.col("cause") == str(Cause.INPUT_BUDGET))
    return stopped["step"].n_unique(), int(stopped.unique("step", keep="last")["budget_left"].sum())


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
