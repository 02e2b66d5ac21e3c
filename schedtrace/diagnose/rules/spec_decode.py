"""``spec-decode``: drafts cost more than they save, are never verified, or are accepted less and less."""

import math
from typing import NamedTuple

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import PRESENT, advise, largest, share_of_requests, step_finding
from schedtrace.model.causes import Cause
from schedtrace.model.message import Message, joined
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.step_time import fit_bent_time
from schedtrace.timeline.timeline import Timeline, made_once

FEWEST_STEPS = 20
LEAST_CHANGE = 0.02
"""Minimum relative change that exceeds the variation between runs."""
FEWEST_REQUESTS = 20
"""Minimum number of finished requests that can show a trend from the first to the last."""
CERTAIN = 4.0
"""Minimum number of standard deviations by which a rank correlation must differ from 0."""
ALIKE = 0.8
"""Minimum rank correlation at which two orders of the requests count as about the same."""
LEAST_FALL = 0.1
"""Minimum share of the tokens per step and request that falling acceptance must take away."""
LEAST_ABOVE = 0.2
"""Minimum gain of large batches without drafts: if the number of drafts depends on the batch size, vLLM loses
the full CUDA graphs of decode steps."""
LEAST_ABOVE_FRAC = 0.05
"""Minimum share of the busy time that drafts must cost large batches, and save small ones."""
DOUBTFUL_FRAC = 0.25
"""Largest share of a decode step that drafters usually take: if drafts pay only for drafters that are faster,
they may be a loss. The trace does not show the drafter's own time."""
BETTER = 0.5
"""Maximum ratio of the error of the model with a bend to that of the linear model at which the bend is used.
"""
ONE_TOKEN_FRAC = 0.9
"""Minimum share of requests that end with their first token for drafts to be reported as never verified."""
DRAFTED = "speculative_config.num_speculative_tokens"
PER_BATCH = "num_speculative_tokens_per_batch_size"


class SpecDecode(Evidence, kw_only=True):
    """Cost and benefit of drafts in steps without prefill."""

    method: str | None
    """Drafting method; None: not recorded."""
    num_speculative_tokens: int | None
    """Number of tokens drafted per step and request; None: not recorded."""
    draft_tokens: int
    """Number of tokens drafted in the judged steps without prefill."""
    accepted_tokens: int
    """Number of tokens accepted: ``output_tokens - total_requests``."""
    acceptance_frac: float
    """Share of the draft tokens that were accepted."""
    early_frac: float | None
    """Share of draft tokens accepted in the first quarter of the finished requests, ordered by their ends or,
    with ``short_tokens``, by the lengths of their prompts; None: acceptance does not fall."""
    late_frac: float | None
    """Share of draft tokens accepted in the last quarter of the finished requests; None if ``early_frac`` is.
    """
    short_tokens: int | None
    """Longest prompt of the quarter with the shortest prompts; None: acceptance does not fall with length."""
    long_tokens: int | None
    """Shortest prompt of the quarter with the longest prompts; None if ``short_tokens`` is."""
    wasted_frac: float
    """Share of the steps' scheduled tokens that were rejected drafts."""
    verify_us_per_token: float
    """Time in microseconds that a draft token adds to a step."""
    from_requests: int | None
    """Smallest number of requests in the judged steps, if drafts pay in smaller ones; None: steps of all
    sizes are judged."""
    drafting_us: float | None
    """Drafting time per step, in microseconds, above which drafts are a loss, if it is so short that drafting
    may take longer; otherwise None."""
    draft_slot_steps: int
    """Number of steps that refused a request with the cause ``input_budget``: some drafting methods take
    slots of the budget in addition to the tokens."""
    draft_slot_tokens: int
    """Token budget that was left in the steps of ``draft_slot_steps``."""


