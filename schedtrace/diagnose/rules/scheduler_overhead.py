"""``scheduler-overhead``: the device waited for the host between steps, though requests were running."""

import polars as pl

from schedtrace.diagnose.gains import host_gain
from schedtrace.diagnose.rule import Findings, Rule, Threshold, cost_frac
from schedtrace.diagnose.rules.allowed_settings import async_scheduling
from schedtrace.diagnose.rules.common import (
    advise,
    largest,
    severity,
    share_of_requests,
    step_finding,
)
from schedtrace.model.message import NOTHING
from schedtrace.model.report import Advice, Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.engine_states import with_engine_time
from schedtrace.timeline.spans import overlap_us
from schedtrace.timeline.timeline import Timeline

FOUND_FROM_FRAC = 0.01
"""Minimum share of the run; a smaller share is within the noise of most runs."""
LEADS_FROM_FRAC = 0.25
"""Minimum share of the run at which host time leads the report if vLLM could hide it; every engine has some.
"""
ADVISED_FROM_FRAC = 0.05
"""Minimum share of the run at which a setting that affects the host's work is worth trying."""
WARNING_FRAC, CRITICAL_FRAC = 0.25, 0.50
"""Minimum shares of the run at which host time is a warning, and critical (the host then takes at least as
long as the device)."""


class HostGaps(Evidence, kw_only=True):
    """Time that the device waited for the host."""

    gap_ms: float
    """Total time that the device waited; measured, not estimated."""


def _find(timeline: Timeline) -> Findings:
    gaps = host_gaps(timeline)
    gap_us, duration_us = int(gaps["gap_us"].sum() or 0), timeline.busy_us
    if not duration_us or gap_us / duration_us < FOUND_FROM_FRAC:
        return
    frac = gap_us / duration_us
    scheduling, updating = int(gaps["in_schedule_us"].sum()), int(gaps["in_update_us"].sum())
    gain = None
    if timeline.header.async_scheduling is False:
        gain = host_gain(timeline, *hidden_us(gaps))
    updated = not gaps["before_update_us"].is_null().all()
    running = timeline.request_states.filter(pl.col("state").is_in(["prefill", "decode", "recompute"]))
    felt_us = int(with_engine_time(running, timeline.engine_states)["host_us"].sum()) - int(
        overlap_us(running, timeline.host_spans).sum()
    )
    yield step_finding(
        timeline,
        gaps,
        HostGaps(gap_ms=gap_us / 1e3),
        title="Host work between steps",
        verdict="The device waits for the host: {share:%} of the busy time ({gap_ms:ms}) passed between "
        "steps while requests were running.",
        share_frac=share_of_requests(timeline, felt_us),
        gain=gain,
        severity=severity(frac, WARNING_FRAC, CRITICAL_FRAC),
        message="The device waited {gap_ms:ms} for the host before {steps:n step}: schedule() took "
        "{scheduling:%} of that{updating}; the rest is other work of the engine process.",
        values={
            "share": frac,
            "scheduling": scheduling / gap_us,
            "updating": say(", update_from_output() {share:%}", share=updating / gap_us)
            if updated
            else NOTHING,
        },
        advice=_advice(timeline) if frac >= ADVISED_FROM_FRAC else [],
        example="before {at} the device waited {gap_us:us} with {num_running_before:n request} running.",
        cases=largest(gaps, "gap_us"),
        cost_ms=gap_us / 1e3,
        cost_frac=frac,
    )


def hidden_us(gaps: pl.DataFrame) -> tuple[int, int]:
    """Return the least and most microseconds of these gaps that the device's work in a step can hide.

    Asynchronous scheduling hides ``schedule()`` and ``update_from_output()``; whether it hides the rest is
    unknown.
    """
    measured, device_us = pl.col("in_schedule_us") + pl.col("in_update_us"), pl.col("busy_us").fill_null(0)
    hidden = (
        pl.min_horizontal(hideable, device_us).sum().alias(name)
        for name, hideable in (("least", measured), ("most", pl.col("gap_us")))
    )
    least_us, most_us = gaps.select(hidden).row(0)
    return int(least_us), int(most_us)


def _advice(timeline: Timeline) -> list[Advice]:
    """Return advice; larger steps are not advised, because the host's work grows with them."""
    core = advise("a CPU core of its own for the engine process")
    match timeline.header.async_scheduling:
        case False:
            return [async_scheduling(), core]
        case True:
            more = "more engines ({engines:setting}), as {option:setting} is on"
            return [core, advise(more, engines="--data-parallel-size", option="--async-scheduling")]
        case _:
            if_off = "{option:setting}, if it is off (the trace does not record it)"
            return [advise(if_off, option="--async-scheduling"), core]


def host_gaps(timeline: Timeline) -> pl.DataFrame:
    """Return steps before which the device had nothing to do although requests ran.

    Columns: those of ``timeline.steps``, and ``gap_us``: the time from the end of the previous step on the
    device to the beginning of this one; ``in_schedule_us``, ``in_update_us``: the parts of this time in
    ``schedule()`` and in the previous step's ``update_from_output()``; ``before_update_us``: how long that
    update took. Interruptions are left out.
    """
    executed = pl.col("start_us") + pl.col("execute_after_us")
    done = pl.col("start_us") + pl.col("schedule_us")
    gap_end = pl.coalesce(executed, done)
    back, updated = (pl.col(name).shift(1).over("trial") for name in ("output_us", "update_us"))
    gap_begin = pl.coalesce(executed + pl.col("execute_us"), "output_us").shift(1).over("trial")

    def within_gap(begin: pl.Expr, end: pl.Expr) -> pl.Expr:
        return (pl.min_horizontal(end, "gap_end_us") - pl.max_horizontal(begin, "gap_begin_us")).clip(0)

    gaps = (
        timeline.steps.with_columns(
            gap_begin_us=gap_begin, gap_end_us=gap_end, gap_us=gap_end - gap_begin, before_update_us=updated
        )
        .with_columns(
            in_schedule_us=within_gap(pl.col("start_us"), done),
            in_update_us=pl.when(updated.is_null()).then(0).otherwise(within_gap(back, back + updated)),
        )
        .filter((pl.col("gap_us") > 0) & (pl.col("num_running_before") > 0) & (pl.col("total_requests") > 0))
    )
    spans = timeline.host_spans  # interruptions, which are not part of every step
    if spans.is_empty():
        return gaps
    lost = overlap_us(gaps.select(begin_us="gap_begin_us", end_us="gap_end_us"), spans)
    in_schedule = overlap_us(gaps.select(begin_us="start_us", end_us=done), spans)
    return gaps.with_columns(
        gap_us=pl.col("gap_us") - lost, in_schedule_us=(pl.col("in_schedule_us") - in_schedule).clip(0)
    ).filter(pl.col("gap_us") > 0)


RULE = Rule(
    code="scheduler-overhead",
    summary="the device waited between steps while the host scheduled, processed outputs or did other work",
    needs=frozenset({Fact.TIMES, Fact.QUEUE}),
    find=_find,
    leads_from_frac=LEADS_FROM_FRAC,
    only_if_avoidable=True,
    threshold=Threshold(FOUND_FROM_FRAC, cost_frac),
    proven=((None, "async_scheduling"),),
)
