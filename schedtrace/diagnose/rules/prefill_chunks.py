"""Chunks of prompts that cost requests time by their size, or by their number in a step.

* ``long-prompt``: one prompt takes the steps' token budget while far shorter requests wait.
* ``capped-prefill``: ``long_prefill_token_threshold`` cuts prompts into chunks that leave budget unused. Each
  chunk takes a step. If most of a step's time does not depend on its tokens, larger chunks compute the same
  prompts in less time. They also leave no budget for requests that arrive meanwhile, which then wait.
* ``batched-prefill``: prompts prefilled together each have their first token only when all are computed.
"""

import polars as pl

from schedtrace.diagnose.gains import budget_times, fixed_share
from schedtrace.diagnose.rule import Findings, Rule, Threshold, share_frac
from schedtrace.diagnose.rules.allowed_settings import (
    BATCHED_TOKENS,
    LONG_PREFILL,
    batched_tokens,
    can_lower_batched_tokens,
)
from schedtrace.diagnose.rules.common import (
    advise,
    largest,
    share_of_requests,
    step_finding,
    wait_finding,
)
from schedtrace.diagnose.rules.token_budget_bound import shown_budget, smaller_chunks
from schedtrace.diagnose.waits import charged
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.message import Steps
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.charges import LONG_PROMPT
from schedtrace.timeline.spans import total_us
from schedtrace.timeline.timeline import Timeline


class LongPrompt(Evidence, kw_only=True):
    """Long prompt, the budget that it took, and the requests that waited."""

    request_id: str
    """Request whose prompt took the most tokens while others waited."""
    prompt_tokens: int
    """Length of the prompt of ``request_id``."""
    prompts: int
    """Number of requests whose prompts took most of a step's prefill tokens while others waited."""
    prefill_frac: float
    """Share of the prefill tokens that the prompt took in the steps in which it took most of them."""
    steps: int
    """Number of steps in which the prompt took most of the prefill tokens."""
    time_ms: float
    """Total time of the steps in which the prompt took most of the prefill tokens."""
    requests: int
    """Number of short requests that waited."""
    mean_wait_ms: float
    """Mean time that the short requests waited."""


def _find_long_prompts(timeline: Timeline) -> Findings:
    waits = charged(timeline, LONG_PROMPT)
    if waits is None:
        return
    steps = timeline.charge_tables.long_prefills.join(
        waits.steps[["step", "start_us", "output_us"]], on="step"
    )
    each = steps.group_by("request_id").agg(
        pl.col("scheduled_tokens", "prefill_tokens").sum(), pl.col("prompt_tokens").first(), steps=pl.len()
    )
    first = each.sort("scheduled_tokens", "request_id", descending=[True, False]).row(0, named=True)
    ours = steps.filter(pl.col("request_id") == first["request_id"])
    budget = shown_budget(timeline, waits)
    yield wait_finding(
        timeline,
        waits,
        LongPrompt(
            request_id=first["request_id"],
            prompt_tokens=first["prompt_tokens"],
            prompts=each.height,
            prefill_frac=first["scheduled_tokens"] / first["prefill_tokens"],
            steps=first["steps"],
            time_ms=int(ours.select((pl.col("output_us") - pl.col("start_us")).sum()).item() or 0) / 1e3,
            requests=waits.requests,
            mean_wait_ms=waits.time_us / waits.requests / 1e3,
        ),
        title="A long prompt monopolizes the token budget",
        verdict="One prompt took the steps: {request_id:id} ({prompt_tokens:n token}) used "
        "{prefill_frac:%} of the prefill tokens of {steps:n step} ({time_ms:ms}); "
        "{requests:n shorter request} waited {mean_wait_ms:ms} on average for it.",
        cause=Cause.TOKEN_BUDGET,
        message="{prefill_frac:%} of the prefill tokens of these steps were for it."
        "[ {several:n prompt} of this size did so.]",
        values={"several": each.height if each.height > 1 else None},
        advice=[*([budget] if budget else []), smaller_chunks(timeline, waits.steps)],
    )


LONG_PROMPT_RULE = Rule(
    code="long-prompt",
    summary="one long prompt took the token budget while far shorter requests waited",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES, Fact.REQUESTS}),
    find=_find_long_prompts,
    charges=(LONG_PROMPT,),
    specific=True,
    proven=((Cause.TOKEN_BUDGET, "max_num_batched_tokens"),),
)


LEAST_CAPPED_FRAC = 0.02
"""Minimum share of the requests' time that prompts must lose in capped chunks."""


class CappedPrefill(Evidence, kw_only=True):
    """Prompts in capped chunks, and the time that they lost."""

    threshold: int | None
    """Value of ``long_prefill_token_threshold``; None if it is not recorded."""
    requests: int
    """Number of requests whose prompts were capped although the step had budget left."""
    chunks: int
    """Number of capped chunks of these prompts."""
    full_chunks: float
    """Number of chunks that would hold the same tokens if each also used the budget that its step left."""
    low_frac: float
    """Lower bound of the share of the capped steps' time that does not depend on their tokens."""


