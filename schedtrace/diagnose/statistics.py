"""Figures beside the findings: latency by class, caches, drafts, outcomes, durations, sums over engines."""

import polars as pl

from schedtrace.diagnose.distributions import distribution, inter_token, single
from schedtrace.diagnose.rank_figures import kv_used_frac
from schedtrace.diagnose.trials import FINISHED
from schedtrace.model.facts import Fact
from schedtrace.model.statistics import (
    ClassLatency,
    DraftUse,
    Durations,
    EngineFigures,
    Outcomes,
    PrefixCacheUse,
    Statistics,
)
from schedtrace.timeline.pieces import LENGTH_US
from schedtrace.timeline.rank_loads import RankLoads
from schedtrace.timeline.ranks import Ranks
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.shares import queue_times
from schedtrace.timeline.timeline import Timeline


def statistics(ranks: Ranks) -> Statistics:
    """Of all engines of a run together."""
    timelines = ranks.timelines
    facts = frozenset.intersection(*(timeline.facts for timeline in timelines))
    lives = Fact.LIVES in facts
    finishes = pl.concat([timeline.finishes for timeline in timelines], how="diagonal_relaxed")
    return Statistics(
        latency=_latency(timelines) if lives else [],
        prefix_cache=_prefix_cache(timelines) if {Fact.CACHE, Fact.REQUESTS, Fact.LIVES} <= facts else None,
        drafts=_drafts(timelines, finishes),
        outcomes=_outcomes(timelines, finishes) if lives else None,
        durations=_durations(timelines, each_token={Fact.REQUESTS, Fact.LIVES, Fact.TIMES} <= facts),
        engines=_engines(ranks),
    )


def _latency(timelines: list[Timeline]) -> list[ClassLatency]:
    requests = pl.concat([_requests(timeline) for timeline in timelines])
    rows = [_of_class("all", "", requests)]
    for by in ("priority", "lora"):
        classes = requests.partition_by(by, as_dict=True)
        if len(classes) > 1 or (by == "lora" and requests["lora"].null_count() < requests.height):
            ordered = sorted(classes.items(), key=lambda item: (item[0][0] is not None, item[0][0]))
            rows += [_of_class(by, "" if key is None else str(key), rows_) for (key,), rows_ in ordered]
    return rows


def _requests(timeline: Timeline) -> pl.DataFrame:
    """One row per request that came, with its times and where they went; null: it did not come so far."""
    own = LENGTH_US.filter(pl.col("state") != "front_end").sum()
    queued = LENGTH_US.filter(pl.col("state").is_in(QUEUED)).sum()
    spent = timeline.request_states.group_by("request_id").agg(own_us=own, queued_us=queued)
    ended = (
        timeline.finishes.filter(pl.col("status").is_in(FINISHED))
        .unique("request_id", keep="last")
        .select("request_id", "first_token_us", "last_token_us", "output_tokens", done=pl.lit(value=True))
    )
    return (
        timeline.arrivals.filter(~pl.col("streaming_update"))
        .unique("request_id", keep="first", maintain_order=True)
        .select("request_id", "arrived_us", "priority", "lora")
        .join(
            queue_times(timeline).select("request_id", "queue_us"),
            on="request_id",
            how="left",
            maintain_order="left",
        )
        .join(spent, on="request_id", how="left", maintain_order="left")
        .join(ended, on="request_id", how="left", maintain_order="left")
        .with_columns(pl.col("done").fill_null(value=False))
    )


def _of_class(by: str, name: str, requests: pl.DataFrame) -> ClassLatency:
    own_us = int(requests["own_us"].sum())
    done = requests.filter("done")
    first, last, came = pl.col("first_token_us"), pl.col("last_token_us"), pl.col("arrived_us")
    tokens = pl.col("output_tokens")
    return ClassLatency(
        by=by,
        name=name,
        requests=requests.height,
        finished=done.height,
        waiting_frac=int(requests["queued_us"].sum()) / own_us if own_us else None,
        queue_ms=distribution(single(requests, pl.col("queue_us"))),
        ttft_ms=distribution(single(done, first - came)),
        tpot_ms=distribution(single(done.filter(tokens > 1), (last - first) / (tokens - 1))),
        e2e_ms=distribution(single(done, last - came)),
    )


