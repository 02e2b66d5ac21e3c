"""``rank-imbalance``: one data-parallel rank had far more to do than the others."""

from dataclasses import dataclass

import msgspec
import polars as pl

from schedtrace.diagnose.batches_in_flight import even_cycle_frac
from schedtrace.diagnose.rank_figures import RankFigures, rank_figures
from schedtrace.diagnose.rules.common import severity_by_weight
from schedtrace.model.facts import Fact
from schedtrace.model.message import (
    NOTHING,
    Count,
    Duration,
    Message,
    Number,
    Request,
    Share,
    joined,
    message,
)
from schedtrace.model.report import MAX_STEPS, Advice, Evidence, Finding
from schedtrace.timeline.rank_loads import RankLoads
from schedtrace.timeline.ranks import Ranks

CODE = "rank-imbalance"
SUMMARY = (
    "one data-parallel rank had far more requests than the others, or refused some while another had room"
)
NEEDS = (Fact.TIMES, Fact.REQUESTS, Fact.LIVES, Fact.QUEUE)

UNEVEN_FRAC = 0.25
"""``1 - mean / max`` of the ranks' mean loads."""
LEAST_REQUESTS = 2.0
"""That the largest load is above the mean: a request more or less is no imbalance."""
FEWEST_REQUESTS = 8
"""A rank, on average: tokens of fewer differ by chance."""
AVOIDABLE_FROM_FRAC = 0.01
"""Of all requests' time: refused on one rank while another had room."""
LARGER = 1.25
"""From when on a rank's requests are more, or longer, than those of the others."""
MOST_CHOSEN = 0.9
"""From this share of its requests on, the client chose the rank."""


class WaitExample(msgspec.Struct, kw_only=True):
    """One of the longest waits on the rank."""

    request_id: str
    step: int
    """The first step that refused it."""
    trial: int | None
    waited_us: int


class RankImbalance(Evidence, kw_only=True):
    """The ranks side by side, and why they differ."""

    largest: int
    """The rank that the finding names."""
    measure: str
    """What it is about: avoidable ``waits``, ``requests`` in the scheduler, or ``tokens`` computed."""
    unevenness_frac: float
    """``1 - mean / max`` over the ranks, of their mean numbers of requests or, for ``tokens``, of these."""
    since_s: float | None
    """From the first request of the run to the first part of it in which this rank had far more."""
    uneven_frac: float
    """Share of the run in which it had far more."""
    avoidable_ms: float
    """Time that requests of all ranks were refused while another rank had a seat and nobody waiting."""
    avoidable_frac: float
    """Of all requests' time."""
    lockstep_frac: float | None
    """Share of the requests' time that even batches would save in common steps; null: none, or not known."""
    why: str
    """``client`` (it chose the rank), ``requests`` (the rank got more of them), ``lengths`` (they are longer)
    or ``unknown``."""
    strip: list[float]
    """The rank's mean number of requests, or its tokens, in equal parts of the run."""
    mean_strip: list[float]
    """The mean of all ranks in these parts."""
    ranks: list[RankFigures]
    examples: list[WaitExample]


@dataclass(frozen=True)
class _Uneven:
    """How uneven the loads are."""

    rank: int
    unevenness: float
    above: float
    """Requests above the mean."""
    since_us: int | None
    parts_frac: float
    own: list[float]
    mean: list[float]


