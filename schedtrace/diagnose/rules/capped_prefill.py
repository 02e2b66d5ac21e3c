"""``capped-prefill``: ``long_prefill_token_threshold`` cut prompts into chunks that left budget unused.

Each chunk takes a step. If most of a step's time does not depend on its tokens, larger chunks compute the
same prompts in less time. They also leave no budget for requests that arrive meanwhile, which then wait.
"""

import polars as pl

from schedtrace.diagnose.gains import budget_times, fixed_share
from schedtrace.diagnose.rule import Findings, Rule, Threshold, share_frac
from schedtrace.diagnose.rules.allowed_settings import LONG_PREFILL
from schedtrace.diagnose.rules.common import advise, largest, share_of_requests, step_finding
from schedtrace.model.causes import Cap
from schedtrace.model.report import Advice, Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

LEAST_FRAC = 0.02
"""Least share of the requests' time that prompts lose in such chunks."""


class CappedPrefill(Evidence, kw_only=True):
    """Prompts in capped chunks, and the time that they lost."""

    threshold: int | None
    """Value of ``long_prefill_token_threshold``; None if it is not recorded."""
    requests: int
    """Number of requests whose prompts were capped although the step had budget left."""
    chunks: int
    """Number of their capped chunks."""
    full_chunks: float
    """Number of chunks for the same tokens with all of the budget that the steps had left."""
    low_frac: float
    """Lower bound of the share of the capped steps' time that does not depend on their tokens."""


def _find(timeline: Timeline) -> Findings:
    chunks = _chunks(timeline)
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
    if lost_us < LEAST_FRAC * timeline.requests_us:
        return
    evidence = CappedPrefill(
        threshold=timeline.header.scheduler_config.get("long_prefill_token_threshold"),
        requests=chunks["request_id"].n_unique(),
        chunks=chunks.height,
        full_chunks=float(chunks["full_chunks"].sum()),
        low_frac=share.low_frac,
    )
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
        advice=[_uncapped(timeline, evidence)],
        example="{at} gave {request_id:id} {capped_tokens:n token} in {busy_us:us}; the budget had room "
        "for {possible_tokens:n} of its prompt.",
        cases=largest(chunks, "withheld"),
    )


def _chunks(timeline: Timeline) -> pl.DataFrame:
    """Return the chunks that only the threshold capped, with the tokens that the step's budget allowed."""
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
    """Return the most that other requests would wait for full chunks, which leave no budget beside them.

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


def _uncapped(timeline: Timeline, evidence: CappedPrefill) -> Advice:
    """Return a threshold that caps no chunk; 0 means that, unless several partial prefills are allowed."""
    several = (timeline.header.scheduler_config.get("max_num_partial_prefills") or 1) > 1
    return advise(
        "{option} {value:n}[, off]{off:?}[ (now {threshold:n})]",
        evidence,
        setting="long_prefill_token_threshold",
        value=timeline.token_budget if several else 0,
        off=not several,
        costs="Longer steps with prefills: a higher inter-token latency meanwhile.",
    )


RULE = Rule(
    code="capped-prefill",
    summary="long_prefill_token_threshold cut prompts into small chunks although the steps had budget left",
    needs=frozenset({Fact.TIMES, Fact.QUEUE, Fact.LIVES, Fact.CONFIG}),
    find=_find,
    threshold=Threshold(LEAST_FRAC, share_frac),
    proven=((None, "long_prefill_token_threshold"),),
)
