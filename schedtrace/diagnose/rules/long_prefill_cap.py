"""``long-prefill-cap``: chunks were cut by ``long_prefill_token_threshold`` while token budget was left."""

import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import (
    StepExample,
    in_trials,
    model_cost,
    step_numbers,
    trial_numbers,
)
from schedtrace.model.causes import Cap
from schedtrace.model.facts import Fact
from schedtrace.model.message import Message
from schedtrace.model.report import Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline

CODE = "long-prefill-cap"
THRESHOLD = "long_prefill_token_threshold"


class CappedStep(StepExample, kw_only=True):
    """One step with capped chunks and budget left."""

    used_tokens: int
    remaining_budget: int
    withheld: int
    usable: int


class CappedChunks(Evidence, kw_only=True):
    """What the capped steps left empty."""

    mean_empty_tokens: float
    steps_if_full: int
    shared_steps: int
    examples: list[CappedStep]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/long-prefill-cap.md``."""
    capped = _capped_steps(timeline)
    if capped.is_empty():
        return []
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
    trials = trial_numbers(capped)
    return [
        Finding(
            code=CODE,
            severity="info" if protects else cost.severity(unknown="warning"),
            cause=None,
            via="source",
            engine_rank=timeline.rank,
            count=capped.height,
            trials=trials,
            steps=step_numbers(capped),
            tokens=int(capped["usable"].sum()),
            message=say(
                "{steps:n step}{trials} left {empty:n} of {budget:n token} unused on average "
                "({share:%}) because {setting:setting} capped the chunks of prompts that wanted "
                "them. Full steps would have needed {fewest:n step} for the same work.",
                steps=capped.height,
                trials=in_trials(timeline, trials),
                empty=evidence.mean_empty_tokens,
                budget=budget,
                share=evidence.mean_empty_tokens / budget,
                setting=THRESHOLD,
                fewest=fewest,
            ),
            evidence=evidence,
            example=_described(evidence.examples[0], worst["requests"][0], worst["total_requests"][0]),
            cost_ms=cost.ms,
            cost_frac=cost.frac,
            cost_error_frac=cost.error_frac,
        )
    ]


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


def _described(example: CappedStep, capped: int, running: int) -> Message:
    return say(
        "{step} gave {tokens:n token} to {running:n request} and left {left:n} unused; "
        "{capped:n capped request} wanted {withheld:n} more.",
        step=example.at,
        tokens=example.used_tokens,
        running=running,
        left=example.remaining_budget,
        capped=capped,
        withheld=example.withheld,
    )


RULE = Rule(
    code=CODE,
    summary="long_prefill_token_threshold cut prompts into small chunks while token budget was left",
    needs=frozenset({Fact.EXITS, Fact.REQUESTS}),
    find=find,
    symptom_of=("long-prompt",),
)
