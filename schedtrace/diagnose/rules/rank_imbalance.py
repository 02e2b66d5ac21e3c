"""``rank-imbalance``: one data-parallel rank had far more work than the others, or one had none."""

from dataclasses import dataclass

import msgspec
import polars as pl

from schedtrace.diagnose.batches_in_flight import UNEVEN_FRAC, UnevenContext, even_cycle_frac, uneven_context
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import (
    Fields,
    advise,
    finding_of,
    largest,
    step_numbers,
    trial_numbers,
)
from schedtrace.model.message import NOTHING, Message, joined
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.engine_ranks import RankLoads, RecordedRanks
from schedtrace.timeline.spans import LENGTH_US

LEAST_REQUESTS = 2.0
"""Minimum number of requests by which the largest load must exceed the mean of the ranks."""
FEWEST_REQUESTS = 8
"""Minimum mean number of requests per rank; with fewer, the ranks' tokens differ by chance."""
DUMMIES_FROM_FRAC = 0.01
"""Minimum share of the ranks' time that dummy batches must take to be reported."""
AVOIDABLE_FROM_FRAC = 0.01
"""Minimum share of all requests' time in which one rank refused requests while another had room."""
LARGER = 1.25
"""Minimum ratio of a rank's number of requests, or of their mean length, to that of the other ranks."""
MOST_CHOSEN = 0.9
"""Minimum share of a rank's requests for which the client chose the rank."""
REQUESTS, TOKENS = pl.col("running") + pl.col("waiting"), pl.col("tokens")
"""Loads that are compared: columns of ``RankLoads.loads``."""


class RankFigures(msgspec.Struct, kw_only=True):
    """Figures of one rank; mean numbers of requests are over the time in which any rank had a request."""

    rank: int
    """Data-parallel rank."""
    requests: int
    """Number of requests that reached this rank's scheduler."""
    chosen: int
    """Number of the rank's requests for which the client chose the rank."""
    mean_prompt_tokens: float | None
    """Mean prompt length of the requests that ended; None: no request ended."""
    mean_output_tokens: float | None
    """Mean output length of the requests that ended; None: no request ended."""
    prefill_tokens: int
    """Number of computed prefill tokens, including those computed again after a preemption."""
    decode_tokens: int
    """Number of computed decode tokens."""
    mean_running: float
    """Mean number of running requests."""
    mean_waiting: float
    """Mean number of refused requests."""
    kv_used_frac: float | None
    """Mean share of the KV blocks in use after this rank's steps; None: not recorded."""
    waited_ms: float
    """Time in which this rank's requests were refused."""
    avoidable_ms: float
    """Part of ``waited_ms`` in which another rank had a free seat and no waiting request."""


class RankDummies(msgspec.Struct, kw_only=True):
    """Dummy batches of a rank."""

    rank: int
    """Data-parallel rank."""
    batches: int
    """Number of this rank's dummy batches."""
    time_frac: float
    """Dummy batches' share of the time of all batches of this rank."""


class DummyBatches(Evidence, kw_only=True):
    """Dummy batches of ranks in lock-step, which kept pace with other ranks' requests."""

    batches: int
    """Number of dummy batches of all ranks."""
    steps_frac: float
    """Dummy batches' share of all ranks' batches, with or without requests."""
    time_frac: float
    """Dummy batches' share of the time of all ranks' batches."""
    longer_ms: float | None
    """Time by which common steps without prefill in which a rank had no request took longer than steps with
    as many requests on the fullest rank; None: they are less than a tenth longer, or this is unknown."""
    longer_frac: float | None
    """``longer_ms`` as a share of the time of as many steps in which every rank computed."""
    longer_requests_frac: float | None
    """Share of all requests' time that ``longer_ms`` took."""
    ranks: list[RankDummies]
    """Figures of each rank."""

    @property
    def most(self) -> RankDummies:
        """Figures of the rank whose dummy batches took the most time."""
        return max(self.ranks, key=lambda figures: figures.time_frac)