def _find(timeline: Timeline) -> Findings:
    model, steps = timeline.step_time, _draft_steps(timeline)
    yield from _never_verified(timeline)
    if model is None or steps.height < FEWEST_STEPS or not model.per_decode_token_us:
        return
    linear = model.per_decode_token_us * pl.col("draft_tokens"), model.error_frac
    bent = _bent_costs(steps)
    costs = _Costs(steps, *(bent if bent is not None and bent[1] <= BETTER * model.error_frac else linear))
    if (above := larger_steps(timeline)) is not None:
        yield _finding(timeline, above)
    elif costs.loses:
        yield _finding(timeline, costs)
    elif (fall := _falling_acceptance(timeline, costs.drafts / costs.requests)) is not None:
        yield _finding(timeline, costs, fall)
    elif 0 <= costs.drafting_us <= DOUBTFUL_FRAC * costs.busy_us / steps.height:
        yield _doubt(timeline, costs)


class _Costs:
    """Cost of the drafts of some steps.

    Args:
        steps: Steps that verified drafts.
        draft_us: Time that the drafts of a step take, in microseconds.
        error_frac: Typical relative error of the model of ``draft_us``.
        from_requests: Minimum number of requests in these steps, if smaller steps are left out.
    """

    def __init__(
        self, steps: pl.DataFrame, draft_us: pl.Expr, error_frac: float, from_requests: int | None = None
    ) -> None:
        self.steps, self.error_frac, self.from_requests = steps, error_frac, from_requests
        names = ("total_requests", "draft_tokens", "output_tokens", "busy_us")
        self.requests, self.drafts, self.output, self.busy_us = (int(steps[name].sum()) for name in names)
        self.token_us = float(steps.select(draft_us.sum()).item()) / max(self.drafts, 1)
        plain_us = self.busy_us - self.token_us * self.drafts
        self.rate = self.output / self.busy_us * 1e6
        self.plain_rate = self.requests / plain_us * 1e6 if plain_us > 0 else 0.0

    @property
    def change(self) -> float:
        """Relative change of the output rate if there were no drafts."""
        return self.plain_rate / self.rate - 1 if self.rate and self.plain_rate else 0.0

    @property
    def drafting_us(self) -> float:
        """Drafting time per step, in microseconds, above which drafts are a loss."""
        least_us = self.busy_us * self.requests / max(self.output, 1)
        return (self.busy_us - self.token_us * self.drafts - least_us) / self.steps.height

    @property
    def loses(self) -> bool:
        """Whether the steps would finish more tokens per second without drafts."""
        return self.change > max(LEAST_CHANGE, self.error_frac)


@made_once
def larger_steps(timeline: Timeline) -> _Costs | None:
    """Return the cost of drafts in large batches: those of the size at which drafts become a loss, or more.

    None if drafts lose little in these batches, or gain little in smaller ones.

    A device that reads its weights while it computes takes no longer for a few more tokens, but beyond a
    certain number longer for each. The time that a step would take without its drafts is therefore that of
    steps with so few tokens.
    """
    steps = _draft_steps(timeline)
    if steps.height < FEWEST_STEPS or (bent := _bent_costs(steps)) is None:
        return None
    draft_us, error_frac = bent
    lost = pl.col("busy_us") - (pl.col("busy_us") - draft_us) * pl.col("output_tokens") / pl.col(
        "total_requests"
    )
    by_size = steps.group_by(size="total_requests").agg(lost_us=lost.sum()).sort("size", descending=True)
    total_us = by_size["lost_us"].cum_sum()
    most = total_us.arg_max()
    least_us = LEAST_ABOVE_FRAC * timeline.busy_us
    if most is None or total_us[most] < least_us or total_us[most] - total_us[-1] < least_us:
        return None
    size = int(by_size["size"][most])
    larger = steps.filter(pl.col("total_requests") >= size)
    costs = _Costs(larger, draft_us, error_frac, size)
    return costs if larger.height >= FEWEST_STEPS and costs.change >= max(LEAST_ABOVE, error_frac) else None


def _bent_costs(steps: pl.DataFrame) -> tuple[pl.Expr, float] | None:
    """Return the time of a step's drafts according to a model with a bend, and the model's typical error.

    None if the steps show no such model.
    """
    model = fit_bent_time(steps)
    if model is None:
        return None
    undrafted = model.predicted(pl.col("decode_tokens") - pl.col("draft_tokens"))
    drafts_frac = 1 - undrafted / model.predicted(pl.col("decode_tokens"))
    return pl.col("busy_us") * drafts_frac, model.error_frac


