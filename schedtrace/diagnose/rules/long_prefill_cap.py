"""``long-prefill-cap``: chunks were cut by ``long_prefill_token_threshold`` while token budget was left."""

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import StepExample, model_cost, step_finding
from schedtrace.model.causes import Cap
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

THRESHOLD = "long_prefill_token_threshold"


class CappedStep(StepExample, kw_only=True):
    """A step with capped chunks and budget left."""

    used_tokens: int
    """Tokens that the step scheduled."""
    remaining_budget: int
    """Tokens of its budget that were left."""
    withheld: int
    """Tokens that the capped requests wanted more."""


class CappedChunks(Evidence, kw_only=True):
    """What the capped steps left empty."""

    mean_empty_tokens: float
    """Mean number of tokens that the capped chunks left unused."""
    steps_if_full: int
    """Number of full steps that the tokens of these steps would have needed, trial by trial."""
    shared_steps: int
    """Number of these steps that scheduled other requests beside the capped ones."""
    examples: list[CappedStep]
    """Steps that withheld most tokens."""


def _find(timeline: Timeline) -> Findings:
    capped = _capped_steps(timeline)
    if capped.is_empty():
        return
    budget, model = timeline.token_budget, timeline.step_time
    of_trials = capped.group_by("trial").agg(pl.col("used_tokens").sum())["used_tokens"]
    fewest = sum(-(-used // budget) for used in of_trials)
    cost = model_cost(timeline, None if model is None else (capped.height - fewest) * model.base_us)
    worst = capped.sort("usable", "step", descending=[True, False])
    evidence = CappedChunks(
        mean_empty_tokens=float(capped["usable"].sum()) / capped.height,
        steps_if_full=fewest,
        shared_steps=capped.filter(pl.col("total_requests") > pl.col("requests")).height,
        examples=CappedStep.first(worst, 1),
    )
    protects = 2 * evidence.shared_steps >= capped.height
    yield step_finding(
        timeline,
        capped,
        evidence,
        severity="info" if protects else cost.severity(unknown="warning"),
        via="source",
        tokens=int(capped["usable"].sum()),
        message="{steps:n step}{trials} left {mean_empty_tokens:n} of {budget:n token} unused on average "
        "({share:%}) because {setting:setting} capped the chunks of prompts that wanted them. Full steps "
        "would have needed {steps_if_full:n step} for the same work.",
        example="{at} gave {used_tokens:n token} to {total_requests:n request} and left "
        "{remaining_budget:n} unused; {requests:n capped request} wanted {withheld:n} more.",
        values={
            "budget": budget,
            "share": evidence.mean_empty_tokens / budget,
            "setting": THRESHOLD,
            "total_requests": worst["total_requests"][0],
            "requests": worst["requests"][0],
        },
        cost=cost,
    )


def _capped_steps(timeline: Timeline) -> pl.DataFrame:
    """Steps with budget left in which the threshold capped chunks.

    Columns of ``timeline.steps``, ``withheld`` (tokens), ``usable`` (those that the budget had left) and
    ``requests`` (that were capped).
    """
    return (
        timeline.caps.filter(pl.col("cap").is_in([Cap.LONG_PREFILL, Cap.LONG_PREFILL_ADAPTIVE]))
        .filter(pl.col("remaining_budget") > 0)
        .group_by("step", maintain_order=True)
        .agg(
            (pl.col("wanted_tokens") - pl.col("capped_tokens")).sum().alias("withheld"),
            pl.col("request_id").n_unique().alias("requests"),
        )
        .join(timeline.steps, on="step", maintain_order="left")
        .with_columns(usable=pl.min_horizontal("withheld", "remaining_budget"))
    )


RULE = Rule(
    code="long-prefill-cap",
    summary="long_prefill_token_threshold cut prompts into small chunks while token budget was left",
    needs=frozenset({Fact.EXITS, Fact.REQUESTS}),
    find=_find,
    symptom_of=("long-prompt",),
)
