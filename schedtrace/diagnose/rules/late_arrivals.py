"""``late-arrivals``: the engine took requests faster than the front end handed them over."""

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule, Threshold
from schedtrace.diagnose.rules.common import StepExample, step_finding
from schedtrace.model.causes import Cause
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

FOUND_FROM_FRAC = 0.01
"""A hundredth of the run; what is less does not move throughput."""


class ShortStep(StepExample, kw_only=True):
    """A step that ran before all requests had arrived."""

    total_requests: int
    """Number of requests that the step scheduled."""
    to_come: int
    """Number of requests of the trial still to come."""


class LateArrivals(Evidence, kw_only=True):
    """Time of such steps, and how long the front end took."""

    spent_ms: float
    """Time of these steps, from start to output."""
    spent_frac: float
    """Share of the busy time."""
    handed_over_ms: float
    """Mean time over the trials from the first request in the scheduler to the last one."""
    examples: list[ShortStep]
    """Steps with most requests still to come."""


def _find(timeline: Timeline) -> Findings:
    if not timeline.closed_workload:
        return
    short = short_steps(timeline)
    spent_us = int(short["spent_us"].sum() or 0)
    if not timeline.busy_us or spent_us / timeline.busy_us < FOUND_FROM_FRAC:
        return
    yield step_finding(
        timeline,
        short,
        LateArrivals(
            spent_ms=spent_us / 1e3,
            spent_frac=spent_us / timeline.busy_us,
            handed_over_ms=_handed_over_us(timeline) / 1e3,
            examples=ShortStep.largest(short, "to_come"),
        ),
        cause=Cause.QUEUE_EMPTY,
        via=str(short["waiting_via"].unique().sort()[0]),
        tokens=int(short["remaining_budget"].sum()),
        message="{steps:n step}{trials} ran with tokens and seats to spare and no request waiting, while "
        "requests of the same trial had not arrived: {spent_ms:ms}, {spent_frac:%} of the busy time. "
        "They used {used:%} of the budget on average. The front end took {handed_over_ms:ms} to hand "
        "over the requests of a trial.",
        values={"used": float(short["use_frac"].sum()) / short.height},
        example="{at} scheduled {total_requests:n request} with no request waiting and "
        "{to_come:n request} still to come.",
    )


def short_steps(timeline: Timeline) -> pl.DataFrame:
    """Working steps that nothing limited except that requests of their trial had not arrived.

    Columns of ``timeline.steps``, ``to_come`` (requests that reached the scheduler after ``schedule()`` had
    returned) and ``spent_us`` (from the step's start to its output).
    """
    arrivals = (
        timeline.arrivals.filter(~pl.col("streaming_update"))
        .select(_of("trial"), "queued_us")
        .sort("queued_us")
        .with_columns(came=pl.int_range(1, pl.len() + 1).over("of"), all=pl.len().over("of"))
    )
    totals = arrivals.select("of", "all").unique()
    return (
        timeline.steps.with_columns(_of("trial"))
        .sort("end_us")
        .join_asof(
            arrivals.select("of", "queued_us", "came"),
            left_on="end_us",
            right_on="queued_us",
            by="of",
            check_sortedness=False,
        )
        .join(totals, on="of", how="left", maintain_order="left")
        .with_columns(
            to_come=pl.col("all").fill_null(0).cast(pl.Int64) - pl.col("came").fill_null(0),
            spent_us=pl.col("output_us") - pl.col("start_us"),
        )
        .filter(
            (pl.col("to_come") > 0)
            & (pl.col("total_requests") > 0)
            & (pl.col("eligible_after") == 0)
            & (pl.col("remaining_budget") > 0)
            & (pl.col("num_running_after") < timeline.seats)
            & pl.col("spent_us").is_not_null()
        )
        .sort("step")
    )


def _of(trial: str) -> pl.Expr:
    """The trial; a trace without trials is one, and null equals nothing in a join."""
    return pl.col(trial).fill_null(-1).alias("of")


def _handed_over_us(timeline: Timeline) -> float:
    """Mean over the trials: from the first request in the scheduler to the last one."""
    spans = timeline.arrivals.group_by("trial").agg(pl.col("queued_us").max() - pl.col("queued_us").min())
    return float(spans["queued_us"].mean() or 0)  # type: ignore[arg-type]  # a mean of integers


RULE = Rule(
    code="late-arrivals",
    summary="steps were small because the front end was slow to hand requests over",
    needs=frozenset({Fact.TIMES, Fact.QUEUE, Fact.EXITS, Fact.LIVES}),
    find=_find,
    symptom_of=("arrival-limited",),
    threshold=Threshold(FOUND_FROM_FRAC, lambda finding: getattr(finding.evidence, "spent_frac", None)),
)
