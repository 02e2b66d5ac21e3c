"""``token-budget-bound``: requests waited because the steps' token budget was used up.

A smaller budget may serve these requests better. A device reads its weights while it computes, which hides
the prefill of small steps. A step beyond that size delays the decodes in it, and computes no token sooner
(``smaller_budget``).
"""

from typing import NamedTuple

import msgspec
import polars as pl

from schedtrace.diagnose.gains import (
    BREAK_EVEN_FRAC,
    RAN,
    THERE,
    budget_times,
    fixed_share,
    host_time_us,
    throughput_counts,
)
from schedtrace.diagnose.offered_load import offered_load
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import (
    BATCHED_TOKENS,
    LONG_PREFILL,
    batched_tokens,
    decodes_of_all,
    replay_advice,
    smallest_batched_tokens,
)
from schedtrace.diagnose.rules.common import (
    Waited,
    advise,
    wait_figures,
    wait_finding,
)
from schedtrace.diagnose.rules.full_device import knows_waiting_tokens, limit_finding
from schedtrace.diagnose.waits import Charged, charged, mean, totals
from schedtrace.model.causes import Cause
from schedtrace.model.report import Advice, Finding
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.charges import LONG_PROMPT
from schedtrace.timeline.step_time import median
from schedtrace.timeline.timeline import Timeline, made_once

FEWEST_STEPS, FEWEST_SIZED = 20, 5
"""Minimum number of steps with decodes and prefill, and of steps of about one size among them, that can show
what a smaller budget saves."""
MOST_TIMES = 2
"""Maximum ratio of a budget to the size of the recorded steps that support it."""
FIXED_FROM_FRAC = 0.10
"""Minimum share of the time of steps with large chunks that must be independent of their tokens for the
advice to state the price of smaller chunks."""
LEAST_SAVED_FRAC = 0.02
"""Minimum share of the requests' time that a smaller budget must save to be worth a restart."""


class SmallerBudget(NamedTuple):
    """Smaller budget whose steps, as recorded, compute prompts about as fast as larger steps do."""

    tokens: int
    size: int
    """Mean number of tokens in the recorded steps of about this size."""
    step_us: float
    """Mean time in microseconds of the recorded steps of about this size."""
    larger_us: float
    """Mean time in microseconds of the larger steps."""
    saved_frac: float
    """Minimum share of the requests' time that the smaller budget saves."""

    def advice(self, timeline: Timeline) -> Advice:
        """Return the advice to set ``--max-num-batched-tokens`` to this budget."""
        return advise(
            "{option} {value:n} (now {now:n}): steps of about {size:n token} took {step_us:us}, larger ones "
            "{larger_us:us} on average, so smaller steps compute prompts about as fast, and "
            "decodes run more often",
            self,
            setting="max_num_batched_tokens",
            value=self.tokens,
            now=batched_tokens(timeline),
            costs="More steps: more work for the host.",
        )


@made_once
def smaller_budget(timeline: Timeline) -> SmallerBudget | None:
    """Return the token budget whose recorded steps show the largest saving of the requests' time.

    With smaller steps, prefill needs more steps. Each additional step costs every request present the time
    that the step takes beyond its share of the prefill. The step also gives each decoding request a token,
    which would otherwise take a step of its own. None if throughput counts (for
    example because more load arrives than is served), or if no recorded size saves ``LEAST_SAVED_FRAC``.
    """
    least = smallest_batched_tokens(timeline)
    steps = timeline.steps.filter((pl.col("decode_tokens") > 0) & (pl.col("busy_us") > 0))
    alone = steps.filter(pl.col("prefill_tokens") == 0)["busy_us"]
    mixed = steps.filter(pl.col("prefill_tokens") > 0).sort("used_tokens")
    if least is None or mixed.height < FEWEST_STEPS or alone.is_empty():
        return None
    if throughput_counts(timeline) or offered_load(timeline).grows:
        return None
    limit, best = int(mixed["used_tokens"].max()) // 2, None  # type: ignore[arg-type]  # of integers
    while limit >= 1:
        sized = mixed.filter(pl.col("used_tokens") >= limit).head(FEWEST_SIZED)
        budget = _saving(timeline, sized, mixed, least, median(alone))
        if budget is not None and (best is None or budget.saved_frac > best.saved_frac):
            best = budget
        limit //= 2
    return best if best is not None and best.saved_frac >= LEAST_SAVED_FRAC else None


