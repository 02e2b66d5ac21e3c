"""``slow-rank``: steps of one data-parallel rank take longer than other ranks' steps for the same work."""

from statistics import median

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import advise, finding_of
from schedtrace.model.report import Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.engine_ranks import BEYOND, RecordedRanks
from schedtrace.timeline.passes import PASS

SLOW_FACTOR = 1.2
"""Minimum factor by which a rank must be slower; the models of two equal ranks differ by less."""
ERRORS = 3.0
"""Minimum ratio of the difference between ranks to the relative error of their models."""
PREFILL_FACTOR = 1.3
"""Minimum factor in lock-step, where the time that a prefill token adds is compared, which varies more."""
ABOUT = 0.8
"""Minimum number of requests on the prefilling rank, as a share of those on the largest rank; with fewer, the
largest rank's decodes hide part of the prefill."""
EXPLAINED = 0.8
"""Maximum ratio of the error of a fit with a slow rank to that of a fit with equal ranks."""
FEWEST_PASSES = 5
"""Minimum number of common steps in which the rank prefilled, and in which another rank did."""
HIDDEN = 10.0
"""Factor between the ranks' times per prefill token from which on the report does not state it."""
LEAST_RISE = 0.02
"""Minimum time that the rank's prefills must add to a common step on average, as a share of a step that only
decodes."""

IN_LOCKSTEP = (
    "Rank {rank:n} is slower than the others: the common steps get longer with its prefill tokens"
    "[, {times:n1} times as much as with others'][{times:!}, not with those of other ranks]; "
    "this costs at least {share:%} of the requests' time."
)
INDEPENDENT = (
    "Rank {rank:n} is slower than the others: its steps take {factor:n1} times as long for the same work; "
    "{share:%} of the requests' time."
)


class SlowRank(Evidence, kw_only=True):
    """Slowest rank, compared with the others."""

    rank: int
    """Number of the slowest rank."""
    factor: float | None
    """Ratio of this rank's step times to those predicted from the other ranks' step times; None if the other
    ranks' prefills add nothing."""
    lockstep: bool
    """Whether the ranks run in lock-step."""
    work_of: int
    """Rank whose average step is compared; another rank than ``rank`` if that holds far more requests."""
    own_us: float
    """Time of the average step of ``work_of`` on the slow rank; in lock-step, the time that a thousand
    prefill tokens of the slow rank add to a common step."""
    others_us: float
    """Same time on the other ranks."""
    compared: int
    """Number of compared ranks."""


def _find(ranks: RecordedRanks) -> Findings:
    if len(ranks.each) < 2 or not ranks.total_requests_us:  # noqa: PLR2004  # one has none to compare with
        return
    result = _in_lockstep(ranks) if ranks.lockstep else _independent(ranks)
    if result is None:
        return
    evidence, share = result
    steps = ranks.timeline(evidence.rank).steps
    lockstep = evidence.lockstep
    yield finding_of(
        evidence,
        steps,
        title="Rank {rank:n} is slower than the others",
        verdict=IN_LOCKSTEP if lockstep else INDEPENDENT,
        share_frac=share,
        engine_rank=evidence.rank,
        engine_ranks=[evidence.rank],
        trials=[],
        message="By a fit to all common steps, a thousand prefill tokens of rank {rank:n} add "
        "{own_us:us} to one, and those of other ranks {others_us:us}."
        if lockstep
        else "An average step of rank {work_of:n} takes {own_us:us} {there}, and {others_us:us} by the other "
        "ranks' step times ({compared:n rank} compared).",
        values={
            "times": evidence.factor if evidence.factor and evidence.factor < HIDDEN else None,
            "there": "there"
            if evidence.work_of == evidence.rank
            else say("on rank {rank:n}", rank=evidence.rank),
        },
        advice=[
            advise(
                "Look at the device and host of rank {rank:n}: clocks, temperature, other users. "
                "Until then send it fewer requests.",
                evidence,
            )
        ],
    )


def _independent(ranks: RecordedRanks) -> tuple[SlowRank, float] | None:
    """Compare the ranks' step-time models on each other's work, as far as their records cover this work.

    If a slow rank holds far more requests than the others ever had, only the others' work is compared. A rank
    with fewer requests is not compared on its own work alone, because a busy rank's model may be too low for
    small batches, whose times have a floor.
    """
    paces = {rank.rank_number: rank.pace for rank in ranks.each if rank.pace is not None}
    if len(paces) < 2:  # noqa: PLR2004  # likewise
        return None
    factors, least = {}, {}
    compared: dict[int, tuple[int, dict[str, float]]] = {}
    for number, own in paces.items():
        ratios = []
        for peer, pace in paces.items():
            if peer != number and own.knows(pace.work):
                works = {peer: pace.work} | ({number: own.work} if pace.knows(own.work) else {})
                ratios.append(
                    [own.expected_us(work) / max(1.0, pace.expected_us(work)) for work in works.values()]
                )
                compared.setdefault(number, [*works.items()][-1])
        if ratios:
            factors[number] = median(sum(per_work) / len(per_work) for per_work in ratios)
            least[number] = median(min(per_work) for per_work in ratios)
    if not factors:
        return None
    slowest = max(factors, key=lambda number: factors[number])
    error = max(pace.model.error_frac for pace in paces.values())
    if least[slowest] < max(SLOW_FACTOR, 1 + ERRORS * error):
        return None
    pace, factor, (whose, work) = paces[slowest], factors[slowest], compared[slowest]
    others_us = median(peer.expected_us(work) for number, peer in paces.items() if number != slowest)
    lost = sum(rank.requests_us for rank in ranks.each if rank.rank_number == slowest) * (1 - 1 / factor)
    evidence = SlowRank(
        rank=slowest,
        factor=factor,
        lockstep=False,
        work_of=whose,
        own_us=pace.expected_us(work),
        others_us=others_us,
        compared=len(factors),
    )
    return evidence, lost / ranks.total_requests_us


