"""``client-limited``: the engine waits for clients, which send few requests, or send them in rounds."""

from dataclasses import replace
from typing import Any, cast

import polars as pl

from schedtrace.diagnose.batches_in_flight import executed_batches
from schedtrace.diagnose.gains import fixed_share, host_time_us
from schedtrace.diagnose.offered_load import IDLE_FRAC, OfferedLoad, offered_load, rounds_of
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import BATCHED_TOKENS, batched_tokens
from schedtrace.diagnose.rules.common import advise, finding_of, severity_by_weight
from schedtrace.diagnose.rules.full_device import MOST_FRAC, WORTH_FRAC, most_base_us, prefill_work
from schedtrace.diagnose.rules.token_budget_bound import LONGER_STEPS
from schedtrace.model.causes import Cap
from schedtrace.model.message import NOTHING
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.timeline.timeline import Timeline
from schedtrace.workloads.clients import clients_of

MOST_IN_FLIGHT = 0.75
"""Mean share of a pipeline's batches in flight from which on their number is not stated."""
EMPTY_FROM_FRAC = 0.10
"""Minimum mean share of places that rounds must leave empty for the finding to blame the rounds."""
FULL_FROM_FRAC, FULL_GAIN = 0.95, 0.25
"""An engine counts as full if it worked for at least this share of the time, and if more requests at once
would raise its throughput by at most this fraction."""
FEW = (
    "{client_words}; [{several:!}the engine[ has {seats:n seat} and] {works}]"
    "[{several:?}the engines have {seats:n seat}]"
    "[; of the batches of the {engines:n} ranks in lock-step, {dummy_frac:%} hold no request]"
    "[; on average {batches_in_flight:n1} of the pipeline's {pipeline_batches:n} batches are in flight]."
)
FULL = (
    "The device is the limit: {client_words}; the engine {works}, and more requests at once would raise "
    "throughput by at most {most_gain_frac:%}, because only the fixed part of a step is shared.[ {work}]"
)
ROUNDS = (
    "{client_words} ({rounds:n round}); until the last one is done, {empty_frac:%} of "
    "[{few_seats:?}the {places:n seat}][{few_seats:!}their {places:n place}] are empty"
    "[{several:!}; the engine {works}]."
)
TIMES = "it offers {offered}, and the engine keeps up: it {works}."
NONE = "none"


class ClientPace(Evidence, kw_only=True):
    """Load that the clients offer, and the pattern of their requests."""

    pattern: str
    """Pattern that predicts the arrivals best: ``loop``, ``barrier``, ``limit``, ``sessions`` or ``retries``;
    ``none`` if requests arrive independently of answers."""
    clients: int | None
    """Number of clients or sessions with one request open each; for ``barrier``, of requests in a round; for
    ``limit``, of requests that may be open at a time; None if requests arrive independently of answers."""
    think_ms: float | None
    """Median time in milliseconds from an answer to its client's next request; for ``sessions``, the mean."""
    requests_per_s: float | None
    """Requests per second that arrive; None if requests follow answers."""
    tokens_per_s: float | None
    """Tokens per second that the requests offer; None if they follow answers."""
    working_frac: float
    """Share of the time in which the engine had work; the mean over several engines."""
    rounds: int | None = None
    """Number of rounds of ``barrier``."""
    empty_frac: float | None = None
    """Mean share of the places that are empty until the last request of a round is done. A round has as many
    places as requests, but at most as many as seats."""
    at_fullest_frac: float | None = None
    """Share of the time that the same work would take in steps as full as the fullest; None if unknown or
    without rounds."""
    engines: int = 1
    """Number of engines that received the requests."""
    batches_in_flight: float | None = None
    """Mean number of a pipeline's batches in flight; None: no pipeline, not recorded, or at least three
    quarters of the maximum."""
    pipeline_batches: int | None = None
    """Maximum number of batches in flight in the pipeline; None if ``batches_in_flight`` is."""
    dummy_frac: float | None = None
    """Share of the ranks' batches that hold no request; None: there are as many open requests as ranks, or
    more, or the ranks do not run in lock-step."""
    most_gain_frac: float | None = None
    """Maximum rise of throughput from more requests at once, if that is little and the engine always works;
    otherwise, or if unknown, None."""