def _find_capped_chunks(timeline: Timeline) -> Findings:
    chunks = _capped_chunks(timeline)
    if chunks.is_empty() or not timeline.requests_us:
        return
    steps = timeline.steps.join(chunks[["step"]], on="step", how="semi")
    share = fixed_share(timeline, steps, at_budget=True)
    if share is None or (budget_times(timeline, steps, share) or 0) <= 1:
        return
    full = pl.col("capped_tokens") / pl.col("possible_tokens")
    chunks = chunks.with_columns(
        withheld=pl.col("possible_tokens") - pl.col("capped_tokens"),
        full_chunks=full,
        full_us=pl.col("busy_us") * (share.low_frac * full + 1 - share.low_frac),
    )
    lost_us = float((chunks["busy_us"] - chunks["full_us"]).sum()) - _others_wait_us(timeline, chunks)
    if lost_us < LEAST_CAPPED_FRAC * timeline.requests_us:
        return
    config = timeline.header.scheduler_config
    evidence = CappedPrefill(
        threshold=config.get("long_prefill_token_threshold"),
        requests=chunks["request_id"].n_unique(),
        chunks=chunks.height,
        full_chunks=float(chunks["full_chunks"].sum()),
        low_frac=share.low_frac,
    )
    can_be_off = (config.get("max_num_partial_prefills") or 1) <= 1  # else 0 makes vLLM choose a threshold
    yield step_finding(
        timeline,
        steps,
        evidence,
        title="Prefill chunks are too small",
        verdict="{option}[ ({threshold:n token})] cut {requests:n prompt} into {chunks:n chunk}, although "
        "the budget had room for about {larger:n} larger ones; by the recorded step times, this cost "
        "about {share:%} of the requests' time.",
        share_frac=share_of_requests(timeline, lost_us),
        message="At least {low_frac:%} of the time of {steps:n step} with such chunks does not depend on "
        "their tokens, so fewer and larger chunks compute the prompts sooner.",
        values={
            "option": LONG_PREFILL,
            "larger": round(evidence.full_chunks),
            "share": lost_us / timeline.requests_us,
        },
        advice=[
            advise(
                "{option} {value:n}[, off]{off:?}[ (now {threshold:n})]",
                evidence,
                setting="long_prefill_token_threshold",
                value=0 if can_be_off else timeline.token_budget,
                off=can_be_off,
                costs="Longer steps with prefills: a higher inter-token latency meanwhile.",
            )
        ],
        example="{at} gave {request_id:id} {capped_tokens:n token} in {busy_us:us}; the budget had room "
        "for {possible_tokens:n} of its prompt.",
        cases=largest(chunks, "withheld"),
    )


def _capped_chunks(timeline: Timeline) -> pl.DataFrame:
    """Return the chunks that only the threshold capped, with the tokens that the budget allowed."""
    if timeline.caps.is_empty():
        return timeline.caps
    steps = timeline.steps.filter(pl.col("busy_us") > 0)["step", "trial", "busy_us"]
    capped = timeline.caps.filter((pl.col("cap") == Cap.LONG_PREFILL) & (pl.col("remaining_budget") > 0))
    left = pl.col("remaining_budget") / pl.len().over("step")
    possible = pl.min_horizontal(pl.col("wanted_tokens"), pl.col("capped_tokens") + left.cast(int))
    return (
        capped.select("step", "request_id", "capped_tokens", possible_tokens=possible)
        .filter(pl.col("possible_tokens") > pl.col("capped_tokens"))
        .join(steps, on="step", maintain_order="left")
    )


def _others_wait_us(timeline: Timeline, chunks: pl.DataFrame) -> float:
    """Return how long other requests would wait if the chunks were full and left no budget for them.

    These are the requests that vLLM admitted after a prompt's first capped chunk, and before its full chunks
    would have been done.
    """
    starts = timeline.steps["step", "start_us"]
    admitted = timeline.admitted.filter(pl.col("phase") == "new")["request_id", "step"].join(
        starts, on="step"
    )
    prompts = (
        chunks.join(starts, on="step")
        .group_by("request_id", maintain_order=True)
        .agg(pl.col("full_us").sum(), from_us=pl.col("start_us").min())
        .with_columns(done_us=pl.col("from_us") + pl.col("full_us").round().cast(int))
    )
    pairs = admitted.rename({"request_id": "other"}).join_where(
        prompts,
        pl.col("start_us") >= pl.col("from_us"),
        pl.col("start_us") < pl.col("done_us"),
        pl.col("other") != pl.col("request_id"),
    )
    return float((pairs["done_us"] - pairs["start_us"]).sum())


