"""``long-context``: requests with long contexts lengthened the decode steps of all others."""

import numpy as np
import polars as pl

from schedtrace.diagnose.excess_work import fit_lad
from schedtrace.diagnose.rule import Findings, Rule, Threshold, share_frac
from schedtrace.diagnose.rules.common import advise, largest, share_of_requests, step_finding
from schedtrace.model.report import Advice, Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.spans import at_steps, level
from schedtrace.timeline.step_time import FEWEST_STEPS, MOST_STEPS, median
from schedtrace.timeline.timeline import Timeline, context_tokens

LONG_TIMES, SHORTER_FRAC = 8, 0.25
"""Minimum ratio of a long prompt to the median of the shorter ones, and minimum share of shorter prompts."""
LEAST_FRAC = 0.05
"""Minimum share of the requests' time that these contexts cost the other requests."""
LONGER_FRAC = 0.25
"""Minimum time that these contexts add to a step, as a share of the rest of the step (medians)."""
EXPLAINED_FRAC, RESOLVED_FRAC = 0.3, 0.01
"""Minimum parts that contexts must explain: of the errors of a model without contexts, and of the time."""
ELSEWHERE = (
    "An engine of its own for requests with contexts of this length, or shorter contexts: no setting of the "
    "scheduler makes these steps shorter."
)


class LongContext(Evidence, kw_only=True):
    """Requests with long contexts, and what these add to the decode steps of the other requests."""

    request_id: str
    """Request with the longest prompt."""
    prompt_tokens: int
    """Length of the longest prompt."""
    median_prompt_tokens: float
    """Median length of the shorter prompts."""
    requests: float
    """Mean number of other requests in a decode step with long contexts."""
    step_us: float
    """Median time of decode steps with long contexts."""
    own_us: float
    """Median time that the long contexts add to a decode step."""


def _find(timeline: Timeline) -> Findings:
    (long, shorter), steps = _long_requests(timeline), _decodes(timeline)
    if long.is_empty() or not timeline.requests_us or steps.height < FEWEST_STEPS:
        return
    per_token_us = _per_token_us(steps)
    stretches = timeline.stretches.filter(pl.col("request_id").is_in(long["request_id"].implode()))
    present = at_steps(level(stretches, "step", pl.col("last_step") + 1, present=1), steps[["step"]])
    lengthened = (
        steps.join(context_tokens(stretches, steps).rename({"context_tokens": "own"}), on="step")
        .join(present.select("step", "present"), on="step")
        .filter(pl.col("present") > 0)
        .with_columns(
            own_us=pl.min_horizontal(pl.col("own") * per_token_us, "busy_us"),
            requests=pl.col("total_requests") - pl.col("present"),
        )
    )
    felt_us, all_us = (
        float((lengthened["own_us"] * lengthened[name]).sum()) for name in ("requests", "total_requests")
    )
    step_us, own_us = median(lengthened["busy_us"]), median(lengthened["own_us"])
    if felt_us < LEAST_FRAC * timeline.requests_us or own_us < LONGER_FRAC * (step_us - own_us):
        return
    longest = long.row(0, named=True)
    yield step_finding(
        timeline,
        lengthened,
        LongContext(
            request_id=longest["request_id"],
            prompt_tokens=longest["prompt_tokens"],
            median_prompt_tokens=median(shorter),
            requests=float(lengthened["requests"].mean()),  # type: ignore[arg-type]  # of integers
            step_us=step_us,
            own_us=own_us,
        ),
        title="Long contexts lengthen the steps of all requests",
        verdict="With {request_id:id} ({prompt_tokens:n prompt token})[ or another of {all_long:n} such "
        "requests] in it, a decode step took {step_us:us} at the median, {own_us:us} for such contexts: "
        "{share:%} of the requests' time, {felt:%} that of the other requests in these steps.",
        share_frac=share_of_requests(timeline, all_us),
        message="{steps:n step}{trials} decoded such requests, and {requests:n1} others on average, whose "
        "prompts are far shorter ({median_prompt_tokens:n token} at the median). The cost of "
        "a token of context is fitted to the times of all decode steps.",
        values={
            "all_long": long.height if long.height > 1 else None,
            "share": all_us / timeline.requests_us,
            "felt": felt_us / timeline.requests_us,
        },
        advice=[*_fewer_drafts(lengthened), advise(ELSEWHERE, costs="Another engine.")],
        example="{at} took {busy_us:us} for {requests:n other request}, about {own_us:us} of it for the long "
        "context.",
        cases=largest(lengthened, "own_us"),
    )


def _long_requests(timeline: Timeline) -> tuple[pl.DataFrame, pl.Series]:
    """Return the requests with far longer prompts, the longest first, and the other prompts' lengths."""
    prompts = timeline.known_requests.select("request_id", "prompt_tokens").drop_nulls()
    prompts = prompts.sort("prompt_tokens", "request_id", descending=[False, True])
    lengths = prompts["prompt_tokens"].to_numpy()
    for at in range(max(1, int(SHORTER_FRAC * len(lengths))), len(lengths)):
        if lengths[at] >= max(1.0, LONG_TIMES * float(lengths[(at - 1) // 2] + lengths[at // 2]) / 2):
            return prompts[at:].reverse(), prompts["prompt_tokens"][:at]
    return prompts.clear(), prompts["prompt_tokens"]


def _fewer_drafts(steps: pl.DataFrame) -> list[Advice]:
    """Return the advice to try fewer drafts if these steps verified any: each draft may read the context."""
    if not (drafts := int(steps["draft_tokens"].sum() or 0)):
        return []
    return [
        advise(
            "Compare with fewer drafts ({tokens:setting}), or none: these steps verified {verified:n1} "
            "tokens of each request, and this trace does not show what the contexts cost with one.",
            tokens="num_speculative_tokens",
            verified=1 + drafts / int(steps["total_requests"].sum()),
        )
    ]


def _decodes(timeline: Timeline) -> pl.DataFrame:
    """Return the steps that only decode; empty for ranks in lock-step, whose steps wait for other ranks."""
    steps = timeline.steps.filter(
        (pl.col("decode_tokens") > 0) & (pl.col("prefill_tokens") == 0) & (pl.col("busy_us") > 0)
    ).drop_nulls("context_tokens")
    return steps.clear() if "wave" in steps.columns and steps["wave"].count() else steps


def _per_token_us(steps: pl.DataFrame) -> float:
    """Return the time that each token of context adds to a decode step; 0 if the steps show no such time."""
    used = steps.gather_every(-(-steps.height // MOST_STEPS))
    columns = [np.ones(used.height), *used[["decode_tokens", "context_tokens"]].to_numpy().astype(float).T]
    times_us = used["busy_us"].to_numpy().astype(float)
    with_context, without = np.column_stack(columns), np.column_stack(columns[:2])
    costs = fit_lad(with_context, times_us)
    errors = np.abs(with_context @ costs - times_us).sum()
    plain = np.abs(without @ fit_lad(without, times_us) - times_us).sum()
    explains = plain - errors >= max(EXPLAINED_FRAC * plain, RESOLVED_FRAC * times_us.sum())
    return max(float(costs[2]), 0.0) if explains else 0.0


RULE = Rule(
    code="long-context",
    summary="requests with far longer contexts than the others lengthened every decode step",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES}),
    find=_find,
    threshold=Threshold(LEAST_FRAC, share_frac),
)
