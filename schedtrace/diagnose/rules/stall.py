"""``stall``: the engine ran steps that scheduled nothing, although requests waited or ran."""

import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import (
    CRITICAL_COST_FRAC,
    WARNING_COST_FRAC,
    largest,
    only,
    severity,
    step_finding,
    step_numbers,
    trial_numbers,
)
from schedtrace.model.causes import ASKED_FOR, NOT_A_REFUSAL, Cause
from schedtrace.model.message import Steps
from schedtrace.model.report import Evidence, Finding
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

IS_EMPTY = (pl.col("total_requests") == 0) & (
    (pl.col("num_waiting_after") > 0) | (pl.col("num_running_after") > 0)
)


def empty_steps(timeline: Timeline) -> pl.DataFrame:
    """Return a row per series of consecutive steps that scheduled nothing while requests waited or ran.

    Columns: ``step`` (the first one), ``trial``, ``steps`` (how many), ``since_us`` (the start of
    the series or, if later, the moment when the last earlier output came back: until then the device had
    work), ``stalled_us`` (from ``since_us`` to the next step's start; without one in the trial, to the end of
    the series), ``unended`` (there is no next step), ``cause``, ``via``, ``request_id`` and ``location`` of
    the series' most frequent exit, ``num_waiting`` and ``num_running`` after the last step of the series.
    """
    steps = timeline.steps.join(
        _running_exits(timeline), on="step", how="left", maintain_order="left"
    ).with_columns(
        empty=IS_EMPTY,
        last_us=pl.max_horizontal("end_us", "output_us"),
        back_us=pl.col("output_us").cum_max().shift(1).over("trial").fill_null(0),
        next_us=pl.col("start_us").shift(-1).over("trial"),
    )
    of_waiting = (pl.col("num_waiting_after") > 0) & ~pl.col("waiting_cause").is_in(NOT_A_REFUSAL)
    columns = {
        name: pl.when(of_waiting).then(f"waiting_{name}").otherwise(f"running_{name}")
        for name in ("cause", "via", "request_id", "location")
    }
    changed = (pl.col("empty") != pl.col("empty").shift(1)) | pl.col("trial").ne_missing(
        pl.col("trial").shift(1)
    )
    empty = (
        steps.rename({"waiting_request": "waiting_request_id"})
        .with_columns(spell=changed.fill_null(value=True).cum_sum(), **columns)
        .filter("empty")
        .with_columns(pl.col("cause").fill_null(str(Cause.OTHER)), pl.col("via").fill_null("inferred"))
        .with_columns(often=pl.len().over("spell", "cause"))
    )
    main = (
        empty.sort("spell", "often", "step", descending=[False, True, False])
        .unique("spell", keep="first", maintain_order=True)
        .select("spell", *columns)
    )
    since = pl.max_horizontal(pl.col("start_us").first(), pl.col("back_us").first())
    return (
        empty.group_by("spell", maintain_order=True)
        .agg(
            pl.col("step").first(),
            pl.col("trial").first(),
            pl.len().alias("steps"),
            since.alias("since_us"),
            pl.coalesce(pl.col("next_us").last(), pl.col("last_us").last()).alias("until_us"),
            pl.col("next_us").last().is_null().alias("unended"),
            pl.col("num_waiting_after").last().alias("num_waiting"),
            pl.col("num_running_after").last().alias("num_running"),
        )
        .join(main, on="spell", maintain_order="left")
        .with_columns(stalled_us=(pl.col("until_us") - pl.col("since_us")).clip(0))
        .drop("spell", "until_us")
    )


def _running_exits(timeline: Timeline) -> pl.DataFrame:
    """Return, for every step that left out running requests, the most frequent cause of this."""
    return (
        timeline.exits.filter((pl.col("loop") == "running") & pl.col("refusal"))
        .with_columns(often=pl.col("count").sum().over("step", "cause"))
        .sort("step", "often", descending=[False, True], maintain_order=True)
        .unique("step", keep="first", maintain_order=True)
        .select("step", pl.col("cause", "via", "request_id", "location").name.prefix("running_"))
    )


