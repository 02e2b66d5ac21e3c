"""Charges of every wait: each wait is followed to the end of its chain of causes, step by step.

A request that waits for a seat may in fact wait for the cause that stalls the requests in the seats. A
request that waits for the token budget may in fact wait for one long prompt. The charges divide the rows of
``request_states`` in which requests got nothing, so the two tables cannot disagree.

Some waits end at the holders of a resource: idle requests that hold KV blocks, or a prompt that takes most of
the token budget. A streaming session keeps its blocks between two parts, a finished request keeps them
until a KV transfer has fetched them, and a request aborted during its KV load until that load is over.
``idle_holders`` does not include other requests with KV loads or requests that the scheduler set aside,
because other rules describe them. A long prompt takes at least half of a step's prefill tokens.

If a step computed for requests whose clients left later, a wait for a limit during that step is partly
charged to this work, by its share of the step's time (``aborted_requests.work_for_aborted``).
"""

from typing import Any

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.timeline.events import INTERRUPTED
from schedtrace.timeline.frames import EngineFrames
from schedtrace.timeline.pieces import NEXT_STEP
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.spans import (
    LENGTH_US,
    merged,
    overlap_us,
    steps_of,
    time_within,
    united,
)

FEWEST_STEPS = 10
"""Minimum number of steps of a series; within this number of steps, every running request normally gets
tokens."""
MOST_FRAC = 0.5
"""Minimum share of all held blocks that idle holders must keep to be reported."""
ELSEWHERE = ("kv_loads", "set_aside")

HOLDERS_SCHEMA = {
    "first_step": pl.Int64,
    "last_step": pl.Int64,
    "head": pl.String,
    "held": pl.Int64,
    "request_id": pl.String,
    "blocks": pl.Int64,
    "kind": pl.String,
    "silent": pl.Boolean,
    "alone": pl.Boolean,
}


def make_idle_holders(frames: EngineFrames) -> pl.DataFrame:
    """Return one row per idle holder and series of steps that refused a request KV blocks.

    A series counts only if it has at least ``FEWEST_STEPS`` steps and idle holders keep at least
    ``MOST_FRAC`` of all held blocks.

    Columns: ``first_step``, ``last_step``, ``head`` (the refused request), ``held`` (blocks of all holders
    when it was first refused), ``request_id`` (the idle holder), ``blocks`` (which it holds), ``kind``
    (``session``, ``finished``, ``aborted`` or ``request``), ``silent`` (a session whose client has not sent
    the next part) and ``alone`` (no request ran).
    """
    if "refusals" not in frames.lists:
        return pl.DataFrame(schema=HOLDERS_SCHEMA)
    runs = _runs(frames)
    if runs.is_empty():
        return pl.DataFrame(schema=HOLDERS_SCHEMA)
    gone = frames.finishes[["request_id", "finished_us"]].unique("request_id", keep="last")
    unended = _unended_loads(frames)
    at_refusals = runs.join_asof(
        _held(frames), left_on="first_step", right_on="step", by="head", check_sortedness=False
    )
    named = (
        at_refusals.explode("request_id", "blocks")
        .join(gone, on="request_id", how="left", maintain_order="left")
        .join(unended[["request_id", "over_us"]], on="request_id", how="left", maintain_order="left")
        .with_columns(unfetched=pl.col("finished").list.contains(pl.col("request_id")))
        .filter(pl.col("unfetched") | (pl.col("finished_us") > pl.col("begin_us")).fill_null(value=True))
        .drop_nulls("request_id")
    )
    unnamed = (  # a refusal names the largest holders only
        at_refusals.drop("request_id", "blocks")
        .join(unended.with_columns(unfetched=pl.lit(value=True)), how="cross")
        .filter((pl.col("finished_us") <= pl.col("begin_us")) & (pl.col("over_us") > pl.col("begin_us")))
        .join(named, on=["first_step", "request_id"], how="anti", maintain_order="left")
    )
    rows = pl.concat([named, unnamed.select(named.columns)], how="vertical_relaxed")
    if rows.is_empty():
        return pl.DataFrame(schema=HOLDERS_SCHEMA)
    got = frames.stretches.select("request_id", "step", got_last="last_step").collect()
    paused = frames.exits.filter(pl.col("cause") == str(Cause.STREAMING_INPUT_PENDING))
    session = pl.col("request_id").is_in(pl.lit(frames.sessions).implode())
    holders = [frames.lists[name].select("request_id") for name in ELSEWHERE if name in frames.lists]
    elsewhere = pl.concat([pl.LazyFrame(schema={"request_id": pl.String}), *holders]).unique().collect()
    idle = (
        _without(rows, got)
        .filter(pl.col("unfetched") | ~pl.col("request_id").is_in(pl.lit(elsewhere["request_id"]).implode()))
        .filter(pl.col("blocks").sum().over("first_step") >= MOST_FRAC * pl.col("held"))
    )
    holder = ["first_step", "request_id"]
    answered = _without(idle, paused.select("request_id", "step", got_last="step")).select(holder)
    kind = (
        pl.when(pl.col("unfetched") & (pl.col("over_us") > pl.col("begin_us")))
        .then(pl.lit("aborted"))
        .when("unfetched")
        .then(pl.lit("finished"))
        .when(session)
        .then(pl.lit("session"))
    )
    return (
        idle.join(
            answered.with_columns(silent=pl.lit(value=False)), on=holder, how="left", maintain_order="left"
        )
        .with_columns(pl.col("silent").fill_null(value=True), kind=kind.otherwise(pl.lit("request")))
        .select(*HOLDERS_SCHEMA)
    )