def find(ranks: Ranks) -> list[Finding]:
    """See ``docs/findings/rank-imbalance.md``."""
    loads = ranks.loads if len(ranks.timelines) > 1 else None
    if loads is None or loads.loads.is_empty() or not ranks.requests_us:
        return []
    avoidable_us = sum(loads.avoidable_us.values())
    avoidable = avoidable_us / ranks.requests_us
    held = max(loads.avoidable_us, key=lambda rank: loads.avoidable_us[rank])
    measure = "requests"
    uneven = _uneven(loads, REQUESTS, held if avoidable >= AVOIDABLE_FROM_FRAC else None)
    far = uneven.unevenness >= UNEVEN_FRAC and uneven.above >= LEAST_REQUESTS
    even = _lockstep_frac(ranks) if far else None
    if avoidable >= AVOIDABLE_FROM_FRAC:
        measure = "waits"
    elif not far:
        measure, uneven = "tokens", _uneven(loads, pl.col("tokens"), None)
        if uneven.unevenness < UNEVEN_FRAC or _requests(ranks) < FEWEST_REQUESTS * len(ranks.timelines):
            return []
    share = avoidable + (even or 0.0)
    figures = rank_figures(ranks, loads)
    why = _why(figures, uneven.rank)
    evidence = RankImbalance(
        largest=uneven.rank,
        measure=measure,
        unevenness_frac=uneven.unevenness,
        since_s=None if uneven.since_us is None else uneven.since_us / 1e6,
        uneven_frac=uneven.parts_frac,
        avoidable_ms=avoidable_us / 1e3,
        avoidable_frac=avoidable,
        lockstep_frac=even,
        why=why,
        strip=uneven.own,
        mean_strip=uneven.mean,
        ranks=figures,
        examples=_examples(ranks, uneven.rank) if avoidable_us else [],
    )
    timeline = next(one for one in ranks.timelines if one.rank == uneven.rank)
    steps = timeline.steps.filter(pl.col("num_waiting_after") > 0) if avoidable_us else timeline.steps
    return [
        Finding(
            code=CODE,
            severity=severity_by_weight(None, share or None),
            title=message("Ranks are loaded unevenly"),
            verdict=_verdict(evidence),
            share_frac=share or None,
            holder=_holder(evidence),
            cause=None,
            via="recorded",
            engine_rank=uneven.rank,
            engine_ranks=[uneven.rank],
            count=steps.height,
            trials=steps["trial"].drop_nulls().unique().sort().to_list(),
            steps=steps["step"].sort().head(MAX_STEPS).to_list(),
            tokens=0,
            message=_message(evidence),
            advice=[_advice(why, uneven.rank)] if why != "unknown" else [],
            evidence=evidence,
            example=_described(evidence.examples[0]) if evidence.examples else None,
        )
    ]


REQUESTS = pl.col("running") + pl.col("waiting")


def _requests(ranks: Ranks) -> int:
    return sum(timeline.arrivals["request_id"].n_unique() for timeline in ranks.timelines)


def _uneven(loads: RankLoads, load: pl.Expr, held: int | None) -> _Uneven:
    """How far one rank is above the others: the one that held requests up, else the one with most of them."""
    open_ = loads.loads.select("part", "begin_us", "rank", load=load)
    means = dict(open_.group_by("rank").agg(pl.col("load").mean()).sort("rank").iter_rows())
    mean = sum(means.values()) / len(means)
    rank = held if held is not None else max(means, key=lambda one: means[one])
    of_part = open_.group_by("part", maintain_order=True).agg(
        pl.col("begin_us").first(),
        mean=pl.col("load").mean(),
        own=pl.col("load").filter(pl.col("rank") == rank).first(),
    )
    above = pl.col("own") - pl.col("mean")
    parts = of_part.filter((above >= UNEVEN_FRAC * pl.col("own")) & (above >= 1))
    return _Uneven(
        rank=rank,
        unevenness=1 - mean / means[rank] if means[rank] else 0.0,
        above=means[rank] - mean,
        since_us=int(parts["begin_us"][0]) - int(of_part["begin_us"][0]) if parts.height else None,
        parts_frac=parts.height / of_part.height,
        own=of_part["own"].to_list(),
        mean=of_part["mean"].to_list(),
    )