ADVICE = {
    "loop": "more connections, or a higher concurrency, to load {engine}",
    "sessions": "more sessions, to load {engine}",
    "limit": "a higher limit in that queue, to load {engine}",
    "barrier": "send the next request when one of {clients:n} is done, not when all are, to load {engine}",
    NONE: "a higher request rate, to load {engine}",
}
FILL_PIPELINE = (
    "{pipeline_batches:n} requests or more at once, one for each batch of the pipeline. A pipeline does not "
    "shorten the steps of a single request; {tensor:setting} instead of it does."
)
FILL_RANKS = (
    "{engines:n} requests or more at once, one for each rank. A rank without a request runs dummy batches "
    "and shortens no other rank's step; {tensor:setting} instead of {data:setting} does, if the model can be "
    "split further."
)
MORE_TOKENS = (
    "more texts in a round or, where a round continues the texts of the round before (as a beam search in "
    "the client does), more tokens per request: each round gives a text one token and costs the client "
    "{think_ms:ms}"
)
LARGER_ROUNDS = "more requests in a round, or the next round before this one is done, to load {engine}"
LARGER_CHUNKS = (
    "larger chunks ({budget}, now {now:n}), if a replay of this load shows that they help ({command:code}): "
    "{low:%}[ to {high:%}] of the time of steps with such a chunk does not depend on its tokens"
)
ELSEWHERE = "another engine, or fewer tokens per request, for more requests/s"
TITLES = {"barrier": "The client sends in rounds", "limit": "A queue in front holds requests back"}
FITTED = {
    "loop": "Each further request followed an answer. ",
    "barrier": "Each round followed the last answer of the one before. ",
    "limit": "Requests that waited in front came at an answer. ",
    "sessions": "The fewer requests were open, the more came. ",
    NONE: "",
}


def more_tokens(load: OfferedLoad) -> Advice | None:
    """Return the advice for rounds of requests for a single token; None for other loads."""
    return advise(MORE_TOKENS, load) if load.one_token and load.think_ms else None


def _find(timeline: Timeline) -> Findings:
    load = offered_load(timeline)
    if _waits_for_clients(load, timeline.seats):
        finding = _finding(load, timeline.seats, engines=1, timeline=timeline)
        if finding.cost_frac is not None:
            finding.cost_ms = finding.cost_frac * (timeline.end_us - timeline.begin_us) / 1e3
        finding.count, finding.engine_rank = timeline.steps.height, timeline.rank
        yield finding


def _find_in_ranks(ranks: RecordedRanks) -> Findings:
    """Judge the requests of all ranks together, because a client's next request may go to another rank."""
    if len(ranks.each) == 1:
        return
    load, seats = _load_of_ranks(ranks), sum(rank.seats for rank in ranks.each)
    if load is not None and _waits_for_clients(load, seats):
        dummy_frac = None
        if ranks.lockstep and load.clients is not None and load.clients.clients < len(ranks.each):
            batches = len(ranks.each) * int(ranks.waves["passes"].sum())
            dummy_frac = int(ranks.dummies["batches"].sum()) / batches
        finding = _finding(load, seats, engines=len(ranks.each), dummy_frac=dummy_frac)
        finding.count = sum(rank.steps.height for rank in ranks.each)
        finding.engine_rank = ranks.each[0].rank_number
        finding.engine_ranks = [rank.rank_number for rank in ranks.each]
        yield finding


