"""Token budget that steps left unused: ``blocked-budget`` and ``budget-underused``.

* ``blocked-budget``: requests waited meanwhile; one finding per cause.
* ``budget-underused``: the next step's new requests would have fitted. This rule judges only records without
  queue lengths; with them, ``arrival-limited`` and ``blocked-budget`` show the reason.
"""

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import largest, only, step_finding
from schedtrace.model.causes import ASKED_FOR, NOT_A_REFUSAL, Cause, reason, reasoned_details
from schedtrace.model.message import NOTHING
from schedtrace.model.report import Evidence, Finding
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

_LIMITS = {cause: limits for cause in Cause if (limits := reasoned_details(cause, "waiting"))}
"""Causes that several limits share, with these limits, which decide what helps."""


class BlockedBudget(Evidence, kw_only=True):
    """Unused budget and waiting requests of steps with the same cause."""

    mean_budget_left_frac: float
    """Mean of ``remaining_budget / token_budget`` over the steps of the finding."""
    mean_waiting: float
    """Mean of ``num_waiting_after`` over the steps of the finding."""


def _find_blocked(timeline: Timeline) -> list[Finding]:
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
        _blocked_finding(timeline, steps["waiting_cause"][0], steps["limit"][0], steps)
        for steps in blocked.partition_by("waiting_cause", "limit", maintain_order=True)
    ]
    return sorted(findings, key=lambda finding: -finding.tokens)


def _blocked_finding(timeline: Timeline, cause: str, limit: str | None, steps: pl.DataFrame) -> Finding:
    working = timeline.steps.filter((pl.col("total_requests") > 0) | (pl.col("num_waiting_after") > 0)).height
    cases = largest(steps, "unused")
    blocks = cases["kv_blocks_free_after"][0]
    place = only(steps["waiting_location"])
    counted = steps.filter(pl.col("waiting_tokens_after").is_not_null())
    unused = say("The trace does not record how many tokens they wanted.")
    if counted.height:
        unused = say(
            "Otherwise each step could have scheduled {tokens:n token} more on average.",
            tokens=round(counted["unused"].sum() / counted.height),
        )
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
            "unused": unused,
            "free": NOTHING if blocks is None else say(", {blocks:n KV block} free", blocks=blocks),
            "place": cases["waiting_location"][0] if place is None else None,
        },
    )


BLOCKED_BUDGET_RULE = Rule(
    code="blocked-budget",
    summary="token budget was left although requests waited; one finding per cause",
    needs=frozenset({Fact.QUEUE, Fact.EXITS}),
    find=_find_blocked,
    symptom_of=(
        "kv-bound",
        "max-num-seqs-bound",
        "other-limit",
        "head-of-line",
        "kv-held-idle",
        "priority-inversion",
    ),
)


class MissedRequests(Evidence, kw_only=True):
    """New requests of following steps that would have fitted into the unused budget of the step before."""

    missed_requests: int
    """Number of new requests of following steps that would have fitted."""


def _find_missed(timeline: Timeline) -> Findings:
    if Fact.QUEUE in timeline.facts:
        return
    steps = timeline.steps.filter(pl.col("total_requests") > 0).sort("step")
    nexts = steps.select(
        "step",
        "trial",
        "total_requests",
        "used_tokens",
        "remaining_budget",
        next_step=pl.col("step").shift(-1),
        gap_ms=(pl.col("start_us").shift(-1) - pl.col("start_us")) / 1e3,
        seats=pl.col("max_num_running_reqs") - pl.col("total_requests"),
        next_total=pl.col("total_requests").shift(-1),
    ).filter(pl.col("remaining_budget") > 0)
    new = (
        timeline.admitted.lazy().filter(pl.col("phase") == "new").select("step", "scheduled_tokens").collect()
    )
    missed = (
        nexts.join(new, left_on="next_step", right_on="step", how="inner", maintain_order="left_right")
        .with_columns(
            so_far=pl.col("scheduled_tokens").cum_sum().over("step"),
            place=pl.int_range(1, pl.len() + 1).over("step"),
        )
        .filter(
            (pl.col("so_far") <= pl.col("remaining_budget"))
            & (pl.col("place") <= pl.col("seats")).fill_null(value=True)
        )
        .group_by("step", "trial", "next_step", "gap_ms", maintain_order=True)
        .agg(
            pl.col("total_requests", "used_tokens", "remaining_budget", "next_total").first(),
            pl.len().alias("missed_requests"),
            pl.col("scheduled_tokens").sum().alias("missed_tokens"),
        )
    )
    if missed.is_empty():
        return
    yield step_finding(
        timeline,
        missed,
        MissedRequests(missed_requests=int(missed["missed_requests"].sum())),
        tokens=int(missed["missed_tokens"].sum()),
        message="{steps:n step} of {working:n}{trials} left token budget that "
        "{missed_requests:n request} ({tokens:n token}), new in the next step, would have fitted into. "
        "This log has no queue lengths: it does not show whether they had not arrived or were refused.",
        values={"working": steps.height},
        example="{at} scheduled {total_requests:n} of the {next_total:n request} of {next_step:step} "
        "({used_tokens:n token}) and left {remaining_budget:n token} of budget"
        "[; the next step began {gap_ms:ms} later].",
        cases=largest(missed, "missed_tokens"),
    )


BUDGET_UNDERUSED_RULE = Rule(
    code="budget-underused",
    summary="steps left budget that the next step's new requests would have fitted into "
    "(this log does not record why)",
    needs=frozenset({Fact.REQUESTS}),
    find=_find_missed,
    symptom_of=("arrival-limited",),
)