class RankImbalance(Evidence, kw_only=True):
    """Ranks side by side, and the reason why they differ."""

    largest: int
    """Rank that the finding names."""
    measure: str
    """Measure by which the rank stands out: avoidable ``waits``, ``requests`` in the scheduler, ``context``
    of the requests in common steps, or ``tokens`` computed."""
    since_s: float | None
    """Time from the run's first request to the first part of the run in which this rank's load exceeded the
    mean by at least a quarter of this load, and by at least one; None: never."""
    uneven_frac: float
    """Share of the run in which this rank exceeded the mean of the ranks as defined for ``since_s``."""
    avoidable_ms: float
    """Total time in which a rank refused requests while another had a free seat and no waiting request."""
    avoidable_frac: float
    """``avoidable_ms`` as a share of all requests' time."""
    lockstep_frac: float | None
    """Share of the requests' time that even batches would save in common steps; None if they would save
    nothing, or the saving is unknown."""
    context: UnevenContext | None
    """Context of the requests in common steps; None if it is even, costs little, or is unknown."""
    why: str
    """Reason: ``client`` (chose the rank), ``requests`` (the rank got more of them), ``lengths`` (the rank's
    requests are longer) or ``unknown``."""
    ranks: list[RankFigures]
    """Figures of each rank."""
    dummies: DummyBatches | None
    """Dummy batches of ranks in lock-step; None: they took less than 1 % of the ranks' time."""


def _find(ranks: RecordedRanks) -> Findings:
    dummies = _dummies(ranks)
    if (evidence := _imbalance(ranks, dummies)) is not None:
        yield _uneven_finding(ranks, evidence)
    elif dummies is not None:
        yield _dummies_finding(ranks, dummies)


def _uneven_finding(ranks: RecordedRanks, evidence: RankImbalance) -> Finding:
    longer = evidence.dummies.longer_requests_frac if evidence.dummies is not None else None
    context = evidence.context.requests_frac if evidence.context is not None else 0.0
    share = min(1.0, evidence.avoidable_frac + (evidence.lockstep_frac or 0.0) + (longer or 0.0) + context)
    timeline = ranks.timeline(evidence.largest)
    steps = timeline.steps
    if evidence.avoidable_ms:
        steps = steps.filter(pl.col("num_waiting_after") > 0)
    waits = timeline.request_states.filter(pl.col("state").is_in(["waiting", "preempted"])).drop_nulls(
        "begin_step"
    )
    return finding_of(
        evidence,
        steps,
        title="Ranks are loaded unevenly",
        verdict=joined([_verdict(evidence), _idle_words(evidence.dummies)]),
        share_frac=share or None,
        holder=_holder(evidence),
        engine_rank=evidence.largest,
        engine_ranks=[evidence.largest],
        message=_message(evidence),
        advice=[_advice(evidence)] if evidence.why != "unknown" else [],
        example="{request_id:id} was refused from step {step:n} on and waited {waited_us:us}."
        if evidence.avoidable_ms
        else None,
        cases=waits.group_by("request_id")
        .agg(pl.col("trial").first(), step=pl.col("begin_step").min(), waited_us=LENGTH_US.sum())
        .sort("waited_us", "request_id", descending=[True, False]),
    )


def _dummies_finding(ranks: RecordedRanks, dummies: DummyBatches) -> Finding:
    """Return the finding about dummy batches of ranks that are otherwise evenly loaded."""
    rank = dummies.most.rank
    gaps = (  # steps after dummy batches of their rank
        ranks.turns[["rank", "wave", "step_counter", "trial", "step"]]
        .sort("rank", "wave", "step_counter")
        .with_columns(batches=pl.col("step_counter").diff().over("rank", "wave", "trial") - 1)
        .filter(pl.col("batches") > 0)
    )
    fields: Fields = {
        "engine_rank": rank,
        "steps": step_numbers(gaps.filter(pl.col("rank") == rank)),
        "engine_ranks": [figures.rank for figures in dummies.ranks if figures.batches],
        "count": dummies.batches,
        "trials": trial_numbers(ranks.turns),
        "message": _dummies_message(dummies),
        "example": "Before {at} rank {rank:n} ran {batches:n dummy batch/dummy batches} in a row.",
        "cases": largest(gaps, "batches"),
    }
    if dummies.longer_ms is None:
        fields["severity"] = "info"
    else:
        fields |= {
            "title": "Ranks without requests slow the others",
            "verdict": _idle_words(dummies),
            "share_frac": dummies.longer_requests_frac,
            "advice": [
                advise(
                    "Give every rank requests, or run fewer ranks; and profile the dummy batch of a rank: if "
                    "it leaves the captured graphs, all ranks may have to."
                )
            ],
        }
    return finding_of(dummies, **fields)


