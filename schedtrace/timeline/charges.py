"""Charges of every wait: each is followed to the end of its chain, step by step.

A request that waits for a seat waits, in the end, for what stalls the requests in the seats; a request that
waits for the token budget may wait for one long prompt. The result is a table that divides the time of
``request_states`` in which requests got nothing, and so cannot disagree with it.
"""

from dataclasses import dataclass

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.timeline.events import INTERRUPTED
from schedtrace.timeline.frames import EngineFrames
from schedtrace.timeline.holders import SHORT_FRAC
from schedtrace.timeline.request_states import NEXT_STEP, QUEUED
from schedtrace.timeline.spans import LENGTH_US, merged, overlap_us, steps_of, time_within, united

PARKED_LOADS = "parked_loads"
"""Charge of a wait for blocks of requests that wait for KV from elsewhere: at least as many as run."""
IDLE_HOLDERS = "idle_holders"
"""Charge of a wait while idle requests, as sessions between two parts, keep half of the held blocks."""
HEAD_OF_LINE = "head_of_line"
"""Charge of a request that would have fitted, but stood behind one that did not."""
PRIORITY_INVERSION = "priority_inversion"
"""Charge of a wait for what less urgent requests hold, which run."""
LONG_PROMPT = "long_prompt"
"""Charge of a wait while one prompt, far longer than the request's own, takes the token budget."""
CACHE_RESET = "cache_reset"
"""Charge after a reset of the prefix cache took the request's KV blocks: it waits and computes again."""
ABORTED_WORK = "aborted_work"
"""Charge of a wait for a limit while the device works for requests that are aborted later."""
RECOMPUTE = "recompute"
"""Charge of computing again what a preemption threw away: no wait."""
CHARGES = (
    PARKED_LOADS,
    IDLE_HOLDERS,
    HEAD_OF_LINE,
    PRIORITY_INVERSION,
    LONG_PROMPT,
    CACHE_RESET,
    INTERRUPTED,
    ABORTED_WORK,
    RECOMPUTE,
)
"""Charges beside those that are a ``Cause``."""

OF_LIMITS = (
    Cause.MAX_NUM_SEQS,
    Cause.TOKEN_BUDGET,
    Cause.INPUT_BUDGET,
    Cause.KV_BLOCKS,
)
"""Charges that are shorter where the device does less in vain."""
OF_KV = (Cause.PREEMPTED_THIS_STEP, Cause.STALE_OUTPUT_PENDING)
"""Refusals that follow from a preemption, which is for want of KV blocks."""
HALF = 0.5
"""Share of the seats that decides."""

SCHEMA = {
    "request_id": pl.String,
    "trial": pl.Int64,
    "begin_us": pl.Int64,
    "end_us": pl.Int64,
    "state": pl.String,
    "cause": pl.String,
    "begin_step": pl.Int64,
    "end_step": pl.Int64,
    "charge": pl.String,
    "time_us": pl.Int64,
}


def charges(
    frames: EngineFrames,
    states: pl.DataFrame,
    *,
    events: pl.DataFrame,
    held_up: pl.DataFrame,
    idle: pl.DataFrame,
    long: pl.DataFrame,
    in_vain: pl.DataFrame,
) -> pl.DataFrame:
    """Return the rows of ``request_states`` in which requests got nothing, by what that is charged to.

    Columns: those of ``SCHEMA``. A row appears once for each of its charges; their ``time_us`` add up to the
    row's length, or to the length of the part that is behind a refused head.

    Args:
        frames: One engine's.
        states: Its ``request_states``.
        events: Its interruptions.
        held_up: Requests behind refused heads, which would have fitted (``admission.behind_head``).
        idle: ``holders.idle_holders``.
        long: ``holders.long_prefills``.
        in_vain: ``aborted_work``.
    """
    waits = states.filter(
        pl.col("state").is_in([*QUEUED, "stalled"]) & pl.col("cause").ne_missing(pl.lit(NEXT_STEP))
    ).with_columns(pl.col("cause").fill_null(str(Cause.OTHER)))
    parts = _behind_heads(frames, waits, held_up)
    steps = _labelled(frames, states, idle, long)
    charged = [
        parts.filter("held_up").with_columns(charge=pl.lit(HEAD_OF_LINE), time_us=LENGTH_US),
        *(
            _divided(frames, states, rows, steps, str(cause))
            for (cause,), rows in parts.filter(~pl.col("held_up")).group_by("cause", maintain_order=True)
        ),
        states.filter(pl.col("state") == "recompute").with_columns(
            charge=pl.lit(RECOMPUTE), time_us=LENGTH_US
        ),
    ]
    rows_by_charge = pl.concat(
        rows.select(pl.col(name).cast(kind) for name, kind in SCHEMA.items()) for rows in charged
    )
    rows_by_charge = _interrupted(events, _after_resets(frames, rows_by_charge))
    rows_by_charge = _in_vain(in_vain, rows_by_charge)
    return rows_by_charge.filter(pl.col("time_us") > 0).sort("begin_us", "request_id")