def _saving(
    timeline: Timeline, sized: pl.DataFrame, mixed: pl.DataFrame, least: int, decode_us: float
) -> SmallerBudget | None:
    """Return what a budget the size of these steps would save; None if smaller steps may not help.

    Args:
        timeline: The engine's trace.
        sized: Recorded steps of about this size.
        mixed: Steps with decodes and prefill.
        least: Smallest budget that vLLM accepts.
        decode_us: Time of a step that only decodes.
    """
    size = round(mean(sized, pl.col("used_tokens")) or 0)
    tokens = max(size, least, 2 * int(mixed["decode_tokens"].max()))  # type: ignore[arg-type]  # of integers
    larger = mixed.filter(pl.col("used_tokens") > tokens)
    if larger.height < FEWEST_SIZED or tokens > MOST_TIMES * size:
        return None
    prefill, larger_us = mean(larger, pl.col("prefill_tokens")) or 0.0, mean(larger, pl.col("busy_us")) or 0.0
    part = pl.col("prefill_tokens") / prefill
    own_us = mean(sized.filter(part < 1), (pl.col("busy_us") - part * larger_us) / (1 - part))
    if own_us is None:
        return None
    host = host_time_us(timeline) / timeline.steps.filter(RAN > 0).height
    decoding = mean(larger, pl.min_horizontal("decode_tokens", RAN)) or 0.0
    costs_us = (max(0.0, own_us) + host) * (mean(larger, THERE) or 0.0)
    if costs_us > BREAK_EVEN_FRAC * decoding * decode_us:
        return None
    chunk = tokens - (mean(larger, pl.col("decode_tokens")) or 0.0)
    more_steps = larger.height * (prefill / chunk - 1) if chunk > 0 else 0.0
    saved_us = more_steps * (decoding * decode_us - costs_us)
    step_us = mean(sized, pl.col("busy_us")) or 0.0
    return SmallerBudget(tokens, size, step_us, larger_us, saved_us / max(1, timeline.requests_us))


NAMED_FROM_FRAC = 0.25
"""Minimum share of the full steps' prefill that a request must have to be named."""
CHARGES = (Cause.TOKEN_BUDGET, Cause.INPUT_BUDGET)


class TokenBudget(Waited, kw_only=True):
    """Full steps, and what filled them."""

    full_steps: int
    """Number of steps in which requests waited for the budget."""
    steps: int
    """Number of all steps."""
    token_budget: int
    """Token budget of a step."""
    decode_frac: float
    """Share of the full steps' tokens that went to decodes."""
    prefill_frac: float
    """Share of the full steps' tokens that went to prefills."""
    largest_prefill: str | None
    """Request with most of the full steps' prefill tokens."""
    largest_prefill_frac: float | None
    """Share of the full steps' prefill tokens that ``largest_prefill`` had."""
    draft_slots: int
    """``max_num_batched_tokens - token_budget``, kept for drafts."""
    tokens_per_decode: int
    """Number of tokens per decode: one, and the drafts that it verifies."""
    seats_decoding: int
    """Number of seats, but at most the largest number of requests that were present at once."""
    proposed: int | None
    """Value of ``max_num_batched_tokens`` with room for a decode of each of these requests; None if the
    budget has room already."""

    @property
    def decodes_wanted(self) -> int | None:
        """Number of tokens that the decodes of all seats take; None if the budget has room for them."""
        wanted = self.seats_decoding * self.tokens_per_decode
        return wanted if wanted > self.token_budget else None


