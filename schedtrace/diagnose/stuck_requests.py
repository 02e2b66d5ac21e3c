"""Requests without progress: refused although alone, ready but parked, or recomputing the same tokens."""

import polars as pl

from schedtrace.diagnose.kv_cache import blocks_needed, steps_per_block, usable_blocks
from schedtrace.model.causes import OF_ITS_OWN_SIZE, Cause
from schedtrace.timeline.pieces import NEXT_STEP
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.timeline import Timeline, made_once

FEWEST_REFUSALS = 10
LONG_US = 1_000_000
"""Minimum time in microseconds after which even a few refusals prove that a request never fits."""
FEWEST_PREEMPTIONS = 2
"""Minimum number of times that a request preempted itself while it was alone."""
GONE = ("ABORTED", "IGNORED", "ERROR")
"""Names in ``RequestStatus`` of requests that ended without the requested output."""


@made_once
def never_fitting(timeline: Timeline) -> pl.DataFrame:
    """Return one row per request that can never run to its end, in the order of their first refusal.

    Columns: ``request_id``, ``trial``, ``cause``, ``via``, ``location``, ``first_step`` and ``last_step``
    (that refused it), ``refusals``, ``blocks_needed`` (recorded with a refusal; null: none was), ``waiting``
    (number of waiting requests after the last refusal, including this one), ``prompt_tokens``,
    ``max_tokens``, ``self_preemptions``, ``tokens`` (the largest number for which room was refused). Without
    such requests, only ``request_id`` and ``cause``.

    A refusal of a request for its size counts if, after that step, no request ran, no KV load was parked, no
    finished request kept blocks and all KV blocks were free. A refusal for lack of KV blocks also counts if
    the prompt alone needs more blocks than the cache has.
    """
    alone = pl.col("step").is_in(pl.lit(_alone(timeline)).implode())
    asked = timeline.started_requests
    counted = (pl.col("cause") == str(Cause.KV_BLOCKS)) & pl.col("request_id").is_in(
        _too_long(timeline, asked)
    )
    refused = _refusals(timeline).filter(alone | counted)
    if refused.is_empty():
        return pl.DataFrame(schema={"request_id": pl.String, "cause": pl.String})
    own = timeline.preemptions.filter(
        pl.col("in_schedule") & (pl.col("for_request_id") == pl.col("request_id"))
    )
    preempted = (
        own.filter(alone)
        .group_by("request_id")
        .agg(pl.len().alias("self_preemptions"), pl.col("lost_tokens").max())
    )
    last = pl.col("last_step").max().alias("scheduled_step")
    scheduled = timeline.stretches.group_by("request_id").agg(last).collect()
    long = pl.col("until_us") - pl.col("since_us") >= LONG_US
    refused_often = ((pl.col("refusals") >= FEWEST_REFUSALS) | long) & ~pl.col("runs_later")
    return (
        refused.group_by("request_id", maintain_order=True)
        .agg(
            pl.col("trial", "cause", "via", "location").last(),
            pl.col("step").first().alias("first_step"),
            pl.col("step").last().alias("last_step"),
            pl.len().alias("refusals"),
            pl.col("blocks_needed").drop_nulls().last(),
            pl.col("num_waiting_after").last().alias("waiting"),
            pl.col("start_us").first().alias("since_us"),
            pl.col("end_us").last().alias("until_us"),
        )
        .join(
            asked[["request_id", "prompt_tokens", "max_tokens"]],
            on="request_id",
            maintain_order="left",
        )
        .join(preempted, on="request_id", how="left", maintain_order="left")
        .join(scheduled, on="request_id", how="left", maintain_order="left")
        .with_columns(
            pl.col("self_preemptions", "lost_tokens").fill_null(0),
            runs_later=pl.col("scheduled_step").fill_null(-1) > pl.col("last_step"),
        )
        .filter(refused_often | (pl.col("self_preemptions") >= FEWEST_PREEMPTIONS))
        .with_columns(tokens=pl.max_horizontal("prompt_tokens", pl.col("lost_tokens") + 1))
        .drop("since_us", "until_us", "lost_tokens", "scheduled_step", "runs_later")
    )


def _refusals(timeline: Timeline) -> pl.DataFrame:
    """Return the exits that refused a request for its size, if it never got the requested output."""
    refused = timeline.exits.filter("refusal", pl.col("cause").is_in(list(OF_ITS_OWN_SIZE)))
    steps = timeline.steps[["step", "num_waiting_after", "end_us"]]
    if refused.is_empty():
        return refused.drop("num_waiting_after").join(steps, on="step")
    done = timeline.finishes.filter(~pl.col("status").is_in(GONE))
    return (
        refused.drop_nulls("request_id")
        .drop("num_waiting_after")
        .unique(["step", "request_id"], keep="last", maintain_order=True)
        .join(done, on="request_id", how="anti", maintain_order="left")
        .join(steps, on="step", maintain_order="left")
    )