def _after_resets(frames: EngineFrames, rows: pl.DataFrame) -> pl.DataFrame:
    """Charge rows to a reset where the request's last preemption was one: nothing else took its blocks."""
    taken = frames.preemptions.select("request_id", "in_schedule", "step").sort("step")
    if taken["in_schedule"].all():
        return rows
    after = (
        rows.with_columns(step="begin_step")
        .sort("step", nulls_last=True)
        .join_asof(taken, on="step", by="request_id", check_sortedness=False)
    )
    by_reset = pl.col("state").is_in(["preempted", "recompute"]) & ~pl.col("in_schedule")
    charge = pl.when(by_reset.fill_null(value=False)).then(pl.lit(CACHE_RESET)).otherwise("charge")
    return after.with_columns(charge=charge).select(rows.columns)


def _interrupted(events: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """Charge to an interruption what of the waits lies in it."""
    spans = merged(events)
    if spans.is_empty():
        return rows
    inside = overlap_us(rows, spans)
    lost = (pl.col("time_us") * inside / LENGTH_US).fill_nan(0).round().cast(pl.Int64)
    return _split(rows, lost, INTERRUPTED)


def _in_vain(work: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """Charge to aborted requests what of the waits for a limit the device worked for them."""
    if work.is_empty():
        return rows
    inside = time_within(rows, work, {"us": pl.col("in_vain")})["us"]
    lost = (pl.col("time_us") * inside / LENGTH_US).fill_nan(0).round().cast(pl.Int64)
    limited = pl.col("charge").is_in([*map(str, OF_LIMITS)])
    return _split(rows, pl.when(limited).then(lost).otherwise(0), ABORTED_WORK)


def _behind_heads(frames: EngineFrames, waits: pl.DataFrame, held_up: pl.DataFrame) -> pl.DataFrame:
    """Return the waits, cut where a request began to be held up: ``held_up`` from then on."""
    starts = frames.steps.select("step", held_us="start_us")
    held = held_up.join(starts, on="step").sort("held_us")
    held = held.select("request_id", "held_us", "left_step")
    if held.is_empty():
        return waits.with_columns(held_up=pl.lit(value=False))
    queued = waits.filter(pl.col("state").is_in(QUEUED)).sort("end_us")
    cut_at_heads = queued.join_asof(
        held, left_on="end_us", right_on="held_us", by="request_id", check_sortedness=False
    ).with_columns(
        cut=pl.when(pl.col("left_step") > pl.col("begin_step"))
        .then(pl.max_horizontal("held_us", "begin_us"))
        .fill_null(pl.col("end_us"))
    )
    return pl.concat(
        [
            waits.filter(~pl.col("state").is_in(QUEUED)).with_columns(held_up=pl.lit(value=False)),
            cut_at_heads.with_columns(end_us="cut", held_up=pl.lit(value=False)).select(
                *waits.columns, "held_up"
            ),
            cut_at_heads.with_columns(begin_us="cut", held_up=pl.lit(value=True)).select(
                *waits.columns, "held_up"
            ),
        ]
    ).filter(LENGTH_US > 0)


@dataclass(frozen=True)
class _Steps:
    """Spans of time, one a step, with what decides the charge of a wait there."""

    spans: pl.DataFrame
    """``begin_us``, ``end_us``, ``seats``, ``kv`` (the charge of a wait for each), ``unused`` (share of the
    token budget) and ``long_prompt``."""
    longest_prompt: int
    """Tokens of the longest prompt that took most of a step's prefill tokens."""
    prompts: pl.DataFrame
    """``request_id``, ``prompt_tokens``, ``priority``."""


def _labelled(frames: EngineFrames, states: pl.DataFrame, idle: pl.DataFrame, long: pl.DataFrame) -> _Steps:
    stalled = states.filter(pl.col("state") == "stalled")
    most_stalled = (
        pl.concat(
            [
                steps_of(frames.steps.select("step"), rows).with_columns(cause=pl.lit(str(cause)))
                for (cause,), rows in stalled.group_by("cause", maintain_order=True)
            ]
            or [pl.DataFrame(schema={"step": pl.Int64, "requests": pl.Int32, "cause": pl.String})]
        )
        .sort("requests", descending=True, maintain_order=True)
        .group_by("step", maintain_order=True)
        .agg(pl.col("requests").sum(), pl.col("cause").first())
    )
    idle_runs = idle.select(step=pl.int_ranges("first_step", pl.col("last_step") + 1))
    idle_steps = idle_runs["step"].explode()
    running = pl.col("num_running_after")
    parked = pl.col("kv_loads_parked") >= pl.max_horizontal(running, 1)
    stalls = pl.col("requests") > HALF * running
    spans = (
        frames.steps.drop_nulls("start_us")
        .join(most_stalled, on="step", how="left", maintain_order="left")
        .join(
            long.select("step", long_prompt=pl.lit(value=True)), on="step", how="left", maintain_order="left"
        )
        .select(
            begin_us="start_us",
            end_us=pl.col("start_us").shift(-1).fill_null(frames.end_us),
            seats=pl.when(stalls).then("cause").otherwise(pl.lit(str(Cause.MAX_NUM_SEQS))),
            kv=pl.when(parked)
            .then(pl.lit(PARKED_LOADS))
            .when(pl.col("step").is_in(idle_steps.implode()))
            .then(pl.lit(IDLE_HOLDERS))
            .otherwise(pl.lit(str(Cause.KV_BLOCKS))),
            unused=pl.col("remaining_budget") / pl.col("token_budget"),
            long_prompt=pl.col("long_prompt").fill_null(value=False),
        )
    )
    asked = frames.known_requests.select("request_id", "prompt_tokens", "priority")
    return _Steps(spans, int(long["prompt_tokens"].max() or 0), asked)  # type: ignore[arg-type]  # integers


def _divided(
    frames: EngineFrames, states: pl.DataFrame, rows: pl.DataFrame, steps: _Steps, cause: str
) -> pl.DataFrame:
    """Return the rows of one cause, each divided among the charges of its steps."""
    rows = rows.with_columns(charge=pl.lit(cause), time_us=LENGTH_US)
    if cause == Cause.TOKEN_BUDGET:
        return _by_long_prompt(rows, steps)
    if cause == Cause.CHUNKED_PREFILL_OFF:
        # Chunks would have used what the steps left of the budget: the rest of the wait is for more of it.
        unused = time_within(rows, steps.spans, {"us": pl.col("unused")})["us"]
        return _split(rows.with_columns(charge=pl.lit(str(Cause.TOKEN_BUDGET))), pl.lit(unused), cause)
    column = "seats" if cause == Cause.MAX_NUM_SEQS else "kv" if cause in (Cause.KV_BLOCKS, *OF_KV) else None
    if column is None:
        return rows
    divided = _by_label(rows, steps.spans, column)
    return _inverted(states, divided, steps) if frames.by_priority else divided


def _split(rows: pl.DataFrame, part_us: pl.Expr, charge: str) -> pl.DataFrame:
    """Return the rows twice: a part of ``time_us`` is charged to ``charge``, the rest to what it was."""
    return pl.concat(
        [
            rows.with_columns(charge=pl.lit(charge), time_us=part_us),
            rows.with_columns(time_us=pl.col("time_us") - part_us),
        ]
    )


def _by_label(rows: pl.DataFrame, spans: pl.DataFrame, column: str) -> pl.DataFrame:
    words = spans[column].drop_nulls().unique().sort().to_list()
    if not words:  # no step tells who holds it
        return rows
    times = time_within(rows, spans, {word: pl.col(column) == word for word in words})
    return pl.concat([rows.with_columns(charge=pl.lit(word), time_us=times[word]) for word in words])


def _by_long_prompt(rows: pl.DataFrame, steps: _Steps) -> pl.DataFrame:
    long_us = time_within(rows, steps.spans, {"us": pl.col("long_prompt")})["us"]
    rows = rows.join(steps.prompts, on="request_id", how="left", maintain_order="left")
    short = (pl.col("prompt_tokens") <= SHORT_FRAC * steps.longest_prompt).fill_null(value=False)
    return _split(rows, pl.when(short).then(long_us).otherwise(0), LONG_PROMPT)


def _inverted(states: pl.DataFrame, rows: pl.DataFrame, steps: _Steps) -> pl.DataFrame:
    """Charge rows of requests that are more urgent than a running one to that inversion."""
    priorities = steps.prompts.select("request_id", "priority")
    runs = pl.col("state").is_in(["prefill", "decode", "recompute", "stalled"])
    running = states.filter(runs).join(priorities, on="request_id")
    divided = []
    for (priority,), of_class in rows.join(priorities, on="request_id", how="left").group_by(
        "priority", maintain_order=True
    ):
        inside = overlap_us(of_class, united(running.filter(pl.col("priority") > priority)))
        inverted = (pl.col("time_us") * (inside / LENGTH_US)).round().cast(pl.Int64)
        divided.append(_split(of_class, inverted, PRIORITY_INVERSION))
    return pl.concat(divided)