def _find(timeline: Timeline) -> Findings:
    waits = charged(timeline, *CHARGES)
    if waits is None or not timeline.token_budget:
        return
    less = waits.steps.filter(pl.col("token_budget") < timeline.token_budget)
    if less.height > waits.steps.height / 2:
        yield _lowered(timeline, waits, less)
        return
    evidence = _evidence(timeline, waits)
    has_tokens = knows_waiting_tokens(waits.steps)
    drafts = (
        int(waits.rows.filter(pl.col("charge") == Cause.INPUT_BUDGET)["time_us"].sum()) > waits.time_us / 2
    )
    # A budget that holds the decodes of all seats, or else one shown to help.
    if evidence.proposed is not None:
        better = more_batched_tokens(timeline, evidence.proposed)
    else:
        better = shown_budget(timeline, waits) or replay_advice(BATCHED_TOKENS)
    halved = better.value is not None and int(better.value) < batched_tokens(timeline)
    fewer_drafts = advise(
        "fewer drafts ({drafts:setting})",
        drafts="num_speculative_tokens",
        costs="Fewer tokens per step where drafts are accepted.",
    )
    largest = evidence.largest_prefill if (evidence.largest_prefill_frac or 0) >= NAMED_FROM_FRAC else None
    yield limit_finding(
        timeline,
        waits,
        evidence=evidence,
        title="Token budget too small" if has_tokens and not halved else "Waits for the token budget",
        verdict="The token budget limits this run: requests spent {share:%} of their time waiting for it "
        "({token_budget:n token} per step)."
        if has_tokens
        else "Requests spent {share:%} of their time waiting for the token budget ({token_budget:n token} "
        "per step); how many tokens waited is not recorded, and so not what a larger one would do.",
        holder="Decodes took {decode_frac:%} of the tokens of these steps, prefills {prefill_frac:%}"
        "[, {largest:id} {largest_prefill_frac:%} of these]"
        "[; {draft_slots:n token} of the budget are kept for drafts].",
        limit=Cause.INPUT_BUDGET if drafts else Cause.TOKEN_BUDGET,
        message="The budget was spent in {full_steps:n} of {steps:n step} while requests waited; "
        "{requests:n request} waited, {longest_request:id} the longest ({longest_ms:ms})."
        "[ A decode takes {tokens_per_decode:n token}, so the decodes of {seats_decoding:n seat} want "
        "{decodes_wanted:n} in a step.]",
        values={"largest": largest},
        advice=[better, fewer_drafts] if drafts else [better],
    )


class LoweredBudget(Waited, kw_only=True):
    """Steps whose ``schedule()`` had a smaller budget than the configured one."""

    lowered_steps: int
    """Number of steps with a smaller budget than the configured one."""
    empty_steps: int
    """Number of lowered steps that scheduled nothing."""
    steps: int
    """Number of all steps."""
    worked_with: int
    """Median budget of the lowered steps."""
    token_budget: int
    """Configured token budget."""
    most_waiting: int
    """Largest number of requests that waited after a lowered step."""
    scheduler: str
    """The scheduler's class."""


def _lowered(timeline: Timeline, waits: Charged, less: pl.DataFrame) -> Finding:
    """Report that the configured budget was not the limit, because the scheduler used a smaller one."""
    evidence = LoweredBudget(
        **wait_figures(waits),
        lowered_steps=less.height,
        empty_steps=less.filter(pl.col("total_requests") == 0).height,
        steps=timeline.steps.height,
        worked_with=int(median(less["token_budget"])),
        token_budget=timeline.token_budget,
        most_waiting=int(less["num_waiting_after"].max() or 0),  # type: ignore[arg-type]  # a column of integers
        scheduler=timeline.header.scheduler_class.rpartition(".")[2],
    )
    return wait_finding(
        timeline,
        waits,
        evidence=evidence,
        title="schedule() works with less than its token budget",
        verdict="schedule() worked with a budget of {worked_with:n token} in {lowered_steps:n} of "
        "{steps:n step}, not with the {token_budget:n} that are set[, and scheduled nothing in "
        "{empty_steps:n} of them]: up to {most_waiting:n request} waited, {share:%} of the requests' time.",
        cause=Cause.TOKEN_BUDGET,
        message="In these steps the loop over the waiting queue ended for want of budget although the step "
        "had used none of what was missing. {requests:n request} waited, {longest_request:id} the longest "
        "({longest_ms:ms}).",
        advice=[
            advise(
                "Find out why {scheduler:code} lowers the budget (max_num_scheduled_tokens) for these "
                "calls: a larger --max-num-batched-tokens changes nothing.",
                evidence,
            )
        ],
        leads=evidence.empty_steps > less.height / 2,
    )


