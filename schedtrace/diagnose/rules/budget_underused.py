"""``budget-underused``: a step left budget that the next step's new requests would have fitted into.

This rule judges only records without queue lengths; with them, ``arrival-limited`` and ``blocked-budget``
show the reason.
"""

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import largest, step_finding
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline


class MissedRequests(Evidence, kw_only=True):
    """New requests of the next steps that would have fitted into the unused budget."""

    missed_requests: int
    """Number of new requests of the next steps that would have fitted."""


def _find(timeline: Timeline) -> Findings:
    if Fact.QUEUE in timeline.facts:
        return
    missed = _missed(timeline)
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
        values={"working": timeline.steps.filter(pl.col("total_requests") > 0).height},
        example="{at} scheduled {total_requests:n} of the {next_total:n request} of {next_step:step} "
        "({used_tokens:n token}) and left {remaining_budget:n token} of budget"
        "[; the next step began {gap_ms:ms} later].",
        cases=largest(missed, "missed_tokens"),
    )


def _missed(timeline: Timeline) -> pl.DataFrame:
    """Return steps with budget left for new requests of the next step, with the number that fitted."""
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
    return (
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


RULE = Rule(
    code="budget-underused",
    summary="steps left budget that the next step's new requests would have fitted into "
    "(this log does not record why)",
    needs=frozenset({Fact.REQUESTS}),
    find=_find,
    symptom_of=("arrival-limited",),
)
