"""``budget-saturated``: the whole token budget was spent and requests still waited for tokens."""

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import StepExample, step_finding
from schedtrace.model.causes import Cause
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline


class FullStep(StepExample, kw_only=True):
    """One saturated step."""

    num_waiting_after: int
    waiting_tokens_after: int | None
    total_requests: int
    used_tokens: int


class Saturation(Evidence, kw_only=True):
    """Waiting after saturated steps, and what else they had used up."""

    mean_waiting: float
    max_waiting_tokens: int | None
    steps_without_seat: int
    steps_without_block: int
    examples: list[FullStep]


def _find(timeline: Timeline) -> Findings:
    full = timeline.steps.filter((pl.col("remaining_budget") == 0) & (pl.col("eligible_after") > 0))
    if full.is_empty():
        return
    known = full["waiting_tokens_after"].drop_nulls().to_list()
    evidence = Saturation(
        mean_waiting=int(full["eligible_after"].sum()) / full.height,
        max_waiting_tokens=max(known, default=None),
        steps_without_seat=full.filter(pl.col("num_running_after") >= timeline.seats).height,
        steps_without_block=full.filter(pl.col("kv_blocks_free_after") == 0).height,
        examples=FullStep.largest(full, "num_waiting_after"),
    )
    yield step_finding(
        timeline,
        full,
        evidence,
        cause=Cause.TOKEN_BUDGET,
        tokens=evidence.max_waiting_tokens or 0,
        message="{steps:n step} of {working:n}{trials} spent the whole token budget while "
        "{mean_waiting:n1} requests on average waited for tokens[, {max_waiting_tokens:n token} at "
        "most].",
        values={"working": timeline.steps.filter(pl.col("total_requests") > 0).height},
        example="{at} spent {used_tokens:n token} on {total_requests:n request} while "
        "{num_waiting_after:n request} waited.",
    )


RULE = Rule(
    code="budget-saturated",
    summary="steps spent the whole token budget while requests waited",
    needs=frozenset({Fact.QUEUE}),
    find=_find,
    symptom_of=("token-budget-bound", "long-prompt"),
)