def _finding(timeline: Timeline, costs: _Costs, fall: "_Fall | None" = None) -> Finding:
    """Return the finding that drafts are a loss or, with ``fall``, are accepted less and less often."""
    steps, loses = costs.steps, fall is None
    accepted = max(0, costs.output - costs.requests)
    if costs.loses and costs.from_requests is None:
        fall = _falling_acceptance(timeline, costs.drafts / costs.requests)
    evidence = _evidence(timeline, costs, fall)
    speed = costs.rate / costs.plain_rate if loses or fall is None else fall.speed(accepted / costs.drafts)
    lost_us = costs.busy_us * (1 - speed)
    felt_us = int(steps.select((pl.col("busy_us") * PRESENT).sum()).item())  # also by requests that wait
    return step_finding(
        timeline,
        steps,
        evidence,
        title="Drafts cost more than they give[ from {from_requests:n request} on]"
        if loses
        else "Fewer and fewer drafts are accepted"
        if evidence.long_tokens is None
        else "Fewer drafts are accepted in long contexts",
        verdict="[In steps of {from_requests:n request} and more, speculative][{from_requests:!}Speculative] "
        "decoding slows this run: {acceptance_frac:%} of its draft tokens are "
        "accepted, and decode steps would finish {change:%} more tokens a second without them"
        "[; in steps of {fewer:n request} and fewer, drafts pay]."
        if loses
        else "Speculative decoding gets worse over time: {early_frac:%} of the draft tokens of the first "
        "quarter of the requests were accepted, {late_frac:%} of those of the last quarter."
        if evidence.long_tokens is None
        else "Speculative decoding gets worse with the length of the context: {late_frac:%} of the draft "
        "tokens were accepted after prompts of {long_tokens:n token} and more, {early_frac:%} after those of "
        "up to {short_tokens:n}.",
        share_frac=share_of_requests(timeline, felt_us * (1 - speed)) or 0.0,
        holder=_holder(evidence),
        tokens=costs.drafts - accepted,
        message="{steps:n step} without prefill verified {draft_tokens:n draft token} and accepted "
        "{accepted_tokens:n}. By the model of step times, a draft token takes {verify_us_per_token:us}; "
        "the drafter's own time is not in the trace"
        + (", so the loss is at least this." if loses else ".")
        + "[ Acceptance falls with {order}, from {early:%} of the first quarter to {late_frac:%} of the "
        "last.][ The longest prompts came {grows}, so time or another property of these requests explains "
        "it as well.]",
        values={
            "change": costs.change,
            "early": evidence.early_frac if loses else None,
            "order": "the order in which requests finish"
            if evidence.short_tokens is None
            else "the length of the prompts",
            "grows": "last" if fall is not None and fall.grows else None,
            "fewer": costs.from_requests and costs.from_requests - 1,
        },
        advice=_advice(timeline, evidence, loses=loses),
        example="{at} verified {draft_tokens:n draft token} for {total_requests:n request} in "
        "{busy_us:us} and finished {output_tokens:n token}.",
        cases=largest(steps, "busy_us"),
        cost_ms=lost_us / 1e3,
        cost_frac=lost_us / timeline.busy_us,
        cost_error_frac=costs.error_frac if loses else None,
    )


def _evidence(
    timeline: Timeline, costs: _Costs, fall: "_Fall | None" = None, drafting_us: float | None = None
) -> SpecDecode:
    steps, accepted = costs.steps, max(0, costs.output - costs.requests)
    of_slots = timeline.exits.filter("refusal").filter(pl.col("cause") == str(Cause.INPUT_BUDGET))
    settings = timeline.header.settings
    return SpecDecode(
        method=settings.get("speculative_config.method"),
        num_speculative_tokens=settings.get(DRAFTED),
        draft_tokens=costs.drafts,
        accepted_tokens=accepted,
        acceptance_frac=accepted / costs.drafts if costs.drafts else 0.0,
        early_frac=None if fall is None else fall.early,
        late_frac=None if fall is None else fall.late,
        short_tokens=fall.lengths[0] if fall is not None and fall.lengths else None,
        long_tokens=fall.lengths[1] if fall is not None and fall.lengths else None,
        wasted_frac=(costs.drafts - accepted) / int(steps["used_tokens"].sum()),
        verify_us_per_token=costs.token_us,
        from_requests=costs.from_requests,
        drafting_us=drafting_us,
        draft_slot_steps=of_slots["step"].n_unique(),
        draft_slot_tokens=int(of_slots.unique("step", keep="last")["budget_left"].sum()),
    )


