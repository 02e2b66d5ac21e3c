"""Figures beside the findings: latency by class, caches, drafts, outcomes, durations, sums over engines."""

from collections.abc import Sequence

import polars as pl

from schedtrace.diagnose.distributions import distribution, single
from schedtrace.diagnose.engine_sums import EngineSums
from schedtrace.diagnose.throughput import counted_s, throughput
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
from schedtrace.timeline.engine_ranks import Ranks
from schedtrace.timeline.rank_loads import RankLoads


def statistics(engines: Sequence[EngineSums], ranks: Ranks) -> Statistics:
    """Of all engines of a run together.

    Args:
        engines: What was counted of each, in the order of ranks.
        ranks: The same engines.
    """
    lives = all(Fact.LIVES in engine.facts for engine in engines)
    return Statistics(
        latency=_latency([engine.requests for engine in engines if engine.requests is not None])
        if lives
        else [],
        prefix_cache=_prefix_cache(engines),
        drafts=_drafts(engines),
        outcomes=_outcomes(engines) if lives else None,
        durations=_durations(engines),
        engines=_engines(engines, ranks),
    )


def _latency(each: Sequence[pl.DataFrame]) -> list[ClassLatency]:
    requests = pl.concat(each)
    rows = [_of_class("all", "", requests)]
    for by in ("priority", "lora"):
        classes = requests.partition_by(by, as_dict=True)
        if len(classes) > 1 or (by == "lora" and requests["lora"].null_count() < requests.height):
            ordered = sorted(classes.items(), key=lambda item: (item[0][0] is not None, item[0][0]))
            rows += [_of_class(by, "" if key is None else str(key), rows_) for (key,), rows_ in ordered]
    return rows


def _of_class(by: str, name: str, requests: pl.DataFrame) -> ClassLatency:
    own_us = int(requests["own_us"].sum())
    done = requests.filter("done")
    tokens = pl.col("output_tokens")
    return ClassLatency(
        by=by,
        name=name,
        requests=requests.height,
        finished=done.height,
        waiting_frac=int(requests["queued_us"].sum()) / own_us if own_us else None,
        queue_ms=distribution(single(requests, pl.col("queue_us"))),
        ttft_ms=distribution(single(done, pl.col("ttft_us"))),
        tpot_ms=distribution(single(done.filter(tokens > 1), pl.col("decode_us") / (tokens - 1))),
        e2e_ms=distribution(single(done, pl.col("e2e_us"))),
    )


def _prefix_cache(engines: Sequence[EngineSums]) -> PrefixCacheUse | None:
    """Every request's first scheduling; a connector may bring tokens without a prefix cache."""
    known = [engine.prefix for engine in engines if engine.prefix is not None]
    if len(known) < len(engines):
        return None
    hits, prompt = sum(one.hit_tokens for one in known), sum(one.prompt_tokens for one in known)
    if not hits and not any(one.enabled for one in known):
        return None
    return PrefixCacheUse(
        requests=sum(one.requests for one in known),
        requests_with_hit=sum(one.with_hit for one in known),
        prompt_tokens=prompt,
        hit_tokens=hits,
        hit_frac=hits / prompt if prompt else None,
        local_tokens=_sum([one.local_tokens for one in known]),
        external_tokens=_sum([one.external_tokens for one in known]),
    )


def _sum(values: Sequence[int | None]) -> int | None:
    """None where no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _drafts(engines: Sequence[EngineSums]) -> DraftUse | None:
    drafts = sum(engine.drafts for engine in engines)
    if not drafts:
        return None
    accepted = sum(engine.drafts_accepted for engine in engines)
    drafted, used = (
        sum(engine.draft_tokens for engine in engines),
        sum(engine.used_tokens for engine in engines),
    )
    return DraftUse(
        drafts=drafts,
        accepted=accepted,
        invalid=_sum([engine.drafts_invalid for engine in engines]),
        accepted_frac=accepted / drafts,
        wasted_frac=(1 - accepted / drafts) * drafted / used if used else None,
    )


def _outcomes(engines: Sequence[EngineSums]) -> Outcomes:
    finished, aborted = sum(one.finished for one in engines), sum(one.aborted for one in engines)
    return Outcomes(
        arrived=sum(one.arrived for one in engines),
        finished=finished,
        aborted=aborted,
        errored=sum(one.ended for one in engines) - finished - aborted,
        unfinished=sum(one.unfinished for one in engines),
        by_scheduler=sum(one.by_scheduler for one in engines),
    )


def _durations(engines: Sequence[EngineSums]) -> Durations:
    tokens = [engine.inter_token for engine in engines if engine.inter_token is not None]
    return Durations(
        device_ms=distribution(pl.concat([engine.device for engine in engines])),
        start_to_start_ms=distribution(pl.concat([engine.apart for engine in engines])),
        inter_token_ms=distribution(pl.concat(tokens)) if len(tokens) == len(engines) else None,
    )


def _engines(engines: Sequence[EngineSums], ranks: Ranks) -> list[EngineFigures]:
    seconds = sum(counted_s(engine.spans for engine in engines).values())
    figures = [_figures([engine], engine.rank, seconds) for engine in engines]
    if len(engines) > 1:
        figures.append(_figures(engines, None, seconds))
    if len(engines) > 1 and ranks.loads is not None:
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
        own = [rank.number for rank in ranks.each if row.engine_rank in {None, rank.number}]
        row.dummy_batches = sum(dummies[rank][0] for rank in own)
        row.dummy_ms = sum(dummies[rank][1] for rank in own) / 1e3
        if stalls is not None:
            row.stalled_ms = sum(stalled.get(rank, 0.0) for rank in own) / 1e3


def _figures(engines: Sequence[EngineSums], rank: int | None, seconds: float) -> EngineFigures:
    """Sums over these engines; ``seconds`` are those that count for the throughput of all."""
    lives = all(Fact.LIVES in engine.facts for engine in engines)
    outputs, prompts = (
        sum(engine.output_tokens for engine in engines),
        sum(engine.prompt_tokens for engine in engines),
    )
    rates = throughput(0, prompts, outputs, seconds) if lives and seconds > 0 else None
    preemptions = [engine.preemptions for engine in engines if engine.preemptions is not None]
    return EngineFigures(
        engine_rank=rank,
        steps=sum(engine.steps for engine in engines),
        requests_finished=sum(engine.finished_in_steps for engine in engines) if lives else None,
        output_tokens_per_s=rates.output_tokens_per_s if rates else None,
        total_tokens_per_s=rates.total_tokens_per_s if rates else None,
        preemptions=sum(preemptions) if len(preemptions) == len(engines) else None,
        mean_running=_at_a_time([(one.running_us, one.busy_us) for one in engines]) if lives else None,
        mean_waiting=_at_a_time([(one.queued_us, one.busy_us) for one in engines]) if lives else None,
        dummy_batches=sum(engine.dummy_batches for engine in engines),
        dummy_ms=sum(engine.dummy_us for engine in engines) / 1e3,
        kv_used_frac=_mean([engine.kv_used for engine in engines if engine.kv_used is not None]),
    )


def _mean(parts: Sequence[tuple[float, int]]) -> float | None:
    """Of means, each of so many values."""
    if len(parts) == 1:  # no rounding
        return parts[0][0]
    count = sum(count for _, count in parts)
    return sum(mean * count for mean, count in parts) / count if count else None


def _at_a_time(engines: Sequence[tuple[int, int]]) -> float | None:
    """Mean number of requests over each engine's busy time, from the sum of their times and that time."""
    known = [us / busy for us, busy in engines if busy]
    return sum(known) if known else None
