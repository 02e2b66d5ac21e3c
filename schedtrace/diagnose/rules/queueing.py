"""``queueing``: requests spent much of their time in the waiting queue, or some far more than others."""

from typing import Any

import polars as pl

from schedtrace.diagnose.queue.priority_inversions import priority_inversions
from schedtrace.diagnose.queue.times import NEXT_STEP, by_cause, queue_times
from schedtrace.diagnose.rules.common import at_step, counted, in_trials, share, step_numbers, trial_numbers
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "queueing"
SUMMARY = "requests spent much of their time in the waiting queue, or some far more than the others"
NEEDS = (Fact.REQUESTS, Fact.TIMES, Fact.QUEUE, Fact.EXITS, Fact.LIVES, Fact.CONFIG)

FELT_FRAC = 0.10
"""A tenth of a request's time in the engine is felt by who waits for it."""
MOST_FRAC = 0.50
"""From half of it on, waiting is what its latency is made of."""
STARVED_TIMES = 10
STARVED_US = 100_000
"""Ten times the median, and a tenth of a second: less is not noticed, however large the ratio."""

ADVICE = (
    "What they waited for is told by cause: see the findings of that cause. Where no limit is worth raising, "
    "the load is more than this engine can take: send less of it, or add engines."
)
ADVICE_OVERTAKEN = "By --scheduling-policy priority this should not happen: see the steps in which it did."


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/queueing.md``."""
    queued = queue_times(timeline)
    if queued.is_empty():
        return []
    median_us = float(queued["queue_us"].median() or 0)  # type: ignore[arg-type]  # a column of integers
    starved = queued.filter(
        (pl.col("queue_us") > STARVED_TIMES * median_us) & (pl.col("queue_us") >= STARVED_US)
    )
    passed_over = priority_inversions(timeline)
    felt = _share_of_life(timeline, queued)
    if starved.is_empty() and passed_over.is_empty() and (felt is None or felt < FELT_FRAC):
        return []
    return [_finding(timeline, queued, starved, passed_over, felt)]


def _finding(
    timeline: Timeline,
    queued: pl.DataFrame,
    starved: pl.DataFrame,
    passed_over: pl.DataFrame,
    felt: float | None,
) -> Finding:
    told = by_cause(timeline, queued)
    causes = _causes(told)
    refusals = [row["cause"] for row in causes if row["cause"] != NEXT_STEP]
    waited = queued.filter(pl.col("queue_us") > 0)
    steps = timeline.steps.filter(pl.col("num_waiting_after") > 0)
    trials = trial_numbers(queued)
    p50, p90, p99 = (float(queued["queue_us"].quantile(q, "linear") or 0) / 1e3 for q in (0.5, 0.9, 0.99))
    total_ms = int(queued["queue_us"].sum()) / 1e3
    first = ", ".join(f"{row['cause']} {share(row['share_frac'])}" for row in causes[:3])
    of_life = "" if felt is None else f" ({share(felt)} of their time in the engine)"
    message = (
        f"{counted(queued.height, 'request')}{in_trials(trials, len(timeline.trials()))} waited {p50:,.1f} ms in "
        f"the queue at the median, {p90:,.1f} ms at the 90th percentile and {p99:,.1f} ms at the "
        f"99th{of_life}. What they waited for: {first}."
    )
    if starved.height:
        message += f" {counted(starved.height, 'request')} waited more than {STARVED_TIMES} times the median."
    if passed_over.height:
        message += (
            f" {counted(passed_over['request_id'].n_unique(), 'request')} of higher priority waited while "
            f"{counted(passed_over['by'].n_unique(), 'request')} of lower priority went first."
        )
    unfair = bool(starved.height or passed_over.height)
    examples = _examples(queued, told)
    return Finding(
        code=CODE,
        severity="warning" if unfair or (felt is not None and felt >= MOST_FRAC) else "info",
        cause=refusals[0] if refusals else None,
        via=str(steps["waiting_via"].unique().sort()[0]) if steps.height else "recorded",
        engine_rank=timeline.rank,
        count=steps.height,
        trials=trials,
        steps=step_numbers(steps),
        tokens=0,
        message=message,
        advice=ADVICE_OVERTAKEN if passed_over.height else ADVICE,
        evidence={
            "requests": queued.height,
            "waited": waited.height,
            "never_scheduled": _never_scheduled(timeline, queued),
            "queue_ms": total_ms,
            "queue_ms_p50": p50,
            "queue_ms_p90": p90,
            "queue_ms_p99": p99,
            "of_time_in_engine_frac": felt,
            "by_cause": causes,
            "starved": starved.sort("queue_us", descending=True)["request_id"].head(10).to_list(),
            "priority_inversions": passed_over.head(10).to_dicts(),
            "example": _in_words(examples[0]),
            "examples": examples,
        },
    )


def _share_of_life(timeline: Timeline, queued: pl.DataFrame) -> float | None:
    """Queue time as a share of the time from ``queued_us`` to the last token, of those that have both."""
    lived = queued.join(timeline.finishes.select("request_id", "last_token_us"), on="request_id").drop_nulls(
        "last_token_us"
    )
    total = int((lived["last_token_us"] - lived["queued_us"]).sum())
    return int(lived["queue_us"].sum()) / total if total > 0 else None


def _causes(told: pl.DataFrame) -> list[dict[str, Any]]:
    """What was waited for, the longest first; percentiles are over the requests that waited for it."""
    total = int(told["wait_us"].sum()) or 1
    of = pl.col("wait_us") / 1e3
    return (
        told.group_by("cause")
        .agg(
            of.sum().alias("wait_ms"),
            (pl.col("wait_us").sum() / total).alias("share_frac"),
            pl.len().alias("requests"),
            *(of.quantile(q, "linear").alias(f"p{100 * q:.0f}_ms") for q in (0.5, 0.9, 0.99)),
        )
        .sort("wait_ms", "cause", descending=[True, False])
        .to_dicts()
    )


def _never_scheduled(timeline: Timeline, queued: pl.DataFrame) -> int:
    came = timeline.arrivals.filter(~pl.col("streaming_update"))["request_id"].unique()
    return came.len() - queued["request_id"].n_unique()


def _examples(queued: pl.DataFrame, told: pl.DataFrame) -> list[dict[str, Any]]:
    """Those who waited longest, with what each waited for most."""
    longest = queued.sort("queue_us", "request_id", descending=[True, False]).head(3)
    most = told.sort("wait_us", descending=True).unique("request_id", keep="first", maintain_order=True)
    return (
        longest.join(most, on="request_id", how="left", maintain_order="left")
        .select("step", "trial", "request_id", "priority", "queue_us", "cause", "wait_us")
        .to_dicts()
    )


def _in_words(example: dict[str, Any]) -> str:
    mostly = (
        f", {example['wait_us'] / 1e3:,.1f} ms of them for {example['cause']}" if example["cause"] else ""
    )
    return (
        f"{at_step(example)} first scheduled {example['request_id']} after "
        f"{example['queue_us'] / 1e3:,.1f} ms in the queue{mostly}."
    )