def _unended_loads(frames: EngineFrames) -> pl.DataFrame:
    """Return the requests that ended before their KV load was over (``over_us``), with its ``blocks``."""
    schema = {"request_id": pl.String, "finished_us": pl.Int64, "over_us": pl.Int64, "blocks": pl.Int64}
    if "kv_loads" not in frames.lists:
        return pl.DataFrame(schema=schema)
    loads = frames.lists["kv_loads"].select("request_id", "event", "at_us", "blocks").collect()
    begun = loads.filter(pl.col("event") == "begun").unique("request_id", keep="last")
    over = loads.filter(pl.col("event") != "begun").group_by("request_id").agg(over_us=pl.col("at_us").max())
    return (
        begun.join(frames.finishes[["request_id", "finished_us"]], on="request_id")
        .join(over, on="request_id", how="left")
        .with_columns(
            pl.col("over_us").fill_null(frames.end_us + 1), pl.col("blocks").list.sum().fill_null(0)
        )
        .filter(pl.col("finished_us") < pl.col("over_us"))
        .sort("finished_us", "request_id")
        .select(pl.col(name).cast(kind) for name, kind in schema.items())
    )


def _runs(frames: EngineFrames) -> pl.DataFrame:
    """Return the series of steps that refused one request (``head``), with ``begin_us`` and ``alone``."""
    refused = frames.exits.filter(
        pl.col("refusal") & (pl.col("loop") == "waiting") & (pl.col("cause") == str(Cause.KV_BLOCKS))
    ).select("step", head="request_id")
    if refused.height < FEWEST_STEPS:
        return refused.clear()
    steps = frames.steps[["step", "start_us", "num_running_after"]]
    rows = refused.drop_nulls().unique("step", keep="last").join(steps, on="step").sort("step")
    goes_on = (pl.col("step") == pl.col("step").shift(1) + 1) & (pl.col("head") == pl.col("head").shift(1))
    return (
        rows.group_by((~goes_on.fill_null(value=False)).cum_sum().alias("run"), maintain_order=True)
        .agg(
            pl.col("head").first(),
            first_step=pl.col("step").first(),
            last_step=pl.col("step").last(),
            begin_us=pl.col("start_us").first(),
            alone=pl.col("num_running_after").max() == 0,
        )
        .filter(pl.col("last_step") - pl.col("first_step") + 1 >= FEWEST_STEPS)
    )


