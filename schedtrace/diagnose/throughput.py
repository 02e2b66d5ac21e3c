"""Definition of throughput: requests and tokens per second, and the period over which they count.

A trial of ``schedtrace run`` has a beginning and an end, so its throughput refers to its whole duration, as
in vLLM's benchmarks. The load of a server has no such limits. Its throughput refers to the time in which it
had a request, because idle hours say nothing about the engine.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import polars as pl

from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import RunReport
from schedtrace.model.say import say
from schedtrace.read.trace import Trace
from schedtrace.timeline.engine_states import BUSY
from schedtrace.timeline.frames import without_gaps
from schedtrace.timeline.spans import LENGTH_US, total_us, united
from schedtrace.timeline.timeline import Timeline, made_once

Over = Literal["trial", "requests"]
"""Period of the throughput: the whole trial, or the time in which there were requests."""
NOT_IDLE_FRAC = 0.99
"""Share of time with requests below which a report names the period of the throughput."""
SPAN = {"begin_us": pl.Int64, "end_us": pl.Int64}
"""Columns of a table of spans of time."""


class Throughput(NamedTuple):
    """Rates as vLLM's benchmarks print them."""

    requests_per_s: float
    total_tokens_per_s: float
    output_tokens_per_s: float


def throughput(requests: int, prompt_tokens: int, output_tokens: int, seconds: float) -> Throughput:
    """Return the rates of finished requests, prompt tokens and output tokens, in a time above 0."""
    return Throughput(requests / seconds, (prompt_tokens + output_tokens) / seconds, output_tokens / seconds)


def over(timeline: Timeline) -> Over:
    """Return the period that the throughput covers: whole trials, if the trace has them in full."""
    return "trial" if timeline.whole_trials else "requests"


@made_once
def counted_spans(timeline: Timeline) -> pl.DataFrame:
    """Return the counted periods of each trial, by the wall clock: ``trial``, ``begin_us`` and ``end_us``.

    A whole trial has one row, from the start of its first step to its last output. Otherwise, there is one
    row for every uninterrupted period in which the engine had a request. Gaps of the trace are cut out in
    both cases.
    """
    anchor = timeline.header.wall_anchor_us
    if timeline.whole_trials:
        spans = timeline.steps.group_by("trial", maintain_order=True).agg(
            begin_us=pl.col("start_us").min(), end_us=pl.col("output_us").max()
        )
        spans = without_gaps(spans, timeline.gaps)
    else:
        busy = timeline.engine_states.filter(pl.col("state").is_in(BUSY))
        spans = pl.concat(
            [
                united(of_trial).with_columns(trial=pl.lit(of_trial["trial"][0], pl.Int64))
                for of_trial in busy.partition_by("trial")
            ]
            or [pl.DataFrame(schema={**SPAN, "trial": pl.Int64})]
        )
    return spans.select(
        pl.col("trial").cast(pl.Int64), pl.col("begin_us", "end_us").cast(pl.Int64) + anchor
    ).drop_nulls(["begin_us", "end_us"])


def counted_s(engines: Iterable[pl.DataFrame]) -> dict[int | None, float]:
    """Return the counted seconds of each trial; a moment with several engines counts once.

    Args:
        engines: ``counted_spans`` of each engine.
    """
    spans = pl.concat(engines).partition_by("trial", as_dict=True)
    return {trial: covered_seconds(of_trial) for (trial,), of_trial in spans.items()}


def request_presence(trace: Trace, begin_us: int, end_us: int) -> pl.DataFrame:
    """Return the time in which each request was in the scheduler, cut to the time between two moments."""
    there = trace.present.select("request_id", queued_us="at_us")
    begun = pl.concat([there, trace.arrivals[["request_id", "queued_us"]]])
    ended = trace.finishes.group_by("request_id").agg(end_us=pl.col("finished_us").max())
    return (
        begun.group_by("request_id")
        .agg(begin_us=pl.col("queued_us").min())
        .join(ended, on="request_id", how="left")
        .select(begin_us="begin_us", end_us=pl.col("end_us").fill_null(end_us))
        .select(pl.col(name).cast(kind).clip(begin_us, end_us) for name, kind in SPAN.items())
        .filter(LENGTH_US > 0)
    )


def counted_time(run: RunReport) -> Message:
    """Return a note on the period that a run's throughput covers, if the run was idle for part of it.

    ``while requests were present (38 of 57 s)``, ``over whole trials (57 s, requests for 38 s)``.
    """
    trials = [trial for trial in run.trials if trial.throughput_s]
    counted = sum({trial.trial: trial.throughput_s or 0.0 for trial in trials}.values())
    lasted = sum(
        max((report.duration_s or 0.0 for report in trials if report.trial == number), default=0.0)
        for number in {trial.trial for trial in trials}
    )
    busy = max((_busy_s(run, rank) for rank in {trial.engine_rank for trial in trials}), default=0.0)
    if {trial.throughput_over for trial in trials} == {"requests"} and counted < NOT_IDLE_FRAC * lasted:
        return say(
            "while requests were present ({counted:n} of {lasted:n} s)",
            counted=counted,
            lasted=lasted,
        )
    if {trial.throughput_over for trial in trials} == {"trial"} and busy < NOT_IDLE_FRAC * counted:
        return say(
            "over whole trials ({counted:n} s, requests for {busy:n} s)",
            counted=counted,
            busy=busy,
        )
    return NOTHING


def _busy_s(run: RunReport, rank: int) -> float:
    states = [part for part in run.engine_time if part.engine_rank == rank]
    return sum(part.time_ms for part in states if part.state in BUSY) / 1e3


def covered_seconds(spans: pl.DataFrame) -> float:
    """Return the seconds that these spans cover, each moment once."""
    return total_us(united(spans)) / 1e6


def sampled_tokens(steps: pl.DataFrame, finished: pl.DataFrame) -> int:
    """Return the number of output tokens of these steps or, if not recorded, of the finished requests."""
    if "output_tokens" in steps.columns and steps["output_tokens"].count():
        return int(steps["output_tokens"].sum())
    return int(finished["output_tokens"].sum())