def _load_of_ranks(ranks: RecordedRanks) -> OfferedLoad | None:
    """Return the load of the trial with the most requests; None if its requests do not follow answers."""
    later_us = [ranks.offsets_us[rank.rank_number] for rank in ranks.each]
    lives = pl.concat(
        rank.lives.with_columns(pl.col("came_us", "gone_us") + us)
        for rank, us in zip(ranks.each, later_us, strict=True)
    ).drop_nulls("came_us")
    largest = max(lives.partition_by("trial"), key=lambda rows: rows.height, default=lives)
    clients = clients_of(*(largest[name].to_list() for name in ("came_us", "gone_us", "gave_up")))
    if clients is None:
        return None
    seats = sum(rank.seats for rank in ranks.each)
    latency_us = largest.select((pl.col("gone_us") - pl.col("came_us")).median()).item()
    is_barrier = clients.pattern == "barrier"
    working_fracs = []
    for rank in ranks.each:
        has_requests = pl.col("running") + pl.col("waiting") > 0
        working, whole = rank.presence.select(
            LENGTH_US.filter(has_requests).sum(), whole=LENGTH_US.sum()
        ).row(0)
        working_fracs.append(working / whole if whole else 0.0)
    return OfferedLoad(
        "answers",
        sum(working_fracs) / len(ranks.each),
        clients,
        latency_us / 1e3,
        rounds_of(largest, min(clients.clients, seats or clients.clients)) if is_barrier else None,
    )


def _waits_for_clients(load: OfferedLoad, seats: int | None) -> bool:
    if load.rounds is not None and load.rounds.empty_frac >= EMPTY_FROM_FRAC:
        return True
    if load.clients is not None and load.clients.pattern != "retries":
        return load.clients.clients < (seats or load.clients.clients + 1)
    return load.pace == "clock" and not load.grows and load.working_frac <= IDLE_FRAC


def _most_gain(timeline: Timeline, load: OfferedLoad) -> float | None:
    """Return the largest gain that fuller steps may bring, if it is small and the engine always works.

    None otherwise, and for a pipeline, which also gains from more batches.
    """
    model, busy_us = timeline.step_time, timeline.busy_us
    is_pipeline = (timeline.header.pipeline_parallel_size or 1) > 1
    if load.working_frac < FULL_FROM_FRAC or model is None or not busy_us or is_pipeline:
        return None
    steps = timeline.steps.filter(pl.col("total_requests") > 0)
    work_us = busy_us - steps.select(most_base_us(model).sum()).item() - host_time_us(timeline)
    gain = busy_us / work_us - 1 if work_us > 0 else None
    return gain if gain is not None and gain <= FULL_GAIN else None


def _larger_chunks(timeline: Timeline) -> list[Advice]:
    """Return the advice to cut prompts into larger chunks, if full chunks take most of the device's time.

    No request waits for the budget, but each chunk of a prompt pays for the fixed part of a step.
    """
    cut = timeline.caps.filter(pl.col("cap") == Cap.TOKEN_BUDGET)[["step"]].unique()
    steps = timeline.steps.join(cut, on="step", how="semi")
    share = fixed_share(timeline, steps, at_budget=True)
    if share is None or share.high_frac < WORTH_FRAC or steps["busy_us"].sum() < MOST_FRAC * timeline.busy_us:
        return []
    is_wide = share.high_frac - share.low_frac >= 0.01  # noqa: PLR2004  # else both are printed alike
    return [
        advise(
            LARGER_CHUNKS,
            budget=BATCHED_TOKENS,
            now=batched_tokens(timeline),
            command="schedtrace analyze --predict",
            low=share.low_frac,
            high=share.high_frac if is_wide else None,
            costs=LONGER_STEPS,
        )
    ]