def _held(frames: EngineFrames) -> pl.DataFrame:
    """Return a row per refusal: ``step``, ``head``, ``held``, and lists about the holders.

    The lists are ``request_id`` and ``blocks`` (of each holder) and ``finished`` (ids of finished holders).
    """
    taken = frames.lists["refusals"].select(
        "step", "request_id", "holders", "held", "finished_holders", "other_held"
    )
    rows = []
    for step, head, holders, groups, finished, other_blocks in taken.collect().iter_rows():
        blocks = [sum(each) for each in zip(*(group for group in groups if group), strict=True)]
        if len(blocks) == len(holders):
            rows.append((step, head, holders, blocks, finished or [], sum(blocks) + sum(other_blocks or [])))
    names, numbers = pl.List(pl.String), pl.List(pl.Int64)
    schema: dict[str, Any] = {"step": pl.Int64, "head": pl.String, "request_id": names, "blocks": numbers}
    schema |= {"finished": names, "held": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row").sort("step")


def _without(rows: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the rows whose request has no span (``step`` to ``got_last``) that overlaps the row's series."""
    within = (pl.col("step") <= pl.col("last_step")) & (pl.col("got_last") >= pl.col("first_step"))
    touched = rows[["request_id", "first_step", "last_step"]].join(spans, on="request_id").filter(within)
    return rows.join(touched, on=["request_id", "first_step"], how="anti", maintain_order="left")


MOST_PREFILL_FRAC = 0.5
"""Minimum share of a step's prefill tokens that a long prompt takes."""
SHORT_FRAC = 0.25
"""Maximum length of a prompt, as a share of a long one's, at which it counts as short in comparison."""


def make_prefills(frames: EngineFrames) -> pl.DataFrame:
    """Return one row per step and prompt of which the step computed a part.

    Columns, as in ``timeline.requests``: ``step``, ``request_id``, ``prompt_tokens``, ``scheduled_tokens``
    and ``computed_tokens``.
    """
    about = frames.first_arrivals[["request_id", "prompt_tokens"]]
    begun = frames.stretches.join(about.lazy(), on="request_id").filter(
        pl.col("computed_tokens") < pl.col("prompt_tokens")
    )
    # A stretch of several steps goes on computing the prompt, but may decode in its last ones.
    rows = begun.with_columns(step=pl.int_ranges("step", pl.col("last_step") + 1), at=pl.lit(0)).collect()
    return (
        rows.with_columns(number=pl.int_ranges(0, pl.col("step").list.len()))
        .explode("step", "number")
        .with_columns(pl.col("computed_tokens") + pl.col("number") * pl.col("scheduled_tokens"))
        .filter(pl.col("computed_tokens") < pl.col("prompt_tokens"))
        .select("step", "request_id", "prompt_tokens", "scheduled_tokens", "computed_tokens")
    )


def make_long_prefills(frames: EngineFrames, prefills: pl.DataFrame) -> pl.DataFrame:
    """Return the steps in which one long prompt took at least half of the prefill tokens.

    A prompt is long if it exceeds the token budget and the median prompt is short in comparison. If most
    prompts are that long, they simply fill the device.

    Columns: ``step``, ``request_id``, ``prompt_tokens``, ``scheduled_tokens`` and ``prefill_tokens`` (of all
    prompts in this step).
    """
    if not (prefills["prompt_tokens"] > frames.token_budget).any():
        return prefills.clear().with_columns(prefill_tokens="scheduled_tokens").drop("computed_tokens")
    prompts = pl.concat([frames.present["prompt_tokens"], frames.new_requests["prompt_tokens"]])
    usual = prompts.quantile(0.5, "lower") or 0
    return (
        prefills.with_columns(prefill_tokens=pl.col("scheduled_tokens").sum().over("step"))
        .filter(
            (pl.col("prompt_tokens") > frames.token_budget)
            & (SHORT_FRAC * pl.col("prompt_tokens") >= usual)
            & (pl.col("scheduled_tokens") >= MOST_PREFILL_FRAC * pl.col("prefill_tokens"))
        )
        .sort("step", "scheduled_tokens", descending=[False, True])
        .unique("step", keep="first", maintain_order=True)
        .select("step", "request_id", "prompt_tokens", "scheduled_tokens", "prefill_tokens")
    )


PARKED_LOADS = "parked_loads"
"""Charge of a wait for KV blocks while at least as many requests load KV from elsewhere as run."""
IDLE_HOLDERS = "idle_holders"
"""Charge of a wait while idle requests, such as sessions between two inputs, hold half of the held blocks."""
HEAD_OF_LINE = "head_of_line"
"""Charge of a wait of a request that would have fitted, but was behind a request that did not."""
PRIORITY_INVERSION = "priority_inversion"
"""Charge of a wait for a resource that less urgent running requests hold."""
LONG_PROMPT = "long_prompt"
"""Charge of a wait while one prompt, far longer than the request's own prompt, takes the token budget."""
CACHE_RESET = "cache_reset"
"""Charge of waiting and recomputation after a reset of the prefix cache took the request's KV blocks."""
ABORTED_WORK = "aborted_work"
"""Charge of a wait for a limit while the device works for requests that are aborted later."""
RECOMPUTE = "recompute"
"""Charge of recomputing tokens that a preemption discarded; this is not a wait."""
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
"""Charges that are not a ``Cause``."""

OF_LIMITS = (
    Cause.MAX_NUM_SEQS,
    Cause.TOKEN_BUDGET,
    Cause.INPUT_BUDGET,
    Cause.KV_BLOCKS,
)
"""Charges of limits. Time in which the device works for requests that are aborted later is subtracted from
them."""
OF_KV = (Cause.PREEMPTED_THIS_STEP, Cause.STALE_OUTPUT_PENDING)
"""Causes that follow from a preemption, and thus from a lack of KV blocks."""
HALF = 0.5
"""Share of stalled requests among the running ones above which waits for a seat are charged to the cause of
the stalls."""

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


def make_charges(
    frames: EngineFrames,
    states: pl.DataFrame,
    *,
    events: pl.DataFrame,
    held_up: pl.DataFrame,
    idle: pl.DataFrame,
    long: pl.DataFrame,
    in_vain: pl.DataFrame,
) -> pl.DataFrame:
    """Return the rows of ``request_states`` in which requests waited, stalled or recomputed, by charge.

    Columns: those of ``SCHEMA``. A wait that continues behind a refused head is first cut in two. Each row or
    part then appears once for each of its charges, and the values of ``time_us`` add up to its length.

    Args:
        frames: Frames of one engine.
        states: ``request_states`` of the engine.
        events: Interruptions of the engine.
        held_up: Requests that would have fitted, but were behind a head that did not (``behind_head``).
        idle: ``idle_holders``.
        long: ``long_prefills``.
        in_vain: ``aborted_work``.
    """
    waits = states.filter(
        pl.col("state").is_in([*QUEUED, "stalled"]) & pl.col("cause").ne_missing(pl.lit(NEXT_STEP))
    ).with_columns(pl.col("cause").fill_null(str(Cause.OTHER)))
    recomputed = states.filter(pl.col("state") == "recompute")
    if waits.is_empty() and recomputed.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    parts = _behind_heads(frames, waits, held_up)
    steps = _labelled(frames, states, idle, long)
    charged = [
        parts.filter("held_up").with_columns(charge=pl.lit(HEAD_OF_LINE), time_us=LENGTH_US),
        *(
            _divided(frames, states, rows, steps, long)
            for rows in parts.filter(~pl.col("held_up")).partition_by("cause", maintain_order=True)
        ),
        recomputed.with_columns(charge=pl.lit(RECOMPUTE), time_us=LENGTH_US),
    ]
    rows_by_charge = pl.concat(
        rows.select(pl.col(name).cast(kind) for name, kind in SCHEMA.items()) for rows in charged
    )
    rows_by_charge = _after_resets(frames, rows_by_charge)
    if not (spans := merged(events)).is_empty():
        inside_us = overlap_us(rows_by_charge, spans)
        rows_by_charge = _split(rows_by_charge, _time_within(inside_us), INTERRUPTED)
    if not in_vain.is_empty():  # the device worked for requests whose clients left later
        inside_us = time_within(rows_by_charge, in_vain, {"us": pl.col("in_vain")})["us"]
        limited = pl.when(pl.col("charge").is_in([*map(str, OF_LIMITS)]))
        lost_us = limited.then(_time_within(inside_us)).otherwise(0)
        rows_by_charge = _split(rows_by_charge, lost_us, ABORTED_WORK)
    return rows_by_charge.filter(pl.col("time_us") > 0).sort("begin_us", "request_id")


def _after_resets(frames: EngineFrames, rows: pl.DataFrame) -> pl.DataFrame:
    """Charge a request's waiting and recomputation to a cache reset if its latest preemption was one."""
    if frames.preemptions["in_schedule"].all():
        return rows
    taken = frames.preemptions[["request_id", "in_schedule", "step"]].sort("step")
    after = (
        rows.with_columns(step="begin_step")
        .sort("step", nulls_last=True)
        .join_asof(taken, on="step", by="request_id", check_sortedness=False)
    )
    by_reset = pl.col("state").is_in(["preempted", "recompute"]) & ~pl.col("in_schedule")
    charge = pl.when(by_reset.fill_null(value=False)).then(pl.lit(CACHE_RESET)).otherwise("charge")
    return after.with_columns(charge=charge).select(rows.columns)


def _time_within(inside_us: pl.Series) -> pl.Expr:
    """Return the part of ``time_us`` within spans, given how much of each row they cover (``inside_us``)."""
    return (pl.col("time_us") * inside_us / LENGTH_US).fill_nan(0).round().cast(pl.Int64)


def _behind_heads(frames: EngineFrames, waits: pl.DataFrame, held_up: pl.DataFrame) -> pl.DataFrame:
    """Split each wait in the queue at the time from which a refused head held up the request.

    Column ``held_up`` marks the second part.
    """
    if held_up.is_empty():
        return waits.with_columns(held_up=pl.lit(value=False))
    starts = frames.steps.select("step", held_us="start_us")
    held = held_up.join(starts, on="step").sort("held_us")[["request_id", "held_us", "left_step"]]
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


def _labelled(
    frames: EngineFrames, states: pl.DataFrame, idle: pl.DataFrame, long: pl.DataFrame
) -> pl.DataFrame:
    """Return a span per step, with the facts that determine the charge of a wait in that step.

    Columns: ``begin_us``, ``end_us``, ``seats`` and ``kv`` (the charge of a wait for a seat, and for KV
    blocks), ``unused`` (unused share of the token budget) and ``long_prompt`` (whether one fills it).
    """
    stalled = states.filter(pl.col("state") == "stalled")
    most_stalled = (
        pl.concat(
            [
                steps_of(frames.steps[["step"]], rows).with_columns(cause=pl.lit(rows["cause"][0]))
                for rows in stalled.partition_by("cause", maintain_order=True)
            ]
            or [pl.DataFrame(schema={"step": pl.Int64, "requests": pl.Int32, "cause": pl.String})]
        )
        .sort("requests", descending=True, maintain_order=True)
        .group_by("step", maintain_order=True)
        .agg(pl.col("requests").sum(), pl.col("cause").first())
    )
    idle_runs = idle.select(pl.int_ranges("first_step", pl.col("last_step") + 1).explode().alias("step"))
    running = pl.col("num_running_after")
    parked = pl.col("kv_loads_parked") >= pl.max_horizontal(running, 1)
    stalls = pl.col("requests") > HALF * running
    return (
        frames.steps.drop_nulls("start_us")
        .join(most_stalled, on="step", how="left", maintain_order="left")
        .join(
            long.select("step", long_prompt=pl.lit(value=True)), on="step", how="left", maintain_order="left"
        )
        .select(
            begin_us="start_us",
            end_us=pl.col("start_us").shift(-1).fill_null(frames.end_us),
            seats=pl.when(stalls).then("cause").otherwise(pl.lit(str(Cause.MAX_NUM_SEQS))),
            kv=pl.when(pl.col("step").is_in(pl.lit(idle_runs["step"]).implode()))
            .then(pl.lit(IDLE_HOLDERS))
            .when(parked)
            .then(pl.lit(PARKED_LOADS))
            .otherwise(pl.lit(str(Cause.KV_BLOCKS))),
            unused=pl.col("remaining_budget") / pl.col("token_budget"),
            long_prompt=pl.col("long_prompt").fill_null(value=False),
        )
    )


def _divided(
    frames: EngineFrames, states: pl.DataFrame, rows: pl.DataFrame, steps: pl.DataFrame, long: pl.DataFrame
) -> pl.DataFrame:
    """Return the rows of one cause, each divided among the charges of its steps (``_labelled``)."""
    cause = rows["cause"][0]
    rows = rows.with_columns(charge=pl.lit(cause), time_us=LENGTH_US)
    if cause == Cause.TOKEN_BUDGET:
        long_us = time_within(rows, steps, {"us": pl.col("long_prompt")})["us"]
        prompts = frames.known_requests[["request_id", "prompt_tokens"]]
        rows = rows.join(prompts, on="request_id", how="left", maintain_order="left")
        longest = long["prompt_tokens"].max() or 0
        short = (pl.col("prompt_tokens") <= SHORT_FRAC * pl.lit(longest)).fill_null(value=False)
        return _split(rows, pl.when(short).then(long_us).otherwise(0), LONG_PROMPT)
    if cause == Cause.CHUNKED_PREFILL_OFF:
        # Chunks would have used what the steps left of the budget: the rest of the wait is for more of it.
        unused = time_within(rows, steps, {"us": pl.col("unused")})["us"]
        return _split(rows.with_columns(charge=pl.lit(str(Cause.TOKEN_BUDGET))), pl.lit(unused), cause)
    column = "seats" if cause == Cause.MAX_NUM_SEQS else "kv" if cause in (Cause.KV_BLOCKS, *OF_KV) else None
    if column is None:
        return rows
    words = steps[column].drop_nulls().unique().sort().to_list()
    if words:  # else no step tells who holds it
        times = time_within(rows, steps, {word: pl.col(column) == word for word in words})
        rows = pl.concat([rows.with_columns(charge=pl.lit(word), time_us=times[word]) for word in words])
    return _inverted(frames, states, rows) if frames.by_priority else rows


def _split(rows: pl.DataFrame, part_us: pl.Expr, charge: str) -> pl.DataFrame:
    """Return each row twice: with the part of ``time_us`` that ``charge`` gets, and with the rest."""
    return pl.concat(
        [
            rows.with_columns(charge=pl.lit(charge), time_us=part_us),
            rows.with_columns(time_us=pl.col("time_us") - part_us),
        ]
    )


def _inverted(frames: EngineFrames, states: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """Charge to priority inversion the part of each wait in which a less urgent request ran."""
    priorities = frames.known_requests[["request_id", "priority"]]
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
