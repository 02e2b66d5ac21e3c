"""``rank-imbalance``: one data-parallel rank had far more to do than the others."""

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import advise, finding_of
from schedtrace.diagnose.uneven_ranks import AVOIDABLE_FROM_FRAC, RankFigures, RankImbalance, rank_imbalance
from schedtrace.model.message import Message, joined
from schedtrace.model.report import Advice
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.engine_ranks import RecordedRanks


def _find(ranks: RecordedRanks) -> Findings:
    evidence = rank_imbalance(ranks)
    if evidence is None:
        return
    share = evidence.avoidable_frac + (evidence.lockstep_frac or 0.0)
    steps = ranks.timeline(evidence.largest).steps
    if evidence.avoidable_ms:
        steps = steps.filter(pl.col("num_waiting_after") > 0)
    yield finding_of(
        evidence,
        steps,
        title="Ranks are loaded unevenly",
        verdict=_verdict(evidence),
        share_frac=share or None,
        holder=_holder(evidence),
        engine_rank=evidence.largest,
        engine_ranks=[evidence.largest],
        message=_message(evidence),
        advice=[_advice(evidence)] if evidence.why != "unknown" else [],
        example="{request_id:id} was refused from step {step:n} on and waited {waited_us:us}.",
    )


def _verdict(evidence: RankImbalance) -> Message:
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
    """Return the tokens that each rank computed, or the mean number of requests that it held."""
    return {
        figures.rank: figures.prefill_tokens + figures.decode_tokens
        if evidence.measure == "tokens"
        else figures.mean_running + figures.mean_waiting
        for figures in evidence.ranks
    }


def _rank_figures(evidence: RankImbalance, rank: int) -> RankFigures:
    return next(figures for figures in evidence.ranks if figures.rank == rank)


def _holder(evidence: RankImbalance) -> Message:
    """Describe why: what the rank got, compared with the others."""
    own = _rank_figures(evidence, evidence.largest)
    peers = [figures for figures in evidence.ranks if figures.rank != own.rank]
    got = say(
        "Rank {rank:n} got {requests:n} of {total:n request}",
        own,
        total=sum(figures.requests for figures in evidence.ranks),
    )
    if evidence.why == "client":
        return say("{got}; the client chose the rank of {chosen:n}.", own, got=got)
    if evidence.why == "lengths":
        return say(
            "{got}, but longer ones: {prompt:n} prompt and {output:n} output tokens on average, {prompts:n} "
            "and {outputs:n} on the other {ranks}.",
            got=got,
            prompt=_rounded(own.mean_prompt_tokens),
            output=_rounded(own.mean_output_tokens),
            prompts=_rounded(
                _averaged([(figures.requests, figures.mean_prompt_tokens) for figures in peers])
            ),
            outputs=_rounded(
                _averaged([(figures.requests, figures.mean_output_tokens) for figures in peers])
            ),
            ranks="rank" if len(peers) == 1 else "ranks",
        )
    if evidence.why == "requests":
        return say("{got}; the router chose the rank.", got=got)
    return say("{got}, of about the same lengths as on other ranks.", got=got)


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _averaged(parts: list[tuple[int, float | None]]) -> float | None:
    counted = [(count, value) for count, value in parts if value is not None and count]
    return (
        sum(count * value for count, value in counted) / sum(count for count, _ in counted)
        if counted
        else None
    )


def _message(evidence: RankImbalance) -> Message:
    tokens, loads = evidence.measure == "tokens", _loads(evidence)
    del loads[evidence.largest]
    own = _rank_figures(evidence, evidence.largest)
    peer = _rank_figures(evidence, min(loads, key=lambda rank: loads[rank]))
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
    return joined(parts)


def _advice(evidence: RankImbalance) -> Advice:
    if evidence.why == "client":
        return advise(
            "Let vLLM choose the rank: send requests without data_parallel_rank (header "
            "X-data-parallel-rank), or fewer of them to rank {largest:n}.",
            evidence,
        )
    return advise(
        "Choose the rank by tokens, in the client or in a router before vLLM (header X-data-parallel-rank): "
        "vLLM's own router counts requests, not their tokens.",
        costs="Requests with a common prefix find it in the prefix cache only on the rank that has it.",
    )


RULE = Rule(
    code="rank-imbalance",
    summary="one data-parallel rank had far more requests than the others, or refused some while another "
    "had room",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES, Fact.QUEUE}),
    find=_find,
    quiet=2,
)