def _doubt(timeline: Timeline, costs: _Costs) -> Finding:
    """Return the finding that drafts pay only if drafting takes little of a step."""
    evidence = _evidence(timeline, costs, drafting_us=costs.drafting_us)
    return step_finding(
        timeline,
        costs.steps,
        evidence,
        severity="info",
        title="Drafts may cost more than they give",
        verdict="Speculative decoding may slow this run: {acceptance_frac:%} of its draft tokens are "
        "accepted, {per_step:n1} tokens per step and request; it pays only if drafting takes less than "
        "{drafting_us:us} of a decode step ({step_us:us}), and the trace does not show what drafting takes.",
        share_frac=0.0,
        tokens=evidence.draft_tokens - evidence.accepted_tokens,
        message="{steps:n step} without prefill verified {draft_tokens:n draft token} and accepted "
        "{accepted_tokens:n}. By the model of step times, verifying a draft token takes "
        "{verify_us_per_token:us}.",
        values={
            "per_step": costs.output / costs.requests,
            "step_us": costs.busy_us / costs.steps.height,
        },
        advice=[
            advise(
                "Compare with a run without {option:setting}[ (now {method} with {num_speculative_tokens:n "
                "token})], and with fewer {tokens:setting}, under the same load: {diff:code}.",
                evidence,
                option="--speculative-config",
                tokens="num_speculative_tokens",
                diff="schedtrace diff",
            )
        ],
        example="{at} verified {draft_tokens:n draft token} for {total_requests:n request} in "
        "{busy_us:us} and finished {output_tokens:n token}.",
        cases=largest(costs.steps, "busy_us"),
    )


def _never_verified(timeline: Timeline) -> Findings:
    """Yield the finding that requests end with their first token, before any draft is verified."""
    finishes, drafted = timeline.finishes, timeline.header.settings.get(DRAFTED)
    short = finishes.filter(pl.col("output_tokens") == 1)
    verified = timeline.steps["draft_tokens"]
    if not drafted or short.height < max(FEWEST_REQUESTS, ONE_TOKEN_FRAC * finishes.height):
        return
    if verified.null_count() or verified.sum() > 0:
        return
    steps = timeline.steps.filter(pl.col("busy_us") > 0)
    if steps.is_empty():
        return
    evidence = _evidence(timeline, _Costs(steps, pl.lit(0.0), 0.0))
    yield step_finding(
        timeline,
        steps,
        evidence,
        severity="info",
        title="No draft is verified",
        verdict="Speculative decoding gives nothing in this run: {short:n} of {every:n request} ended with "
        "their first token, and no draft was verified; the trace does not show what drafting takes.",
        share_frac=0.0,
        tokens=0,
        message="The drafter proposes up to {num_speculative_tokens:n token} after each step, for the next. "
        "{short:n} of {every:n request} had none.",
        values={"short": short.height, "every": finishes.height},
        advice=[
            advise(
                "Run without {option:setting}[ (now {method} with {num_speculative_tokens:n token})], and "
                "compare under the same load: {diff:code}.",
                evidence,
                option="--speculative-config",
                diff="schedtrace diff",
            )
        ],
        example="{at} prefilled {prefill_tokens:n token} in {busy_us:us}.",
        cases=largest(steps, "busy_us"),
    )


class _Fall(NamedTuple):
    """Acceptance that falls over time, or with the length of the prompts."""

    early: float
    """Share of the draft tokens of the first quarter of the finished requests that were accepted."""
    late: float
    """Share of the last quarter's draft tokens that were accepted."""
    drafts: float
    """Number of draft tokens per step and request."""
    lengths: tuple[int, int] | None
    """Longest prompt of the first quarter, and shortest of the last, if requests are ordered by length; None:
    ordered by time."""
    grows: bool
    """Whether prompts grow over time, which makes the two orders alike."""

    def speed(self, accepted: float) -> float:
        """Return the ratio of tokens per step with this acceptance to tokens per step with the early one."""
        return (1 + self.drafts * accepted) / (1 + self.drafts * self.early)