CAPPED_PREFILL_RULE = Rule(
    code="capped-prefill",
    summary="long_prefill_token_threshold cut prompts into small chunks although the steps had budget left",
    needs=frozenset({Fact.TIMES, Fact.QUEUE, Fact.LIVES, Fact.CONFIG}),
    find=_find_capped_chunks,
    threshold=Threshold(LEAST_CAPPED_FRAC, share_frac),
    proven=((None, "long_prefill_token_threshold"),),
)


LEAST_TOGETHER_FRAC = 0.5
"""Minimum share of the requests' time in which prompts wait for the other prompts of their step."""


class BatchedPrefill(Evidence, kw_only=True):
    """Steps that completed several prompts, and the time that these prompts waited for each other."""

    prefill_frac: float
    """Time in the state ``prefill`` as a share of all requests' time."""
    others_frac: float
    """Time in which prompts waited for the other prompts of their step, as a share of all requests' time."""
    steps: int
    """Number of steps that completed two prompts or more."""
    mean_prompts: float
    """Mean number of prompts that such a step completed."""
    step: int
    """Number of the step whose prompts waited longest for each other, in total."""
    prompts: int
    """Number of prompts that this step completed."""
    busy_ms: float
    """Time that this step took."""


def _find_batched_prompts(timeline: Timeline) -> Findings:
    steps = together(timeline)
    can_lower = can_lower_batched_tokens(timeline)
    # Whose first token comes first is nothing to a batch that is judged by its end.
    if timeline.closed_workload or not timeline.requests_us or can_lower is False:
        return
    others_frac = float(steps["others_us"].sum()) / timeline.requests_us
    if others_frac <= LEAST_TOGETHER_FRAC:
        return
    prefill = timeline.request_states.filter(pl.col("state") == "prefill")
    worst = largest(steps, "others_us").row(0, named=True)
    evidence = BatchedPrefill(
        prefill_frac=total_us(prefill) / timeline.requests_us,
        others_frac=others_frac,
        steps=steps.height,
        mean_prompts=float(steps["prompts"].sum()) / steps.height,
        step=worst["step"],
        prompts=worst["prompts"],
        busy_ms=worst["busy_us"] / 1e3,
    )
    yield step_finding(
        timeline,
        steps,
        evidence,
        title="Prompts are prefilled together",
        verdict="{prompts:n prompt} were prefilled in one step of {busy_ms:ms}; each had its first token "
        "only when all were done: {prefill_frac:%} of the requests' time is prefill.",
        share_frac=others_frac,
        tokens=int(steps["prefill_tokens"].sum()),
        message="{steps:n step} completed {mean_prompts:n1} prompts on average; waiting for the "
        "others' tokens in the same step took {others_frac:%} of the requests' time ({longest} is "
        "the longest).",
        values={"longest": Steps(evidence.step, evidence.step, worst["trial"])},
        advice=[
            advise(
                "a smaller {option} (now {now:n}) gives the first prompts their token earlier, if a "
                "replay of this load shows a value that helps: {command:code}",
                option=BATCHED_TOKENS,
                now=batched_tokens(timeline),
                command="schedtrace analyze --predict",
                costs="More steps for the same tokens.",
            )
        ]
        if can_lower
        else [],
    )


def together(timeline: Timeline) -> pl.DataFrame:
    """Return steps that completed two prompts or more.

    Columns: ``step``, ``trial``, ``busy_us``, ``prefill_tokens``, ``prompts`` (completed) and ``others_us``:
    the total time that these prompts waited for each other's tokens. The time that a step takes without any
    prompt is not part of it. Empty if that time is unknown.
    """
    completed = pl.col("computed_tokens") + pl.col("scheduled_tokens") >= pl.col("prompt_tokens")
    decodes = timeline.steps.filter((pl.col("decode_tokens") > 0) & (pl.col("prefill_tokens") == 0))
    base_us = decodes["busy_us"].median()
    if base_us is None and timeline.step_time is not None:
        base_us = timeline.step_time.most_base_us
    own = pl.col("scheduled_tokens")
    others_us = (pl.col("busy_us") - base_us).clip(0) * (1 - own / pl.col("prefill_tokens"))
    return (
        timeline.prefills.with_columns(pl.col("step").cast(pl.Int64), prefill_tokens=own.sum().over("step"))
        .filter(completed)
        .join(timeline.steps.select(pl.col("step").cast(pl.Int64), "trial", "busy_us"), on="step")
        .group_by("step", "trial", "busy_us", "prefill_tokens")
        .agg(prompts=pl.len(), others_us=others_us.sum())
        .filter((pl.col("prompts") > 1) & pl.col("others_us").is_not_null())
        .sort("step")
    )


BATCHED_PREFILL_RULE = Rule(
    code="batched-prefill",
    summary="prompts were prefilled in one long step: each had its first token only when all were done",
    needs=frozenset({Fact.TIMES, Fact.LIVES, Fact.REQUESTS}),
    find=_find_batched_prompts,
    threshold=Threshold(LEAST_TOGETHER_FRAC, share_frac),
)