def _idle_words(dummies: DummyBatches | None) -> Message:
    """State how much longer common steps are while a rank has no request; nothing if they are not."""
    if dummies is None or dummies.longer_ms is None:
        return NOTHING
    return say(
        "While a rank has no request, common steps take {longer_frac:%} longer than others with as "
        "many requests on the fullest rank: {longer_ms:ms} in all, {longer_requests_frac:%} of the "
        "requests' time.",
        dummies,
    )


def _dummies_message(dummies: DummyBatches) -> Message:
    most = dummies.most
    return say(
        "{steps_frac:%} of the ranks' batches held no request and ran only because other ranks had some: "
        "{batches:n dummy batch/dummy batches}, {time_frac:%} of the ranks' time. Rank {rank:n} ran most of "
        "them: {own:n}, {own_frac:%} of its time.",
        dummies,
        rank=most.rank,
        own=most.batches,
        own_frac=most.time_frac,
    )


def _verdict(evidence: RankImbalance) -> Message:
    if evidence.context is not None and evidence.measure == "context":
        return say(
            "Common steps are as long as the largest context takes: requests on rank {largest:n} hold "
            "{mean_tokens:n} tokens of context on average, on each other rank {mean_others:n} "
            "({request_id:id} alone has a prompt of {prompt_tokens:n token}); with even contexts they would "
            "take {requests_frac:%} less of the requests' time.",
            evidence.context,
            largest=evidence.largest,
        )
    if evidence.avoidable_frac >= AVOIDABLE_FROM_FRAC:
        return say(
            "Rank {largest:n} is overloaded while another rank has room: requests spent {avoidable_frac:%} "
            "of their time waiting although another rank had a free seat and nobody waiting.",
            evidence,
        )
    loads = _loads(evidence)
    own, mean = loads[evidence.largest], sum(loads.values()) / len(loads)
    if evidence.measure == "tokens":
        return say(
            "The ranks are loaded unevenly: rank {largest:n} computed {own:n token}, {mean:n} is the mean of "
            "the ranks.",
            evidence,
            own=own,
            mean=round(mean),
        )
    return say(
        "The ranks are loaded unevenly: rank {largest:n} held {own:n1} requests on average, {mean:n1} is the "
        "mean of the ranks[; common steps are as long as its batch takes: even ranks would take "
        "{lockstep_frac:%} less of the requests' time].",
        evidence,
        own=own,
        mean=mean,
    )


def _loads(evidence: RankImbalance) -> dict[int, float]:
    """Return the number of tokens that each rank computed, or its mean number of requests."""
    return {
        figures.rank: figures.prefill_tokens + figures.decode_tokens
        if evidence.measure == "tokens"
        else figures.mean_running + figures.mean_waiting
        for figures in evidence.ranks
    }


def _holder(evidence: RankImbalance) -> Message:
    """Describe why the loads differ, by comparing this rank's requests with those of the other ranks."""
    own = next(figures for figures in evidence.ranks if figures.rank == evidence.largest)
    peers = [figures for figures in evidence.ranks if figures.rank != own.rank]
    got = say(
        "Rank {rank:n} got {requests:n} of {total:n request}",
        own,
        total=sum(figures.requests for figures in evidence.ranks),
    )
    if evidence.why == "client":
        return say("{got}; the client chose the rank of {chosen:n}.", own, got=got)
    if evidence.why == "lengths":
        tokens = {"prompt": own.mean_prompt_tokens, "output": own.mean_output_tokens}
        for name, field in (("prompts", "mean_prompt_tokens"), ("outputs", "mean_output_tokens")):
            counted = [(figures.requests, getattr(figures, field)) for figures in peers if figures.requests]
            counted = [(requests, mean) for requests, mean in counted if mean is not None]
            total = sum(requests for requests, _ in counted)
            tokens[name] = sum(requests * mean for requests, mean in counted) / total if total else None
        return say(
            "{got}, but longer ones: {prompt:n} prompt and {output:n} output tokens on average, {prompts:n} "
            "and {outputs:n} on the other {ranks}.",
            got=got,
            ranks="rank" if len(peers) == 1 else "ranks",
            **{name: None if mean is None else round(mean) for name, mean in tokens.items()},
        )
    if evidence.why == "requests":
        return say("{got}; the router chose the rank.", got=got)
    return say("{got}, of about the same lengths as on other ranks.", got=got)


