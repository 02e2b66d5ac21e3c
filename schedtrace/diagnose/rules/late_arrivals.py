"""``late-arrivals``: the engine took requests faster than the front end handed them over."""

import polars as pl

from schedtrace.diagnose.rules.common import at_step, counted, in_trials, share, step_numbers, trial_numbers
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "late-arrivals"
SUMMARY = "for a part of the run steps were small because the front end handed requests over too slowly"
NEEDS = (Fact.TIMES, Fact.QUEUE, Fact.EXITS, Fact.LIVES)

FOUND_FROM_FRAC = 0.01
"""A hundredth of the run; what is less does not move throughput."""

ADVICE = (
    "All requests of the workload exist from the start, and yet the engine ran out of them: the front end is "
    "the limit (tokenizing, one process, one socket). Hand over token ids, or have everything queued first "
    "(schedtrace run --prequeue); for a server more API processes (--api-server-count)."
)


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/late-arrivals.md``."""
    if not timeline.closed_workload:
        return []
    short = short_steps(timeline)
    busy_us = int(short["spent_us"].sum() or 0)
    if not timeline.duration_us or busy_us / timeline.duration_us < FOUND_FROM_FRAC:
        return []
    trials = trial_numbers(short)
    handed = _handed_over_us(timeline)
    part = busy_us / timeline.duration_us
    used = float(short["use_frac"].sum()) / short.height
    message = (
        f"{counted(short.height, 'step')}{in_trials(trials, len(timeline.trials()))} ran with tokens and seats "
        "left and nobody waiting while requests of the same trial were still to come: "
        f"{busy_us / 1e3:,.0f} ms, {share(part)} of the run. They used {share(used)} of the budget on "
        f"average. The front end took {handed / 1e3:,.0f} ms to hand a trial's requests over."
    )
    worst = short.sort("to_come", "step", descending=[True, False])
    first = worst.row(0, named=True)
    return [
        Finding(
            code=CODE,
            severity="info",
            cause=Cause.QUEUE_EMPTY,
            via=str(short["waiting_via"].unique().sort()[0]),
            engine_rank=timeline.rank,
            count=short.height,
            trials=trials,
            steps=step_numbers(short),
            tokens=int(short["remaining_budget"].sum()),
            message=message,
            advice=ADVICE,
            evidence={
                "spent_ms": busy_us / 1e3,
                "spent_frac": part,
                "handed_over_ms": handed / 1e3,
                "example": (
                    f"{at_step(first)} scheduled {counted(first['total_requests'], 'request')}, nobody "
                    f"waited, and {first['to_come']:,} were still to come."
                ),
                "examples": worst.select(
                    "step", "trial", "total_requests", "remaining_budget", "to_come", "spent_us"
                )
                .head(3)
                .to_dicts(),
            },
        )
    ]


def short_steps(timeline: Timeline) -> pl.DataFrame:
    """Working steps that nothing limited but that requests of their trial had not come.

    Columns of ``timeline.steps``, ``to_come`` (requests that reached the scheduler after ``schedule()`` had
    returned) and ``spent_us`` (from the step's start to its output).
    """
    came = (
        timeline.arrivals.filter(~pl.col("streaming_update"))
        .select(_of("trial"), "queued_us")
        .sort("queued_us")
        .with_columns(came=pl.int_range(1, pl.len() + 1).over("of"), all=pl.len().over("of"))
    )
    totals = came.select("of", "all").unique()
    return (
        timeline.steps.with_columns(_of("trial"))
        .sort("end_us")
        .join_asof(
            came.select("of", "queued_us", "came"),
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