def _evidence(timeline: Timeline, waits: Charged) -> TokenBudget:
    steps = waits.steps
    used = max(1, int(steps["used_tokens"].sum()))
    decodes = int(steps["decode_tokens"].sum())
    ours = timeline.prefills.join(steps[["step"]], on="step", how="semi")
    each = totals(ours, "scheduled_tokens")
    prefill = max(1, int(each["scheduled_tokens"].sum()))
    wanted_decodes = decodes_of_all(timeline)
    return TokenBudget(
        **wait_figures(waits),
        full_steps=steps.height,
        steps=timeline.steps.height,
        token_budget=timeline.token_budget,
        decode_frac=decodes / used,
        prefill_frac=1 - decodes / used,
        largest_prefill=each["request_id"][0] if each.height else None,
        largest_prefill_frac=int(each["scheduled_tokens"][0]) / prefill if each.height else None,
        draft_slots=max(0, batched_tokens(timeline) - timeline.token_budget),
        tokens_per_decode=wanted_decodes.each,
        seats_decoding=wanted_decodes.seats,
        proposed=wanted_decodes.batched_tokens
        if wanted_decodes.total_tokens > timeline.token_budget
        else None,
    )


def shown_budget(timeline: Timeline, waits: Charged) -> Advice | None:
    """Return the advice on a larger or smaller budget, if recorded step times show that it helps."""
    share = fixed_share(timeline, waits.steps, at_budget=True)
    times = share and budget_times(timeline, waits.steps, share)
    if times is not None and times > 1 and _may_cost_more(timeline, waits.steps):
        times = None
    now = batched_tokens(timeline)
    smaller = smaller_budget(timeline)
    if smaller is not None and times is None:
        return smaller.advice(timeline)
    if share is None or times is None:
        return None
    if times > 1:
        return advise(
            "{option} {value:n} (now {now:n}): at least {low:%} of the time of these steps does not depend "
            "on their tokens",
            setting="max_num_batched_tokens",
            value=int(times * now),
            now=now,
            low=share.low_frac,
            costs=LONGER_STEPS,
        )
    return advise(
        "{option} {value:n} (now {now:n}): at most {high:%} of the time of these steps does not depend on "
        "their tokens, so smaller steps compute prompts as fast, and decodes run more often",
        setting="max_num_batched_tokens",
        value=int(times * now),
        now=now,
        high=share.high_frac,
        costs="More steps: more work for the host.",
    )


def _may_cost_more(timeline: Timeline, steps: pl.DataFrame) -> bool:
    """Return whether a larger budget may cost decodes more than it can save waiting requests.

    No recorded step shows at which size steps become bound by computing. In the worst case, twice the tokens
    take twice the time, so the decodes in these steps lose as much time as the steps take, and prompts
    gain nothing. If throughput counts, that is no loss.
    """
    waits = charged(timeline, *CHARGES, LONG_PROMPT)
    if throughput_counts(timeline) or waits is None:
        return False
    decodes_us = steps.select((pl.min_horizontal("decode_tokens", RAN) * pl.col("busy_us")).sum()).item()
    return int(decodes_us) > waits.time_us


def smaller_chunks(timeline: Timeline, steps: pl.DataFrame) -> Advice:
    """Return the advice to cut prompts into smaller chunks, with the price of this if the steps show it.

    Args:
        timeline: Timeline of the engine.
        steps: Steps with chunks of long prompts.
    """
    advice, share = replay_advice(LONG_PREFILL), fixed_share(timeline, steps, at_budget=True)
    if share is None or share.low_frac < FIXED_FROM_FRAC:
        return advice
    warned = say(
        "{advice}. At least {low:%} of the time of these steps does not depend on their tokens, so smaller "
        "chunks take longer in all",
        advice=advice.message,
        low=share.low_frac,
    )
    return msgspec.structs.replace(advice, message=warned)


LONGER_STEPS = "Longer steps with prefills: a higher inter-token latency meanwhile."


def more_batched_tokens(timeline: Timeline, value: int) -> Advice:
    """Return the advice to set ``--max-num-batched-tokens`` to this value."""
    return advise(
        "{option} {value:n} (now {now:n})",
        setting="max_num_batched_tokens",
        value=value,
        now=batched_tokens(timeline),
        costs=LONGER_STEPS,
    )


RULE = Rule(
    code="token-budget-bound",
    summary="requests waited for tokens of the steps' budget (max_num_batched_tokens)",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES}),
    find=_find,
    charges=tuple(map(str, CHARGES)),
    proven=(
        ("input_budget", "max_num_batched_tokens"),
        ("token_budget", "max_num_batched_tokens"),
    ),
)
