"""``queueing``: requests spent much of their time in the waiting queue, or some far more than others."""

import msgspec
import polars as pl

from schedtrace.diagnose.queue.priority_inversions import priority_inversions
from schedtrace.diagnose.rules.common import StepExample, in_trials, listed, step_numbers, trial_numbers
from schedtrace.model.facts import Fact
from schedtrace.model.message import (
    NOTHING,
    CauseWord,
    Code,
    Count,
    Duration,
    Message,
    Number,
    Request,
    Share,
    joined,
    message,
)
from schedtrace.model.report import Evidence, Finding
from schedtrace.timeline.pieces import LENGTH_US
from schedtrace.timeline.request_states import NEXT_STEP
from schedtrace.timeline.shares import queue_time_by_cause, queue_times
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

MOST_LISTED = 10
"""Requests and cases that the evidence lists."""

ADVICE_INVERTED = message(
    "Priority scheduling should admit the more urgent request first: look at these steps ({command}).",
    command=Code("schedtrace step"),
)


class CauseWait(msgspec.Struct, kw_only=True):
    """Waiting for one cause; the percentiles are over the requests that waited for it."""

    cause: str
    wait_ms: float
    share_frac: float
    requests: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


class PriorityInversion(StepExample, kw_only=True):
    """One step that scheduled a request while a more urgent one waited."""

    request_id: str
    priority: int
    by: str
    by_priority: int


class LongWait(StepExample, kw_only=True):
    """One request, the step that first scheduled it, and what it waited for most."""

    request_id: str
    priority: int
    queue_us: int
    cause: str | None
    wait_us: int | None


