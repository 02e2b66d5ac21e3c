"""Requests that were refused although nobody else held anything: what they need is not there at all."""

import polars as pl

from schedtrace.diagnose.capacity import blocks_needed, usable_blocks
from schedtrace.model.causes import OF_ITS_OWN_SIZE, Cause
from schedtrace.timeline.timeline import Timeline

FEWEST_REFUSALS = 10
LONG_US = 1_000_000
"""Fewer refusals prove it only if they last so long."""
FEWEST_PREEMPTIONS = 2
"""Of a request by itself with nobody else there."""
GONE = ("ABORTED", "IGNORED", "ERROR")
"""``RequestStatus`` names of requests that ended without what they asked for."""


def never_fitting(timeline: Timeline) -> pl.DataFrame:
    """One row per request that can never run to its end, in the order of their first refusal.

    Columns: ``request_id``, ``trial``, ``cause``, ``via``, ``location``, ``first_step`` and ``last_step``
    (that refused it), ``refusals``, ``blocks_needed`` (recorded with a refusal; null: none was), ``waiting``
    (requests after the last refusal, itself included), ``prompt_tokens``, ``max_tokens``,
    ``self_preemptions``, ``tokens`` (the most that it was refused room for).

    A refusal for its size counts if nobody ran after that step, no load was parked, no finished request kept
    blocks and all KV blocks were free; for KV blocks also if its prompt alone needs more than there are.
    """
    refused = _refusals(timeline)
    alone = _alone(timeline)
    own = timeline.preemptions.filter(
        pl.col("in_schedule") & (pl.col("for_request_id") == pl.col("request_id"))
    )
    preempted = (
        own.filter(pl.col("step").is_in(alone.implode()))
        .group_by("request_id")
        .agg(pl.len().alias("self_preemptions"), pl.col("lost_tokens").max())
    )
    arrived = timeline.arrivals.filter(~pl.col("streaming_update")).unique("request_id", keep="first")
    counted = (pl.col("cause") == str(Cause.KV_BLOCKS)) & pl.col("request_id").is_in(
        _too_long(timeline, arrived)
    )
    long = pl.col("until_us") - pl.col("since_us") >= LONG_US
    refused_often = ((pl.col("refusals") >= FEWEST_REFUSALS) | long) & ~pl.col("runs_later")
    return (
        refused.filter(pl.col("step").is_in(alone.implode()) | counted)
        .group_by("request_id", maintain_order=True)
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
            arrived.select("request_id", "prompt_tokens", "max_tokens"),
            on="request_id",
            maintain_order="left",
        )
        .join(preempted, on="request_id", how="left", maintain_order="left")
        .join(_last_scheduled(timeline), on="request_id", how="left", maintain_order="left")
        .with_columns(
            pl.col("self_preemptions", "lost_tokens").fill_null(0),
            runs_later=pl.col("scheduled_step").fill_null(-1) > pl.col("last_step"),
        )
        .filter(refused_often | (pl.col("self_preemptions") >= FEWEST_PREEMPTIONS))
        .with_columns(tokens=pl.max_horizontal("prompt_tokens", pl.col("lost_tokens") + 1))
        .drop("since_us", "until_us", "lost_tokens", "scheduled_step", "runs_later")
    )


def _refusals(timeline: Timeline) -> pl.DataFrame:
    """Exits that refused, for its own size, a request which then never got what it asked for."""
    done = timeline.finishes.filter(~pl.col("status").is_in(GONE))
    steps = timeline.steps.select("step", "num_waiting_after", "end_us")
    return (
        timeline.exits.filter("refusal", pl.col("cause").is_in(list(OF_ITS_OWN_SIZE)))
        .drop_nulls("request_id")
        .drop("num_waiting_after")
        .unique(["step", "request_id"], keep="last", maintain_order=True)
        .join(done, on="request_id", how="anti", maintain_order="left")
        .join(steps, on="step", maintain_order="left")
    )


def _alone(timeline: Timeline) -> pl.Series:
    """The steps after which nobody ran and nobody, running or not, held anything."""
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


def _too_long(timeline: Timeline, arrived: pl.DataFrame) -> list[str]:
    """Requests whose prompts need more KV blocks than there are, as far as the header tells."""
    usable = usable_blocks(timeline.header)
    if usable is None or blocks_needed(timeline.header, 1) is None:
        return []
    prompts = arrived.select("request_id", "prompt_tokens").iter_rows()
    return [one for one, tokens in prompts if sum(blocks_needed(timeline.header, tokens) or []) > usable]


def _last_scheduled(timeline: Timeline) -> pl.DataFrame:
    """``request_id`` and ``scheduled_step``, the last step that gave it tokens."""
    got = timeline.stretches.group_by("request_id").agg(pl.col("last_step").max().alias("scheduled_step"))
    return got.collect()
