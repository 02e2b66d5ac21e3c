"""``batched-prefill``: prompts prefilled together each had their first token only when all were computed."""

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule, Threshold, share_frac
from schedtrace.diagnose.rules.allowed_settings import (
    BATCHED_TOKENS,
    batched_tokens,
    can_lower_batched_tokens,
)
from schedtrace.diagnose.rules.common import advise, step_finding
from schedtrace.model.message import Steps
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.spans import total_us
from schedtrace.timeline.timeline import Timeline

MOST_FRAC = 0.5
"""Least share of the requests' time from which the finding is reported."""


class BatchedPrefill(Evidence, kw_only=True):
    """Steps that completed several prompts, and the time that these prompts waited for each other."""

    prefill_frac: float
    """All prefill as a share of all requests' time."""
    others_frac: float
    """Time that prompts waited for the other prompts of their step, as a share of all requests' time."""
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


def _find(timeline: Timeline) -> Findings:
    steps = together(timeline)
    can_lower = can_lower_batched_tokens(timeline)
    # Whose first token comes first is nothing to a batch that is judged by its end.
    if timeline.closed_workload or not timeline.requests_us or can_lower is False:
        return
    others_frac = float(steps["others_us"].sum()) / timeline.requests_us
    if others_frac <= MOST_FRAC:
        return
    prefill = timeline.request_states.filter(pl.col("state") == "prefill")
    worst = steps.sort("others_us", "step", descending=[True, False]).row(0, named=True)
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
    the sum of the times that they waited for each other's tokens, without the time of a step that has no
    prompt. Empty if that is unknown.
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


RULE = Rule(
    code="batched-prefill",
    summary="prompts were prefilled in one long step: each had its first token only when all were done",
    needs=frozenset({Fact.TIMES, Fact.LIVES, Fact.REQUESTS}),
    find=_find,
    threshold=Threshold(MOST_FRAC, share_frac),
)