def _prefix_cache(timelines: list[Timeline]) -> PrefixCacheUse | None:
    """Every request's first scheduling; a connector may bring tokens without a prefix cache."""
    known = pl.concat([_first_scheduled(timeline) for timeline in timelines])
    hits = int(known["hit_tokens"].sum())
    if not hits and not any(timeline.header.enable_prefix_caching for timeline in timelines):
        return None
    lists = [timeline.lists["admitted"] for timeline in timelines if "admitted" in timeline.lists]
    sources = pl.concat(lists).select("local_tokens", "external_tokens").collect() if lists else None
    prompt = int(known["prompt_tokens"].sum())
    return PrefixCacheUse(
        requests=known.height,
        requests_with_hit=known.filter(pl.col("hit_tokens") > 0).height,
        prompt_tokens=prompt,
        hit_tokens=hits,
        hit_frac=hits / prompt if prompt else None,
        local_tokens=_known_sum(sources, "local_tokens"),
        external_tokens=_known_sum(sources, "external_tokens"),
    )


def _first_scheduled(timeline: Timeline) -> pl.DataFrame:
    came = timeline.arrivals.filter(~pl.col("streaming_update")).unique("request_id", keep="first")
    new = timeline.admitted.filter(pl.col("phase") == "new")
    return came.join(new, on="request_id").select(
        pl.col("prompt_tokens").cast(pl.Int64), pl.col("computed_tokens").cast(pl.Int64).alias("hit_tokens")
    )


def _known_sum(frame: pl.DataFrame | None, column: str) -> int | None:
    """None where no row has a value."""
    if frame is None or frame[column].null_count() == frame.height:
        return None
    return int(frame[column].sum())


def _drafts(timelines: list[Timeline], finishes: pl.DataFrame) -> DraftUse | None:
    drafts = _known_sum(finishes, "drafts") or 0
    if not drafts:
        return None
    accepted = _known_sum(finishes, "drafts_accepted") or 0
    drafted, used = (
        sum(int(timeline.steps[column].sum()) for timeline in timelines)
        for column in ("draft_tokens", "used_tokens")
    )
    return DraftUse(
        drafts=drafts,
        accepted=accepted,
        invalid=_known_sum(finishes, "drafts_invalid"),
        accepted_frac=accepted / drafts,
        wasted_frac=(1 - accepted / drafts) * drafted / used if used else None,
    )


def _outcomes(timelines: list[Timeline], finishes: pl.DataFrame) -> Outcomes:
    arrived = sum(
        timeline.arrivals.filter(~pl.col("streaming_update"))["request_id"].n_unique()
        for timeline in timelines
    )
    left = finishes.unique("request_id", keep="last")["status"]
    finished, aborted = left.is_in(FINISHED).sum(), (left == "ABORTED").sum()
    open_ = sum(
        timeline.arrivals.filter(~pl.col("streaming_update"))
        .select("request_id")
        .unique()
        .join(timeline.finishes, on="request_id", how="anti")
        .height
        for timeline in timelines
    )
    return Outcomes(
        arrived=arrived,
        finished=int(finished),
        aborted=int(aborted),
        errored=len(left) - int(finished) - int(aborted),
        unfinished=open_,
    )


def _durations(timelines: list[Timeline], *, each_token: bool) -> Durations:
    worked = pl.col("total_requests") > 0
    busy = (pl.col("num_running_after") > 0) | (pl.col("num_waiting_after") > 0)
    following = pl.col("start_us").shift(-1).over("trial") - pl.col("start_us")
    steps = pl.concat(
        [
            timeline.steps.select(
                device_us=pl.when(worked).then("busy_us"), apart_us=pl.when(worked & busy).then(following)
            )
            for timeline in timelines
        ]
    )
    return Durations(
        device_ms=distribution(single(steps, pl.col("device_us"))),
        start_to_start_ms=distribution(single(steps, pl.col("apart_us"))),
        inter_token_ms=distribution(pl.concat([inter_token(timeline) for timeline in timelines]))
        if each_token
        else None,
    )


def _engines(ranks: Ranks) -> list[EngineFigures]:
    timelines = ranks.timelines
    seconds = _span_s(timelines)
    figures = [_engine([timeline], timeline.rank, seconds) for timeline in timelines]
    if len(timelines) > 1:
        figures.append(_engine(timelines, None, seconds))
    if len(timelines) > 1 and ranks.loads is not None:
        _at_the_same_time(ranks.loads, figures)
    if ranks.lockstep:
        _of_lockstep(ranks, figures)
    return figures