def _alone(timeline: Timeline) -> pl.Series:
    """Return the steps after which no request ran and no request, running or not, held any resource."""
    nobody = (
        pl.col(name).fill_null(0) == 0
        for name in ("num_running_after", "kv_loads_parked", "finished_holding", "deferred_free_blocks")
    )
    usable = usable_blocks(timeline.header)
    free = pl.col("kv_blocks_free_after")
    all_free = pl.lit(value=True) if usable is None else free.fill_null(usable) >= usable
    # Requests that wait may keep encoder outputs; the cache is empty where most can be freed.
    encoder = pl.col("encoder_slots_freeable")
    return timeline.steps.filter(*nobody, all_free, encoder.is_null() | (encoder == encoder.max()))["step"]


def _too_long(timeline: Timeline, asked: pl.DataFrame) -> list[str]:
    """Return requests whose prompts need more KV blocks than the cache has, as far as that is known."""
    usable = usable_blocks(timeline.header)
    if usable is None or blocks_needed(timeline.header, 1) is None:
        return []
    prompts = asked[["request_id", "prompt_tokens"]].iter_rows()
    return [name for name, tokens in prompts if sum(blocks_needed(timeline.header, tokens) or []) > usable]


FEWEST_STEPS = 10
"""Minimum number of steps after which a ready request counts as parked. The next step should promote the
request, but further steps may already be in flight."""


def ready_but_parked(timeline: Timeline) -> pl.DataFrame:
    """Return one row for each request and reason for which it stayed parked although ready, longest first.

    Columns: ``request_id``, ``trial``, ``cause`` (``grammar_pending`` or ``remote_kv_pending``),
    ``ready_us``, ``parked_us`` (how long it stayed in the queue for that cause, or while the engine scheduled
    nothing at all), ``steps``, ``first_step`` and ``last_step`` of that time, ``unended`` (no step scheduled
    the request later) and ``hopeless`` (the same as ``unended``).
    """
    ready = _ready(timeline)
    if ready.is_empty():
        return pl.DataFrame(schema={"cause": pl.String})
    scheduled = (
        timeline.stretches.select("request_id", "step")
        .collect()
        .join(timeline.steps[["step", "start_us"]], on="step", maintain_order="left")
        .join(ready, on="request_id", maintain_order="left")
        .filter(pl.col("start_us") >= pl.col("ready_us"))
        .group_by("request_id", "own")
        .agg(pl.col("start_us").min().alias("until_us"))
    )
    own = pl.col("cause") == pl.col("own")
    since = pl.when(own).then("ready_us").otherwise(pl.max_horizontal("ready_us", pl.lit(_idle_us(timeline))))
    waits = timeline.request_states.filter(
        pl.col("state").is_in(QUEUED) & (pl.col("cause") != NEXT_STEP) & pl.col("end_step").is_not_null()
    )
    return (
        waits.join(ready, on="request_id", maintain_order="left")
        .join(scheduled, on=["request_id", "own"], how="left", maintain_order="left")
        .with_columns(unended=pl.col("until_us").is_null())
        .with_columns(begin_us=pl.max_horizontal("begin_us", since))
        .filter(
            own | pl.col("unended"),
            pl.col("unended") | (pl.col("begin_us") < pl.col("until_us")),
            pl.col("begin_us") < pl.col("end_us"),
        )
        .pipe(_with_first_step, timeline)
        .group_by("request_id", "own", maintain_order=True)
        .agg(
            pl.col("trial", "ready_us", "unended").first(),
            (pl.col("end_us") - pl.col("begin_us")).sum().alias("parked_us"),
            (pl.col("end_step") - pl.col("first_step") + 1).sum().alias("steps"),
            pl.col("first_step").min(),
            pl.col("end_step").max().alias("last_step"),
        )
        .rename({"own": "cause"})
        .filter(pl.col("steps") >= FEWEST_STEPS)
        .with_columns(hopeless="unended")  # refused for what is over, or nobody got anything any more
        .sort("parked_us", descending=True, maintain_order=True)
    )


def _idle_us(timeline: Timeline) -> int:
    """Return the start in microseconds of the first step after the last one that scheduled something."""
    steps = timeline.steps[["start_us", "total_requests"]].sort("start_us")
    working = steps.filter(pl.col("total_requests") > 0)["start_us"].to_list()
    idle = steps.filter(pl.col("start_us") > working[-1]) if working else steps
    return min(idle["start_us"].to_list(), default=timeline.end_us)


def _with_first_step(rows: pl.DataFrame, timeline: Timeline) -> pl.DataFrame:
    """Add ``first_step``, the first step that began at or after ``begin_us``."""
    starts = timeline.steps.select("start_us", pl.col("step").cast(pl.Int64).alias("first_step"))
    return rows.sort("begin_us").join_asof(
        starts.sort("start_us"),
        left_on="begin_us",
        right_on="start_us",
        strategy="forward",
        check_sortedness=False,
    )