class Queueing(Evidence, kw_only=True):
    """Time in the waiting queue."""

    requests: int
    waited: int
    never_scheduled: int
    queue_ms: float
    queue_ms_p50: float
    queue_ms_p90: float
    queue_ms_p99: float
    of_time_in_engine_frac: float | None
    by_cause: list[CauseWait]
    starved: list[str]
    priority_inversions: list[PriorityInversion]
    examples: list[LongWait]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/queueing.md``."""
    queued = queue_times(timeline)
    if queued.is_empty():
        return []
    median_us = float(queued["queue_us"].median() or 0)  # type: ignore[arg-type]  # a column of integers
    starved = queued.filter(
        (pl.col("queue_us") > STARVED_TIMES * median_us) & (pl.col("queue_us") >= STARVED_US)
    )
    inverted = priority_inversions(timeline)
    felt = _share_of_life(timeline, queued)
    if starved.is_empty() and inverted.is_empty() and (felt is None or felt < FELT_FRAC):
        return []
    return [_finding(timeline, queued, starved, inverted, felt)]


def _finding(
    timeline: Timeline,
    queued: pl.DataFrame,
    starved: pl.DataFrame,
    inverted: pl.DataFrame,
    felt: float | None,
) -> Finding:
    waits = queue_time_by_cause(timeline, queued)
    causes = _causes(waits)
    refusals = [row.cause for row in causes if row.cause != NEXT_STEP]
    steps = timeline.steps.filter(pl.col("num_waiting_after") > 0)
    trials = trial_numbers(queued)
    p50, p90, p99 = (float(queued["queue_us"].quantile(q, "linear") or 0) / 1e3 for q in (0.5, 0.9, 0.99))
    evidence = Queueing(
        requests=queued.height,
        waited=queued.filter(pl.col("queue_us") > 0).height,
        never_scheduled=_never_scheduled(timeline, queued),
        queue_ms=int(queued["queue_us"].sum()) / 1e3,
        queue_ms_p50=p50,
        queue_ms_p90=p90,
        queue_ms_p99=p99,
        of_time_in_engine_frac=felt,
        by_cause=causes,
        starved=starved.sort("queue_us", descending=True)["request_id"].head(MOST_LISTED).to_list(),
        priority_inversions=PriorityInversion.first(inverted, MOST_LISTED),
        examples=_examples(queued, waits),
    )
    unfair = bool(starved.height or inverted.height)
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
        message=joined(
            [
                _waiting(evidence, in_trials(timeline, trials)),
                _starvation(starved.height),
                _inversions(inverted),
            ]
        ),
        advice=ADVICE_INVERTED if inverted.height else _advice(refusals),
        evidence=evidence,
        example=_described(evidence.examples[0]),
    )


def _waiting(evidence: Queueing, trials: Message) -> Message:
    felt = evidence.of_time_in_engine_frac
    return message(
        "{requests}{trials} waited {p50} in the queue at the median, {p90} at the 90th percentile and {p99} "
        "at the 99th{felt}. Their waiting time was for {causes}.",
        requests=Count(evidence.requests, "request"),
        trials=trials,
        p50=Duration(1e3 * evidence.queue_ms_p50),
        p90=Duration(1e3 * evidence.queue_ms_p90),
        p99=Duration(1e3 * evidence.queue_ms_p99),
        felt=NOTHING if felt is None else message(": {share} of their time in the engine", share=Share(felt)),
        causes=listed(
            [
                message("{cause} ({share})", cause=CauseWord(row.cause), share=Share(row.share_frac))
                for row in evidence.by_cause[:3]
            ]
        ),
    )


def _starvation(starved: int) -> Message:
    if not starved:
        return NOTHING
    return message(
        "{requests} waited more than {times} times the median.",
        requests=Count(starved, "request"),
        times=Number(STARVED_TIMES),
    )


def _inversions(inverted: pl.DataFrame) -> Message:
    if inverted.is_empty():
        return NOTHING
    return message(
        "{urgent} of higher priority waited while vLLM scheduled {others} of lower priority.",
        urgent=Count(inverted["request_id"].n_unique(), "request"),
        others=Count(inverted["by"].n_unique(), "request"),
    )


def _advice(refusals: list[str]) -> Message:
    if not refusals:
        return message("No limit refused these requests: they waited for the step that was under way.")
    return message(
        "The findings with cause {cause} name the limit. If no limit is worth raising, the load exceeds this "
        "engine: send less, or add engines.",
        cause=CauseWord(refusals[0]),
    )


def _share_of_life(timeline: Timeline, queued: pl.DataFrame) -> float | None:
    """Queue time as a share of the time in the scheduler, of requests that left it."""
    left = timeline.finishes.select("request_id").unique()
    lived = timeline.request_states.filter(pl.col("state") != "front_end").join(
        queued.join(left, on="request_id", how="semi").select("request_id", "queue_us"), on="request_id"
    )
    total = int(lived.select(LENGTH_US.sum()).item())
    waited = int(lived.unique("request_id")["queue_us"].sum())
    return waited / total if total else None


def _causes(waits: pl.DataFrame) -> list[CauseWait]:
    """The causes, the longest waiting first."""
    total = int(waits["wait_us"].sum()) or 1
    wait_ms = pl.col("wait_us") / 1e3
    rows = (
        waits.group_by("cause")
        .agg(
            wait_ms.sum().alias("wait_ms"),
            (pl.col("wait_us").sum() / total).alias("share_frac"),
            pl.len().alias("requests"),
            *(wait_ms.quantile(q, "linear").alias(f"p{100 * q:.0f}_ms") for q in (0.5, 0.9, 0.99)),
        )
        .sort("wait_ms", "cause", descending=[True, False])
    )
    return [CauseWait(**row) for row in rows.to_dicts()]


def _never_scheduled(timeline: Timeline, queued: pl.DataFrame) -> int:
    came = timeline.arrivals.filter(~pl.col("streaming_update"))["request_id"].unique()
    return came.len() - queued["request_id"].n_unique()


def _examples(queued: pl.DataFrame, waits: pl.DataFrame) -> list[LongWait]:
    """The three longest waits."""
    longest = queued.sort("queue_us", "request_id", descending=[True, False]).head(3)
    most = waits.sort("wait_us", descending=True).unique("request_id", keep="first", maintain_order=True)
    return LongWait.first(longest.join(most, on="request_id", how="left", maintain_order="left"))


def _described(example: LongWait) -> Message:
    mostly = NOTHING
    if example.cause is not None and example.wait_us is not None:
        mostly = message(
            ", {wait} of them for {cause}", wait=Duration(example.wait_us), cause=CauseWord(example.cause)
        )
    return message(
        "{step} first scheduled {request} after {wait} in the queue{mostly}.",
        step=example.at,
        request=Request(example.request_id),
        wait=Duration(example.queue_us),
        mostly=mostly,
    )
