"""``blocked-budget``: token budget was left unused although requests waited; one finding per cause."""

import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import largest, only, step_finding
from schedtrace.model.causes import ASKED_FOR, NOT_A_REFUSAL, Cause, reason, reasoned_details
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Evidence, Finding
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

_LIMITS = {cause: limits for cause in Cause if (limits := reasoned_details(cause, "waiting"))}
"""Causes that several limits share; the limit decides what helps."""


class BlockedBudget(Evidence, kw_only=True):
    """Unused budget, waiting requests, and the exits that the steps took."""

    mean_budget_left_frac: float
    """Mean of ``remaining_budget / token_budget`` over the steps of the finding."""
    mean_waiting: float
    """Mean of ``num_waiting_after``."""


def _find(timeline: Timeline) -> list[Finding]:
    blocked = timeline.steps.filter(
        (pl.col("remaining_budget") > 0)
        & (pl.col("num_waiting_after") > 0)
        & ~pl.col("waiting_cause").is_in([*NOT_A_REFUSAL, Cause.TOKEN_BUDGET])
    ).with_columns(
        unused=pl.min_horizontal(
            "remaining_budget", pl.col("waiting_tokens_after").fill_null(pl.col("remaining_budget"))
        ),
        limit=pl.when(pl.col("waiting_cause").is_in(list(_LIMITS))).then("waiting_detail"),
    )
    findings = [
        _finding(timeline, steps["waiting_cause"][0], steps["limit"][0], steps)
        for steps in blocked.partition_by("waiting_cause", "limit", maintain_order=True)
    ]
    return sorted(findings, key=lambda finding: -finding.tokens)


def _finding(timeline: Timeline, cause: str, limit: str | None, steps: pl.DataFrame) -> Finding:
    working = timeline.steps.filter((pl.col("total_requests") > 0) | (pl.col("num_waiting_after") > 0)).height
    cases = largest(steps, "unused")
    blocks = cases["kv_blocks_free_after"][0]
    place = only(steps["waiting_location"])
    return step_finding(
        timeline,
        steps,
        BlockedBudget(
            mean_budget_left_frac=1 - float(steps["use_frac"].mean() or 0),  # type: ignore[arg-type]  # a column of floats
            mean_waiting=int(steps["num_waiting_after"].sum()) / steps.height,
        ),
        severity="info" if cause in ASKED_FOR else "warning",
        cause=cause,
        via=str(steps["waiting_via"].unique().sort()[0]),
        location=place,
        tokens=int(steps["unused"].sum()),
        message="{steps:n step} of {working:n}{trials} left {mean_budget_left_frac:%} of the token budget "
        "unused on average although requests waited ({mean_waiting:n1} on average): {reason}. {unused}",
        example="{at}: {num_waiting_after:n request} waiting[, {waiting_request:id} next in line], "
        "{num_running_after:n} running, {remaining_budget:n token} of budget left{free}"
        "[ (left at {place:code})].",
        cases=cases,
        values={
            "working": working,
            "reason": reason(timeline.header, loop="waiting", cause=cause, detail=limit),
            "unused": _could_have_used(steps),
            "free": NOTHING if blocks is None else say(", {blocks:n KV block} free", blocks=blocks),
            "place": cases["waiting_location"][0] if place is None else None,
        },
    )


def _could_have_used(steps: pl.DataFrame) -> Message:
    """Describe the budget that the waiting requests could have used without this cause."""
    counted = steps.filter(pl.col("waiting_tokens_after").is_not_null())
    if counted.is_empty():
        return say("The trace does not record how many tokens they wanted.")
    mean = counted["unused"].sum() / counted.height
    return say(
        "Otherwise each step could have scheduled {tokens:n token} more on average.",
        tokens=round(mean),
    )


RULE = Rule(
    code="blocked-budget",
    summary="token budget was left although requests waited; one finding per cause",
    needs=frozenset({Fact.QUEUE, Fact.EXITS}),
    find=_find,
    symptom_of=(
        "kv-bound",
        "max-num-seqs-bound",
        "other-limit",
        "head-of-line",
        "kv-held-idle",
        "priority-inversion",
    ),
)