def _evidence(
    load: OfferedLoad, engines: int, timeline: Timeline | None, dummy_frac: float | None
) -> ClientPace:
    clients = load.clients if load.clients is not None and load.clients.pattern != "retries" else None
    in_flight, depth = None, None
    if timeline is not None and (timeline.header.pipeline_parallel_size or 1) > 1:
        mean, depth = executed_batches(timeline)["in_flight"].mean(), timeline.header.batches_in_flight
        if depth is None or not isinstance(mean, float) or mean >= MOST_IN_FLIGHT * depth:
            depth = None
        else:
            in_flight = mean
    return ClientPace(
        pattern=NONE if load.clients is None else load.clients.pattern,
        clients=None if clients is None else clients.clients,
        think_ms=load.think_ms,
        requests_per_s=load.requests_per_s,
        tokens_per_s=load.tokens_per_s,
        working_frac=load.working_frac,
        rounds=load.rounds.rounds if load.rounds else None,
        empty_frac=load.rounds.empty_frac if load.rounds else None,
        at_fullest_frac=load.at_fullest_frac if load.rounds else None,
        engines=engines,
        batches_in_flight=in_flight,
        pipeline_batches=depth,
        dummy_frac=dummy_frac,
        most_gain_frac=None if timeline is None or load.rounds else _most_gain(timeline, load),
    )


def _finding(
    load: OfferedLoad,
    seats: int,
    *,
    engines: int,
    timeline: Timeline | None = None,
    dummy_frac: float | None = None,
) -> Finding:
    """Return the finding without its step count and rank, which the caller adds.

    Args:
        load: Offered load.
        seats: Seats of all engines.
        engines: Number of engines.
        timeline: Timeline of the engine; None for several engines.
        dummy_frac: Share of the ranks' batches without a request, if fewer requests than ranks are open.
    """
    evidence = _evidence(load, engines, timeline, dummy_frac)
    clients = evidence.clients
    pattern = NONE if clients is None else evidence.pattern
    is_full = evidence.most_gain_frac is not None and pattern != NONE
    slower_frac = None  # part of the run that steps as full as the fullest would save
    if load.rounds is not None and load.at_fullest_frac is not None:
        slower_frac = max(0.0, load.working_frac - load.at_fullest_frac)
    leaves_places = load.rounds is not None and load.rounds.empty_frac >= EMPTY_FROM_FRAC
    remedy = LARGER_ROUNDS if load.rounds is not None and not leaves_places else ADVICE[pattern]
    lacks_batches = clients is not None and clients < (evidence.pipeline_batches or 0)
    advice = ELSEWHERE if is_full else FILL_PIPELINE if lacks_batches else remedy
    if dummy_frac is not None:
        advice = FILL_RANKS
    places = seats if clients is None else min(seats or clients, clients)
    engine = "this engine" if engines == 1 else f"these {engines} engines"
    return finding_of(
        evidence,
        values={
            "client_words": load.client_words,
            "works": load.works,
            "offered": load.offered,
            "places": places,
            "seats": seats or None,
            "work": prefill_work(timeline) if timeline is not None and is_full else NOTHING,
            "few_seats": clients is not None and 0 < seats < clients,
            "several": engines > 1,
        },
        title="The device is full" if is_full else TITLES.get(pattern, "The client sends too little"),
        verdict=FULL
        if is_full
        else "The client is the limit: " + (TIMES if pattern == NONE else ROUNDS if leaves_places else FEW),
        message=FITTED[pattern] + "The pattern is a hint: the trace does not see the client.",
        severity="info" if slower_frac is None else severity_by_weight(None, slower_frac),
        advice=[
            *(_larger_chunks(timeline) if timeline is not None and is_full else []),
            more_tokens(load)
            or advise(
                advice,
                evidence,
                engine=engine,
                tensor="--tensor-parallel-size",
                data="--data-parallel-size",
            ),
        ],
        engine_rank=0,
        count=0,
        trials=[],
        steps=[],
        cost_frac=slower_frac,
        cost_of="busy time" if slower_frac is None else "run",
    )


RULE = Rule(
    code="client-limited",
    summary="the engine waits for its clients, which keep few requests open, send in rounds, or send few",
    needs=frozenset({Fact.TIMES, Fact.LIVES}),
    find=_find,
    quiet=3,
)
RANKS_RULE: Rule[RecordedRanks] = replace(cast("Rule[Any]", RULE), find=_find_in_ranks)