def _lockstep_frac(ranks: Ranks) -> float | None:
    """Share of the requests' time that even batches would save: a common step is as long as its largest."""
    if not ranks.lockstep or ranks.missing:
        return None
    size = len(ranks.timelines)
    plain = ranks.passes.filter((pl.col("prefilling") == 0) & (pl.col("requests") >= size)).with_columns(
        best=-(-pl.col("requests") // size), cycle_us="length_us"
    )
    uneven = plain.filter(pl.col("largest") > pl.col("best"))
    left = even_cycle_frac(plain, uneven) if uneven.height else None
    if left is None or left >= 1:
        return None
    felt = int(uneven.select((pl.col("cycle_us") * pl.col("requests")).sum()).item())
    return min(1.0, felt * (1 - left) / ranks.requests_us)


def _why(figures: list[RankFigures], rank: int) -> str:
    """Why this rank has more to do than the others."""
    own = next(one for one in figures if one.rank == rank)
    others = [one for one in figures if one.rank != rank]
    mean = sum(one.requests for one in others) / len(others)
    if own.requests > LARGER * mean:
        return "client" if own.chosen >= MOST_CHOSEN * own.requests else "requests"
    for name in ("mean_prompt_tokens", "mean_output_tokens"):
        own_length = getattr(own, name)
        lengths = [length for one in others if (length := getattr(one, name)) is not None]
        if own_length is not None and lengths and own_length > LARGER * sum(lengths) / len(lengths):
            return "lengths"
    return "unknown"


def _examples(ranks: Ranks, rank: int) -> list[WaitExample]:
    timeline = next(one for one in ranks.timelines if one.rank == rank)
    waits = timeline.request_states.filter(pl.col("state").is_in(["waiting", "preempted"])).drop_nulls(
        "begin_step"
    )
    each = (
        waits.group_by("request_id")
        .agg(
            pl.col("trial").first(),
            step=pl.col("begin_step").min(),
            waited_us=(pl.col("end_us") - pl.col("begin_us")).sum(),
        )
        .sort("waited_us", "request_id", descending=[True, False])
    )
    return [WaitExample(**row) for row in each.head(3).to_dicts()]


def _verdict(evidence: RankImbalance) -> Message:
    rank = Number(evidence.largest)
    if evidence.avoidable_frac >= AVOIDABLE_FROM_FRAC:
        return message(
            "Rank {rank} is overloaded while another rank has room: requests spent {share} of their time "
            "waiting although another rank had a free seat and nobody waiting.",
            rank=rank,
            share=Share(evidence.avoidable_frac),
        )
    if evidence.measure == "tokens":
        tokens = {one.rank: one.prefill_tokens + one.decode_tokens for one in evidence.ranks}
        return message(
            "The ranks are loaded unevenly: rank {rank} computed {own}, {mean} is the mean of the ranks.",
            rank=rank,
            own=Count(tokens[evidence.largest], "token"),
            mean=Number(round(sum(tokens.values()) / len(tokens))),
        )
    cost = NOTHING
    if evidence.lockstep_frac:
        cost = message(
            "; common steps are as long as its batch takes: even ranks would take {saved} less of the "
            "requests' time",
            saved=Share(evidence.lockstep_frac),
        )
    return message(
        "The ranks are loaded unevenly: rank {rank} held {own} requests on average, {mean} is the "
        "mean of the ranks{cost}.",
        rank=rank,
        own=Number(round(_load(evidence, evidence.largest), 1)),
        mean=Number(round(_mean(evidence), 1)),
        cost=cost,
    )


def _load(evidence: RankImbalance, rank: int) -> float:
    own = next(one for one in evidence.ranks if one.rank == rank)
    return own.mean_running + own.mean_waiting


def _mean(evidence: RankImbalance) -> float:
    return sum(one.mean_running + one.mean_waiting for one in evidence.ranks) / len(evidence.ranks)


def _holder(evidence: RankImbalance) -> Message:
    """Why: what the rank got, beside the others."""
    own = next(one for one in evidence.ranks if one.rank == evidence.largest)
    others = [one for one in evidence.ranks if one.rank != own.rank]
    total = sum(one.requests for one in evidence.ranks)
    got = message(
        "Rank {rank} got {own} of {total}",
        rank=Number(own.rank),
        own=Number(own.requests),
        total=Count(total, "request"),
    )
    if evidence.why == "client":
        return message("{got}; the client chose the rank of {chosen}.", got=got, chosen=Number(own.chosen))
    if evidence.why == "lengths":
        return message(
            "{got}, but longer ones: {prompt} prompt and {output} output tokens on average, {prompts} and "
            "{outputs} "
            "on the other {ranks}.",
            got=got,
            prompt=_rounded(own.mean_prompt_tokens),
            output=_rounded(own.mean_output_tokens),
            prompts=_rounded(_averaged([(one.requests, one.mean_prompt_tokens) for one in others])),
            outputs=_rounded(_averaged([(one.requests, one.mean_output_tokens) for one in others])),
            ranks="rank" if len(others) == 1 else "ranks",
        )
    if evidence.why == "requests":
        return message("{got}; {chosen}.", got=got, chosen="the router chose the rank")
    return message("{got}, of about the same lengths as on other ranks.", got=got)


def _rounded(value: float | None) -> Number:
    return Number(None if value is None else round(value))


def _averaged(parts: list[tuple[int, float | None]]) -> float | None:
    known = [(count, value) for count, value in parts if value is not None and count]
    return sum(count * value for count, value in known) / sum(count for count, _ in known) if known else None


def _message(evidence: RankImbalance) -> Message:
    tokens = evidence.measure == "tokens"
    loads = {
        one.rank: one.prefill_tokens + one.decode_tokens if tokens else one.mean_running + one.mean_waiting
        for one in evidence.ranks
        if one.rank != evidence.largest
    }
    least = min(loads, key=lambda rank: loads[rank])
    since = NOTHING
    if evidence.since_s is not None:
        since = message(
            " It had far more {what}than the mean in {part} of the run, first {since} after the first "
            "request.",
            what="tokens " if tokens else "",
            part=Share(evidence.uneven_frac),
            since=Duration(1e6 * evidence.since_s),
        )
    kv = message("")
    own, other = (
        next(one for one in evidence.ranks if one.rank == rank) for rank in (evidence.largest, least)
    )
    if own.kv_used_frac is not None and other.kv_used_frac is not None:
        kv = message(
            " Mean KV cache usage was {own} there and {other} on rank {least}.",
            own=Share(own.kv_used_frac),
            other=Share(other.kv_used_frac),
            least=Number(least),
        )
    return joined(
        [
            message(
                "Rank {rank} held {running} running and {waiting} waiting requests on average, rank {least} "
                "{others}.",
                rank=Number(own.rank),
                running=Number(round(own.mean_running, 1)),
                waiting=Number(round(own.mean_waiting, 1)),
                least=Number(least),
                others=message(
                    "{running} and {waiting}",
                    running=Number(round(other.mean_running, 1)),
                    waiting=Number(round(other.mean_waiting, 1)),
                ),
            ),
            _computed(own, other) if tokens else NOTHING,
            since,
            kv,
        ],
        "",
    )


def _computed(own: RankFigures, other: RankFigures) -> Message:
    return message(
        " It computed {own}, rank {least} {others}.",
        own=Count(own.prefill_tokens + own.decode_tokens, "token"),
        least=Number(other.rank),
        others=Number(other.prefill_tokens + other.decode_tokens),
    )


def _advice(why: str, rank: int) -> Advice:
    if why == "client":
        return Advice(
            message=message(
                "Let vLLM choose the rank: send requests without data_parallel_rank (header "
                "X-data-parallel-rank), or "
                "fewer of them to rank {rank}.",
                rank=Number(rank),
            )
        )
    return Advice(
        message=message(
            "Choose the rank by tokens, in the client or in a router before vLLM (header "
            "X-data-parallel-rank): vLLM's own router counts requests, not their tokens."
        ),
        costs=message(
            "Requests with a common prefix find it in the prefix cache only on the rank that has it."
        ),
    )


def _described(example: WaitExample) -> Message:
    return message(
        "{request} was refused from step {step} on and waited {waited}.",
        request=Request(example.request_id),
        step=Number(example.step),
        waited=Duration(example.waited_us),
    )