def _in_lockstep(ranks: RecordedRanks) -> tuple[SlowRank, float] | None:
    """Find the slow rank in lock-step: the one whose prefills lengthen the common steps more than others'.

    The additional time of passes with prefills is fitted twice: to the largest number of prefill
    tokens on any rank, and to the tokens of one rank and the largest number on the others. If that rank is as
    fast as the others, both fits are equally good.
    """
    numbers = [rank.rank_number for rank in ranks.each]
    most = (  # the largest prefill of a rank, with that rank's requests
        ranks.turns.sort("prefill_tokens", "requests", maintain_order=True)
        .group_by(*PASS)
        .agg(most=pl.col("prefill_tokens").last(), own_requests=pl.col("requests").last())
    )
    of_pass = most.join(ranks.passes.select(*PASS, "length_us", "largest", "requests"), on=PASS).sort(PASS)
    tokens = (
        ranks.turns.pivot("rank", index=[*PASS], values="prefill_tokens").fill_null(0).join(of_pass, on=PASS)
    )
    numbers = [number for number in numbers if str(number) in tokens.columns]
    base = tokens.filter(pl.col("most") == 0).select(pl.col("length_us").median()).item()
    if ranks.missing_ranks or base is None or len(numbers) < 2:  # noqa: PLR2004  # likewise
        return None
    tokens = tokens.filter(
        pl.col("most") > 0, pl.col("own_requests") >= ABOUT * pl.col("largest")
    ).with_columns(more_us=pl.col("length_us") - base)
    candidates = []
    for number in numbers:
        name, most_of_peers = str(number), pl.max_horizontal(str(peer) for peer in numbers if peer != number)
        alike = _as_long(tokens.with_columns(others=most_of_peers), name)
        if min(alike.select((pl.col(name, "others") > 0).sum()).row(0)) < FEWEST_PASSES:
            continue
        _, one_rate_error = _rates(alike["more_us"], alike["most"])
        (own, peers), error = _rates(alike["more_us"], alike[name], alike["others"])
        rise = own * float(alike.filter(pl.col(name) > 0).select(pl.col(name).mean()).item())
        if own >= PREFILL_FACTOR * peers and error < EXPLAINED * one_rate_error and rise >= LEAST_RISE * base:
            lost_us = (own - peers) * alike.select((pl.col(name) * pl.col("requests")).sum()).item()
            candidates.append((error / one_rate_error, number, own, peers, lost_us))
    if not candidates:
        return None
    _, slowest, own, peers, lost_us = min(candidates)
    evidence = SlowRank(
        rank=slowest,
        factor=own / peers if peers else None,
        lockstep=True,
        work_of=slowest,
        own_us=1000 * own,
        others_us=1000 * peers,
        compared=len(numbers),
    )
    return evidence, min(1.0, lost_us / ranks.total_requests_us)


def _as_long(tokens: pl.DataFrame, name: str) -> pl.DataFrame:
    """Select the common steps with prefills of sizes that occur both on this rank and on the others.

    The first token of a prefill costs more than its last, so short prompts look slow per token.
    """
    own, rest = (tokens.filter(pl.col(column) == pl.col("most"))["most"] for column in (name, "others"))
    if own.is_empty() or rest.is_empty():
        return tokens.clear()
    least, most = max(own.min(), rest.min()), min(own.max(), rest.max())  # type: ignore[type-var]  # integers
    return tokens.filter(pl.col("most").is_between(least / BEYOND, most * BEYOND))  # type: ignore[operator]  # integers


def _rates(times: pl.Series, *tokens: pl.Series) -> tuple[list[float], float]:
    """Return the non-negative microseconds per token of each column, and the mean error of their sum."""
    import numpy as np  # noqa: PLC0415  # most runs have one engine
    from scipy.optimize import nnls  # noqa: PLC0415  # likewise

    columns = np.column_stack([column.to_numpy().astype(float) for column in tokens])
    measured = times.to_numpy().astype(float)
    rates = nnls(columns, measured)[0]
    return [float(rate) for rate in rates], float(np.abs(columns @ rates - measured).mean())


RULE = Rule(
    code="slow-rank",
    summary="the steps of one data-parallel rank take longer than those of the others for the same work",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES}),
    find=_find,
)
