"""``rank-imbalance``: one data-parallel rank had far more to do than the others."""

import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import severity_by_weight
from schedtrace.diagnose.uneven_ranks import (
    AVOIDABLE_FROM_FRAC,
    RankFigures,
    RankImbalance,
    WaitExample,
    rank_imbalance,
)
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Message, Number, joined
from schedtrace.model.report import MAX_STEPS, Advice, Finding
from schedtrace.model.say import say
from schedtrace.timeline.engine_ranks import Ranks

CODE = "rank-imbalance"


def find(ranks: Ranks) -> list[Finding]:
    """See ``docs/findings/rank-imbalance.md``."""
    evidence = rank_imbalance(ranks)
    if evidence is None:
        return []
    share = evidence.avoidable_frac + (evidence.lockstep_frac or 0.0)
    steps = ranks.timeline(evidence.largest).steps
    if evidence.avoidable_ms:
        steps = steps.filter(pl.col("num_waiting_after") > 0)
    return [
        Finding(
            code=CODE,
            severity=severity_by_weight(None, share or None),
            title=say("Ranks are loaded unevenly"),
            verdict=_verdict(evidence),
            share_frac=share or None,
            holder=_holder(evidence),
            cause=None,
            via="recorded",
            engine_rank=evidence.largest,
            engine_ranks=[evidence.largest],
            count=steps.height,
            trials=steps["trial"].drop_nulls().unique().sort().to_list(),
            steps=steps["step"].sort().head(MAX_STEPS).to_list(),
            tokens=0,
            message=_message(evidence),
            advice=[_advice(evidence.why, evidence.largest)] if evidence.why != "unknown" else [],
            evidence=evidence,
            example=_described(evidence.examples[0]) if evidence.examples else None,
        )
    ]


def _verdict(evidence: RankImbalance) -> Message:
    rank = Number(evidence.largest)
    if evidence.avoidable_frac >= AVOIDABLE_FROM_FRAC:
        return say(
            "Rank {rank} is overloaded while another rank has room: requests spent {share:%} of "
            "their time waiting although another rank had a free seat and nobody waiting.",
            rank=rank,
            share=evidence.avoidable_frac,
        )
    if evidence.measure == "tokens":
        tokens = {one.rank: one.prefill_tokens + one.decode_tokens for one in evidence.ranks}
        return say(
            "The ranks are loaded unevenly: rank {rank} computed {own:n token}, {mean:n} is the "
            "mean of the ranks.",
            rank=rank,
            own=tokens[evidence.largest],
            mean=round(sum(tokens.values()) / len(tokens)),
        )
    cost = NOTHING
    if evidence.lockstep_frac:
        cost = say(
            "; common steps are as long as its batch takes: even ranks would take {saved:%} less "
            "of the requests' time",
            saved=evidence.lockstep_frac,
        )
    return say(
        "The ranks are loaded unevenly: rank {rank} held {own:n1} requests on average, "
        "{mean:n1} is the mean of the ranks{cost}.",
        rank=rank,
        own=_load(evidence, evidence.largest),
        mean=_mean(evidence),
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
    got = say(
        "Rank {rank:n} got {own:n} of {total:n request}",
        rank=own.rank,
        own=own.requests,
        total=total,
    )
    if evidence.why == "client":
        return say("{got}; the client chose the rank of {chosen:n}.", got=got, chosen=own.chosen)
    if evidence.why == "lengths":
        return say(
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
        return say("{got}; {chosen}.", got=got, chosen="the router chose the rank")
    return say("{got}, of about the same lengths as on other ranks.", got=got)


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
        since = say(
            " It had far more {what}than the mean in {part:%} of the run, first {since:us} after "
            "the first request.",
            what="tokens " if tokens else "",
            part=evidence.uneven_frac,
            since=1e6 * evidence.since_s,
        )
    kv = say("")
    own, other = (
        next(one for one in evidence.ranks if one.rank == rank) for rank in (evidence.largest, least)
    )
    if own.kv_used_frac is not None and other.kv_used_frac is not None:
        kv = say(
            " Mean KV cache usage was {own:%} there and {other:%} on rank {least:n}.",
            own=own.kv_used_frac,
            other=other.kv_used_frac,
            least=least,
        )
    return joined(
        [
            say(
                "Rank {rank:n} held {running:n1} running and {waiting:n1} waiting requests on "
                "average, rank {least:n} {others}.",
                rank=own.rank,
                running=own.mean_running,
                waiting=own.mean_waiting,
                least=least,
                others=say(
                    "{running:n1} and {waiting:n1}",
                    running=other.mean_running,
                    waiting=other.mean_waiting,
                ),
            ),
            _computed(own, other) if tokens else NOTHING,
            since,
            kv,
        ],
        "",
    )


def _computed(own: RankFigures, other: RankFigures) -> Message:
    return say(
        " It computed {own:n token}, rank {least:n} {others:n}.",
        own=own.prefill_tokens + own.decode_tokens,
        least=other.rank,
        others=other.prefill_tokens + other.decode_tokens,
    )


def _advice(why: str, rank: int) -> Advice:
    if why == "client":
        return Advice(
            message=say(
                "Let vLLM choose the rank: send requests without data_parallel_rank (header "
                "X-data-parallel-rank), or fewer of them to rank {rank:n}.",
                rank=rank,
            )
        )
    return Advice(
        message=say(
            "Choose the rank by tokens, in the client or in a router before vLLM (header "
            "X-data-parallel-rank): vLLM's own router counts requests, not their tokens."
        ),
        costs=say("Requests with a common prefix find it in the prefix cache only on the rank that has it."),
    )


def _described(example: WaitExample) -> Message:
    return say(
        "{request:id} was refused from step {step:n} on and waited {waited:us}.",
        request=example.request_id,
        step=example.step,
        waited=example.waited_us,
    )


RULE = Rule(
    code=CODE,
    summary="one data-parallel rank had far more requests than the others, or refused some while another "
    "had room",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES, Fact.QUEUE}),
    find=find,
    quiet=2,
)