FEWEST_STEPS = 10
"""Minimum number of empty steps in a stall (about 10 ms, as vLLM sleeps 1 ms in each); one or two are usual
while outputs are in flight."""
LONG_US = 100_000
"""Length in microseconds from which on users notice a pause, whatever the number of steps."""

EXPECTED = ASKED_FOR | {Cause.STREAMING_INPUT_PENDING}
"""Causes that are expected: a user requested the pause, or the client has not sent its input yet."""


class Stalls(Evidence, kw_only=True):
    """Stalls with the same cause."""

    stalls: int
    """Number of stalls."""
    unended: int
    """Number of stalls that had not ended when their trial, or the trace, ended."""
    stalled_ms: float
    """Total time of all stalls."""
    longest_ms: float
    """Time of the longest stall."""


def _find(timeline: Timeline) -> list[Finding]:
    if timeline.steps.filter(IS_EMPTY).is_empty():
        return []
    long = (pl.col("steps") >= FEWEST_STEPS) | (pl.col("stalled_us") >= LONG_US)
    stalls = empty_steps(timeline).filter(long)
    findings = [
        _finding(timeline, rows["cause"][0], rows)
        for rows in stalls.partition_by("cause", maintain_order=True)
    ]
    return sorted(findings, key=lambda finding: -finding.count)


def _finding(timeline: Timeline, cause: str, stalls: pl.DataFrame) -> Finding:
    stalled_us = int(stalls["stalled_us"].sum())
    last = pl.max_horizontal("end_us", "output_us").max()
    span_us = timeline.steps.group_by("trial").agg(last - pl.col("start_us").min())["end_us"].sum()
    part = stalled_us / max(1, int(span_us))
    cases = largest(stalls, "stalled_us")
    worst = cases.row(0, named=True)
    span = Steps(worst["step"], worst["step"] + worst["steps"] - 1, worst["trial"])
    evidence = Stalls(
        stalls=stalls.height,
        unended=int(stalls["unended"].sum()),
        stalled_ms=stalled_us / 1e3,
        longest_ms=worst["stalled_us"] / 1e3,
    )
    by_cost = severity(part, WARNING_COST_FRAC, CRITICAL_COST_FRAC)
    every = stalls.select(pl.int_ranges("step", pl.col("step") + pl.col("steps")).explode().alias("step"))
    return step_finding(
        timeline,
        stalls,
        evidence,
        severity="info" if cause in EXPECTED else "critical" if evidence.unended else by_cost,
        cause=cause,
        via=str(stalls["via"].unique().sort()[0]),
        location=only(stalls["location"]),
        count=int(stalls["steps"].sum()),
        steps=step_numbers(every),
        message="vLLM scheduled nothing in {steps:n step}{trials} although requests waited or ran: "
        "{stalls:n stall}, {stalled_ms:ms} in total, {part:%} of the run. The longest began {since:us} into "
        "the recording and took {longest_ms:ms} ({span}).[ {unended:n stall} had not ended when the {record} "
        "ended.]",
        values={
            "part": part,
            "since": worst["since_us"] + timeline.offset_us,
            "span": span,
            "record": "trial" if trial_numbers(stalls) else "trace",
        },
        example="in {span}, {num_waiting:n request} waited, {num_running:n} ran"
        "[ and vLLM refused {request_id:id}].",
        cases=cases,
        cost_ms=evidence.stalled_ms,
        cost_frac=part,
        cost_of="run",
    )


RULE = Rule(
    code="stall",
    summary="the engine stepped without scheduling anything although it had requests; one finding per cause",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES}),
    find=_find,
    symptom_of=(
        "never-fits",
        "no-progress",
        "kv-bound",
        "token-budget-bound",
        "max-num-seqs-bound",
        "other-limit",
        "kv-held-idle",
    ),
    holds_up=True,
)