def _message(evidence: RankImbalance) -> Message:
    tokens, loads = evidence.measure == "tokens", _loads(evidence)
    each = {figures.rank: figures for figures in evidence.ranks}
    own = each.pop(evidence.largest)
    peer = each[min(each, key=lambda rank: loads[rank])]
    parts = [
        say(
            "Rank {rank:n} held {mean_running:n1} running and {mean_waiting:n1} waiting requests on average, "
            "rank {least:n} {others}.",
            own,
            least=peer.rank,
            others=say("{mean_running:n1} and {mean_waiting:n1}", peer),
        )
    ]
    if tokens:
        parts.append(
            say(
                "It computed {own:n token}, rank {rank:n} {others:n}.",
                peer,
                own=own.prefill_tokens + own.decode_tokens,
                others=peer.prefill_tokens + peer.decode_tokens,
            )
        )
    if evidence.since_s is not None:
        parts.append(
            say(
                "It had far more {what}than the mean in {uneven_frac:%} of the run, first {since_s:s} after "
                "the first request.",
                evidence,
                what="tokens " if tokens else "",
            )
        )
    if own.kv_used_frac is not None and peer.kv_used_frac is not None:
        parts.append(
            say(
                "Mean KV cache usage was {own:%} there and {kv_used_frac:%} on rank {rank:n}.",
                peer,
                own=own.kv_used_frac,
            )
        )
    if evidence.dummies is not None:
        parts.append(_dummies_message(evidence.dummies))
    return joined(parts)


def _advice(evidence: RankImbalance) -> Advice:
    if evidence.why == "client":
        return advise(
            "Let vLLM choose the rank: send requests without data_parallel_rank (header "
            "X-data-parallel-rank), or fewer of them to rank {largest:n}.",
            evidence,
        )
    words = (
        "Choose the rank by tokens, in the client or in a router before vLLM (header X-data-parallel-rank): "
        "vLLM's own router counts requests, not their tokens."
    )
    if evidence.why == "requests":
        words = (
            "Choose the rank by its load (open requests or their tokens), in the client or in a router "
            "before vLLM (header X-data-parallel-rank), also where prefixes or sessions name a rank."
        )
    return advise(
        words, costs="Requests with a common prefix find it in the prefix cache only on the rank that has it."
    )


@dataclass(frozen=True)
class _Uneven:
    """Unevenness of the loads, with the rank that stands out."""

    rank: int
    unevenness: float
    above: float
    """Load of this rank minus the mean of the ranks."""
    since_us: int | None
    parts_frac: float


def _imbalance(ranks: RecordedRanks, dummies: DummyBatches | None) -> RankImbalance | None:
    """Return the evidence (docs/findings/rank-imbalance.md); None if loads are even or unknown."""
    loads = ranks.loads if len(ranks.each) > 1 else None
    if loads is None or loads.loads.is_empty() or not ranks.total_requests_us:
        return None
    avoidable_us = sum(loads.avoidable_us.values())
    avoidable = avoidable_us / ranks.total_requests_us
    held = max(loads.avoidable_us, key=lambda rank: loads.avoidable_us[rank])
    measure = "requests"
    uneven = _uneven(loads, REQUESTS, held if avoidable >= AVOIDABLE_FROM_FRAC else None)
    far = uneven.unevenness >= UNEVEN_FRAC and uneven.above >= LEAST_REQUESTS
    if avoidable >= AVOIDABLE_FROM_FRAC:
        measure = "waits"
    context = uneven_context(ranks)
    if context is not None and context[1].requests_frac > avoidable:
        measure, uneven = "context", _uneven(loads, TOKENS, context[0])
    elif avoidable < AVOIDABLE_FROM_FRAC and not far:
        measure, uneven = "tokens", _uneven(loads, TOKENS, None)
        requests = sum(rank.arrived for rank in ranks.each)
        if uneven.unevenness < UNEVEN_FRAC or requests < FEWEST_REQUESTS * len(ranks.each):
            return None
    figures = _figures(ranks, loads)
    return RankImbalance(
        largest=uneven.rank,
        measure=measure,
        since_s=None if uneven.since_us is None else uneven.since_us / 1e6,
        uneven_frac=uneven.parts_frac,
        avoidable_ms=avoidable_us / 1e3,
        avoidable_frac=avoidable,
        lockstep_frac=_lockstep_frac(ranks) if far else None,
        context=None if context is None else context[1],
        why=_why(figures, uneven.rank),
        ranks=figures,
        dummies=dummies,
    )