def _falling_acceptance(timeline: Timeline, drafts: float) -> _Fall | None:
    """Return the acceptance of the first and last requests if it falls more than chance explains.

    Requests are ordered by prompt length if acceptance falls more clearly with length than with time.
    """
    finishes = timeline.finishes
    if not {"drafts", "drafts_accepted"} <= {*finishes.columns}:
        return None
    tried = finishes.filter(pl.col("drafts") > 0).sort("step", maintain_order=True)
    if tried.height < FEWEST_REQUESTS:
        return None
    accepted = (pl.col("drafts_accepted") / pl.col("drafts")).rank()
    ranks = tried.select(
        time=pl.int_range(pl.len()), length=pl.col("prompt_tokens").rank(), accepted=accepted
    )
    by_time, by_length, alike = (
        ranks.select(pl.corr(*pair)).item() or 0.0
        for pair in (("time", "accepted"), ("length", "accepted"), ("time", "length"))
    )
    of_length = by_length < by_time  # not with NaN: all are alike
    if of_length:
        tried = tried.sort("prompt_tokens", maintain_order=True)
    if not -min(by_time, by_length if of_length else by_time) * math.sqrt(tried.height - 1) >= CERTAIN:
        return None
    first, last = tried.head(tried.height // 4), tried.tail(tried.height // 4)
    early, late = (int(part["drafts_accepted"].sum()) / int(part["drafts"].sum()) for part in (first, last))
    lengths = (int(first["prompt_tokens"][-1]), int(last["prompt_tokens"][0])) if of_length else None
    fall = _Fall(early, late, drafts, lengths, of_length and alike >= ALIKE)
    return fall if 1 - fall.speed(late) >= LEAST_FALL else None


def _advice(timeline: Timeline, evidence: SpecDecode, *, loses: bool) -> list[Advice]:
    """Return advice on fewer or no drafts if they cost time, and on how to find why acceptance falls."""
    advice = []
    header = timeline.header
    if evidence.from_requests is not None:
        # vLLM could vary the number of drafts by batch size, but is not set to do so.
        per_batch = header.settings.get(f"speculative_config.{PER_BATCH}", True)
        if per_batch is None and (header.data_parallel_size or 1) == 1:
            most = evidence.num_speculative_tokens or 0
            advice.append(
                advise(
                    "{option:setting} of {schedule:code} in {config:setting}: no drafts in larger batches.",
                    option=PER_BATCH,
                    schedule=f"[[1, {evidence.from_requests - 1}, {most}], "
                    f"[{evidence.from_requests}, {timeline.seats}, 0]]",
                    config="--speculative-config",
                    costs=""
                    if header.settings.get("use_v2_model_runner")
                    else "Without {runner:setting}, vLLM then runs decode steps without full CUDA graphs.",
                    runner="VLLM_USE_V2_MODEL_RUNNER=1",
                )
            )
    elif loses:
        advice.append(
            advise(
                "Run without {option}[ (now {method} with {num_speculative_tokens:n token})].",
                evidence,
                setting="speculative_config",
                costs="Requests whose drafts are accepted often get slower.",
            )
        )
    if loses:
        advice.append(
            advise(
                "[{alone:!}Or draft][{alone:?}Draft] fewer tokens with {tokens:setting}: later drafts are "
                "accepted less often.",
                tokens="num_speculative_tokens",
                alone=not advice,
            )
        )
    if evidence.long_tokens is not None:
        advice.append(
            advise(
                "[{loses:?}Or fewer][{loses:!}Fewer] drafts ({tokens:setting}), or none, for prompts of "
                "{long_tokens:n token} and more, on an engine of their own: vLLM drafts as many tokens for "
                "each request. Compare with a run without {option:setting} under the same load.",
                evidence,
                tokens="num_speculative_tokens",
                option="--speculative-config",
                loses=loses or None,
            )
        )
    elif evidence.late_frac is not None:
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
    quiet=0,
)