def _at_the_same_time(loads: RankLoads, figures: list[EngineFigures]) -> None:
    """Means over the time in which any rank had a request, so that those of ranks can be compared."""
    means = {rank: (running, waiting) for rank, running, waiting in loads.means().iter_rows()}
    for row in figures:
        own = [mean for rank, mean in means.items() if row.engine_rank in {None, rank}]
        row.mean_running = sum(running for running, _ in own)
        row.mean_waiting = sum(waiting for _, waiting in own)


def _of_lockstep(ranks: Ranks, figures: list[EngineFigures]) -> None:
    """Dummy batches by the common step counter, and what ranks waited for prefills of others."""
    dummies = {rank: (batches, us) for rank, batches, us in ranks.dummies.iter_rows()}
    stalls = ranks.prefill_stalls
    stalled = {}
    if stalls is not None:
        each = stalls.stalled.group_by("rank").agg(pl.col("excess_us").sum())
        stalled = {rank: max(0.0, us) for rank, us in each.iter_rows()}
    for row in figures:
        own = [timeline.rank for timeline in ranks.timelines if row.engine_rank in {None, timeline.rank}]
        row.dummy_batches = sum(dummies[rank][0] for rank in own)
        row.dummy_ms = sum(dummies[rank][1] for rank in own) / 1e3
        if stalls is not None:
            row.stalled_ms = sum(stalled.get(rank, 0.0) for rank in own) / 1e3


def _engine(timelines: list[Timeline], rank: int | None, seconds: float) -> EngineFigures:
    """Sums over these engines; ``seconds`` are those of all engines' trials."""
    lives = all(Fact.LIVES in timeline.facts for timeline in timelines)
    recorded = all(timeline.header.preemptions_recorded for timeline in timelines)
    done = [timeline.finishes.filter(pl.col("status").is_in(FINISHED)) for timeline in timelines]
    outputs, prompts = (
        sum(int(finishes[column].sum()) for finishes in done) for column in ("output_tokens", "prompt_tokens")
    )
    known = lives and seconds > 0
    steps = [timeline.steps for timeline in timelines]
    return EngineFigures(
        engine_rank=rank,
        steps=sum(each.height for each in steps),
        requests_finished=sum(finishes.height for finishes in done) if lives else None,
        output_tokens_per_s=outputs / seconds if known else None,
        total_tokens_per_s=(outputs + prompts) / seconds if known else None,
        preemptions=sum(timeline.preemptions.filter("in_schedule").height for timeline in timelines)
        if recorded
        else None,
        mean_running=_at_a_time(timelines, queued=False) if lives else None,
        mean_waiting=_at_a_time(timelines, queued=True) if lives else None,
        dummy_batches=sum(int(each["dummy_batches"].sum()) for each in steps),
        dummy_ms=sum(int(each["dummy_us"].sum()) for each in steps) / 1e3,
        kv_used_frac=_mean(pl.concat([each.select(kv_used_frac()).to_series() for each in steps])),
    )


def _mean(values: pl.Series) -> float | None:
    mean = values.drop_nulls().mean()
    return float(mean) if isinstance(mean, int | float) else None


def _span_s(timelines: list[Timeline]) -> float:
    """From the first start to the last output of each trial, on one clock, added up."""
    spans = pl.concat(
        [
            timeline.steps.select(
                "trial",
                begin=pl.col("start_us") + timeline.header.wall_anchor_us,
                end=pl.col("output_us") + timeline.header.wall_anchor_us,
            )
            for timeline in timelines
        ]
    )
    lengths = spans.group_by("trial").agg(us=pl.col("end").max() - pl.col("begin").min())
    return float(lengths["us"].sum()) / 1e6


def _at_a_time(timelines: list[Timeline], *, queued: bool) -> float | None:
    """Mean number of requests in the queue, or running, over each engine's busy time."""
    there = pl.col("state").is_in(QUEUED)
    wanted = there if queued else ~there & (pl.col("state") != "front_end")
    spent = [int(one.request_states.filter(wanted).select(LENGTH_US.sum()).item()) for one in timelines]
    busy = [timeline.busy_us for timeline in timelines]
    return sum(us / whole for us, whole in zip(spent, busy, strict=True) if whole) if any(busy) else None