def _figures(ranks: RecordedRanks, loads: RankLoads) -> list[RankFigures]:
    """Return the figures of each rank, in the order of the ranks."""
    means = {rank: (running, waiting) for rank, running, waiting in loads.means().iter_rows()}
    return [
        RankFigures(
            rank=rank.rank_number,
            requests=rank.arrived,
            chosen=rank.pinned,
            mean_prompt_tokens=rank.mean_prompt_tokens,
            mean_output_tokens=rank.mean_output_tokens,
            prefill_tokens=int((rank.steps["used_tokens"] - rank.steps["decode_tokens"]).sum()),
            decode_tokens=int(rank.steps["decode_tokens"].sum()),
            mean_running=means[rank.rank_number][0],
            mean_waiting=means[rank.rank_number][1],
            kv_used_frac=rank.kv_used_frac,
            waited_ms=loads.waited_us[rank.rank_number] / 1e3,
            avoidable_ms=loads.avoidable_us[rank.rank_number] / 1e3,
        )
        for rank in ranks.each
    ]


def _uneven(loads: RankLoads, load: pl.Expr, held: int | None) -> _Uneven:
    """Return by how much the rank ``held``, or else the most loaded one, exceeds the mean of the ranks."""
    open_ = loads.loads.select("part", "begin_us", "rank", load=load)
    means = dict(open_.group_by("rank").agg(pl.col("load").mean()).sort("rank").iter_rows())
    mean = sum(means.values()) / len(means)
    rank = held if held is not None else max(means, key=lambda number: means[number])
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
    )


def _lockstep_frac(ranks: RecordedRanks) -> float | None:
    """Return the share of the requests' time that even batches would save in common steps.

    The largest batch sets the pace of a common step.
    """
    if not ranks.lockstep or ranks.missing_ranks:
        return None
    size = len(ranks.each)
    plain = ranks.passes.filter((pl.col("prefilling") == 0) & (pl.col("requests") >= size)).with_columns(
        best=-(-pl.col("requests") // size), cycle_us="length_us"
    )
    uneven = plain.filter(pl.col("largest") > pl.col("best"))
    left = even_cycle_frac(plain, uneven) if uneven.height else None
    if left is None or left >= 1:
        return None
    felt = int(uneven.select((pl.col("cycle_us") * pl.col("requests")).sum()).item())
    return min(1.0, felt * (1 - left) / ranks.total_requests_us)


def _why(figures: list[RankFigures], rank: int) -> str:
    """Return why this rank has more work than the others."""
    own = next(figure for figure in figures if figure.rank == rank)
    rest = [figure for figure in figures if figure.rank != rank]
    mean = sum(figure.requests for figure in rest) / len(rest)
    if own.requests > LARGER * mean:
        return "client" if own.chosen >= MOST_CHOSEN * own.requests else "requests"
    for name in ("mean_prompt_tokens", "mean_output_tokens"):
        own_length = getattr(own, name)
        lengths = [length for figure in rest if (length := getattr(figure, name)) is not None]
        if own_length is not None and lengths and own_length > LARGER * sum(lengths) / len(lengths):
            return "lengths"
    return "unknown"


def _dummies(ranks: RecordedRanks) -> DummyBatches | None:
    """Return the dummy batches of ranks in lock-step; None if there are few, or ranks are independent."""
    if not ranks.lockstep or ranks.passes.is_empty():
        return None
    each = [
        RankDummies(rank=rank, batches=batches, time_frac=time_us / ranks.lockstep_us)
        for rank, batches, time_us in ranks.dummies[["rank", "batches", "time_us"]].iter_rows()
    ]
    batches = sum(figures.batches for figures in each)
    frac = sum(figures.time_frac for figures in each) / len(each)
    if not batches or frac < DUMMIES_FROM_FRAC:
        return None
    longer = ranks.idle_excess
    felt = None if longer is None else longer.requests_us / max(1, ranks.total_requests_us)
    return DummyBatches(
        longer_ms=None if longer is None else longer.us / 1e3,
        longer_frac=None if longer is None else longer.frac,
        longer_requests_frac=felt,
        batches=batches,
        steps_frac=batches / (batches + ranks.turns.height),
        time_frac=frac,
        ranks=each,
    )


RULE = Rule(
    code="rank-imbalance",
    summary="one data-parallel rank had far more requests than the others, refused some while another had "
    "room, or had none",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES, Fact.QUEUE}),
    find=_find,
    quiet=2,
)