def _ready(timeline: Timeline) -> pl.DataFrame:
    """Return ``request_id``, ``own`` (the cause that no longer applies) and ``ready_us`` (when it ended)."""
    frames = [pl.DataFrame(schema={"request_id": pl.String, "own": pl.String, "ready_us": pl.Int64})]
    if "grammars" in timeline.lists:
        compiled = timeline.lists["grammars"].filter(~pl.col("failed"))
        frames.append(_latest(compiled, Cause.GRAMMAR_PENDING, "compiled_us"))
    if "kv_loads" in timeline.lists:
        arrived = timeline.lists["kv_loads"].filter(pl.col("event") == "arrived")
        frames.append(_latest(arrived, Cause.REMOTE_KV_PENDING, "at_us"))
    return pl.concat(frames)


def _latest(rows: pl.LazyFrame, cause: Cause, ready: str) -> pl.DataFrame:
    own = pl.lit(str(cause)).alias("own")
    latest = rows.group_by("request_id").agg(pl.col(ready).max().alias("ready_us"))
    return latest.select("request_id", own, pl.col("ready_us").cast(pl.Int64)).collect()


TIMES_OVER = 2
"""Minimum number of tokens that a request without progress recomputes, as a multiple of its high-water mark.
"""
FEWEST_FRUITLESS = 2
GAIN_FRAC = 0.1
"""Maximum progress of a fruitless restart beyond the high-water mark, as a share of its recomputed tokens."""


def no_progress(timeline: Timeline) -> pl.DataFrame:
    """Return one row per request without progress; the request that recomputed the most tokens comes first.

    Columns: ``request_id``, ``trial``, ``restarts``, ``fruitless`` (restarts that hardly passed the
    high-water mark before them), ``high_tokens`` (the most that it had computed before its last restart),
    ``recomputed_tokens``, ``first_step`` and ``last_step`` (from its first restart to its last),
    ``unfinished`` and ``hopeless``: it is unfinished, and after its first restart only such requests got
    tokens, so nothing that it waits for can have become free.

    A restart is an admission after the request's first tokens, or a fall of its computed tokens by more than
    a block. Rejected draft tokens also reduce the computed tokens, but never by so many. Tokens found in a
    cache are not recomputed.
    """
    block = steps_per_block(timeline)
    steps = pl.col("last_step") - pl.col("step") + 1
    end = pl.col("computed_tokens") + steps * pl.col("scheduled_tokens").fill_null(0) - pl.col("draft_tokens")
    falls = pl.col("computed_tokens") + block < pl.col("end").shift(1).over("request_id")
    again = (pl.col("phase") != "running") | falls
    restarted = pl.col("high").is_not_null()
    attempts = (
        timeline.stretches.sort("request_id", "step", maintain_order=True)
        .with_columns(end=end)
        .with_columns(attempt=again.fill_null(value=False).cum_sum().over("request_id"))
        .group_by("request_id", "attempt", maintain_order=True)
        .agg(
            pl.col("trial", "step", "computed_tokens").first(),
            pl.col("end").max(),
        )
        .with_columns(high=pl.col("end").cum_max().shift(1).over("request_id"))
        .with_columns(
            again=pl.when(restarted).then(pl.min_horizontal("end", "high") - pl.col("computed_tokens"))
        )
    )
    fruitless = restarted & (pl.col("end") - pl.col("high") <= GAIN_FRAC * pl.col("again"))
    left = timeline.finishes.filter(~pl.col("status").is_in(GONE))
    restarting = (
        attempts.group_by("request_id", maintain_order=True)
        .agg(
            pl.col("trial").first(),
            restarted.sum().alias("restarts"),
            fruitless.sum().alias("fruitless"),
            pl.col("high").last().alias("high_tokens"),
            pl.col("again").clip(0).sum().alias("recomputed_tokens"),
            pl.col("step").filter(restarted).first().alias("first_step"),
            pl.col("step").last().alias("last_step"),
        )
        .filter(
            pl.col("recomputed_tokens") >= TIMES_OVER * pl.col("high_tokens"),
            pl.col("fruitless") >= FEWEST_FRUITLESS,
        )
        .collect()
        .with_columns(unfinished=~pl.col("request_id").is_in(pl.lit(left["request_id"]).implode()))
        .sort("recomputed_tokens", descending=True, maintain_order=True)
    )
    if restarting.is_empty():
        return restarting.hstack([pl.Series("hopeless", [], pl.Boolean)])
    mine = pl.col("request_id").is_in(pl.lit(restarting["request_id"]).implode())
    last_of_rest = timeline.stretches.filter(~mine).select(pl.col("last_step").max()).collect().item()
    alone = pl.lit(value=True) if last_of_rest is None else pl.col("first_step") > last_of_rest
    return restarting.with_columns(hopeless=pl.col("unfinished") & alone)
