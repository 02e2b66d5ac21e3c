"""Imbalance of a run's ranks: how unevenly they were loaded, which one had most, and why."""

from dataclasses import dataclass

import msgspec
import polars as pl

from schedtrace.diagnose.batches_in_flight import even_cycle_frac
from schedtrace.model.causes import Cause
from schedtrace.model.report import Evidence
from schedtrace.model.trace import Header
from schedtrace.timeline.engine_ranks import RankLoads, RecordedRanks
from schedtrace.timeline.timeline import Timeline


class RankFigures(msgspec.Struct, kw_only=True):
    """Figures of one rank; means of requests are over the time in which any rank had one."""

    rank: int
    """Data-parallel rank."""
    requests: int
    """Number of requests that reached its scheduler."""
    chosen: int
    """Number of these for which the client asked for this rank."""
    mean_prompt_tokens: float | None
    """Mean length of the prompts of requests that ended; None: none did."""
    mean_output_tokens: float | None
    """Mean length of the outputs of requests that ended; None: none did."""
    prefill_tokens: int
    """Prefill tokens computed, with those that a preemption had thrown away."""
    decode_tokens: int
    """Decode tokens computed."""
    mean_running: float
    """Mean number of running requests, over the time in which any rank had one."""
    mean_waiting: float
    """Mean number of refused requests."""
    kv_used_frac: float | None
    """Mean share of the KV blocks in use after its steps; None: not recorded."""
    waited_ms: float
    """Time that its requests were refused."""
    avoidable_ms: float
    """Part of that while another rank had a seat and no waiting request."""


def rank_figures(ranks: RecordedRanks, loads: RankLoads) -> list[RankFigures]:
    """Return one entry per rank, in order."""
    means = {rank: (running, waiting) for rank, running, waiting in loads.means().iter_rows()}
    return [
        RankFigures(
            rank=rank.number,
            requests=rank.arrived,
            chosen=rank.pinned,
            mean_prompt_tokens=rank.mean_prompt_tokens,
            mean_output_tokens=rank.mean_output_tokens,
            prefill_tokens=int((rank.steps["used_tokens"] - rank.steps["decode_tokens"]).sum()),
            decode_tokens=int(rank.steps["decode_tokens"].sum()),
            mean_running=means[rank.number][0],
            mean_waiting=means[rank.number][1],
            kv_used_frac=rank.kv_used_frac,
            waited_ms=loads.waited_us[rank.number] / 1e3,
            avoidable_ms=loads.avoidable_us[rank.number] / 1e3,
        )
        for rank in ranks.each
    ]


SCHEDULER_CLASS = "schedtrace.balance.BalanceScheduler"
"""Name of ``schedtrace.balance``'s class, as ``--scheduler-cls`` accepts it."""
CAUSE = str(Cause.RANK_BALANCE)
"""Cause of a wait while the gate of balance scheduling is closed."""


def has_balance_scheduler(header: Header) -> bool:
    """Return whether the scheduler balances ranks: schedtrace's, or vllm-ascend's."""
    names = (header.scheduler_class, str(header.scheduler_config.get("scheduler_cls")))
    return any("balance" in name.lower() for name in names)


def prefill_interval(header: Header) -> int | None:
    """Return ``prefill_schedule_interval``; None for a vLLM without it (before 0.24)."""
    value = header.scheduler_config.get("prefill_schedule_interval")
    return value if isinstance(value, int) else None


UNEVEN_FRAC = 0.25
"""Least unevenness, ``1 - mean / max``, of the ranks' mean loads."""
LEAST_REQUESTS = 2.0
"""Least number of requests by which the largest load must exceed the mean; one request is no imbalance."""
FEWEST_REQUESTS = 8
"""Fewest requests per rank on average; with fewer, tokens differ by chance."""
AVOIDABLE_FROM_FRAC = 0.01
"""Least share of all requests' time in which requests were refused while another rank had room."""
LARGER = 1.25
"""Least ratio of a rank's requests, or their length, to those of the other ranks."""
MOST_CHOSEN = 0.9
"""Least share of its requests for which the client chose the rank."""
REQUESTS, TOKENS = pl.col("running") + pl.col("waiting"), pl.col("tokens")
"""Kinds of loads: columns of ``RankLoads.loads``."""


class WaitExample(msgspec.Struct, kw_only=True):
    """Example of the longest waits on the rank."""

    request_id: str
    """vLLM's id of the request."""
    step: int
    """First step that refused it."""
    trial: int | None
    """Trial of the step; None for a trace without trials."""
    waited_us: int
    """Time that it waited."""


class RankImbalance(Evidence, kw_only=True):
    """The ranks side by side, and why they differ."""

    largest: int
    """Rank that the finding names."""
    measure: str
    """Measure of the imbalance: avoidable ``waits``, ``requests`` in the scheduler, or ``tokens`` computed.
    """
    unevenness_frac: float
    """``1 - mean / max`` over the ranks, of their mean numbers of requests or, for ``tokens``, of these."""
    since_s: float | None
    """Time from the run's first request to the first part of the run in which this rank was above the mean
    by a quarter of its load and one request; None: never."""
    uneven_frac: float
    """Share of the run in which it was."""
    avoidable_ms: float
    """Time that requests of all ranks were refused while another rank had a seat and no waiting request."""
    avoidable_frac: float
    """Share of all requests' time."""
    lockstep_frac: float | None
    """Share of the requests' time that even batches would save in common steps; None: nothing, or not
    known."""
    why: str
    """``client`` (it chose the rank), ``requests`` (the rank got more of them), ``lengths`` (they are
    longer) or ``unknown``."""
    strip: list[float]
    """The rank's mean number of requests, or its tokens, in equal parts of the run."""
    mean_strip: list[float]
    """Mean of all ranks in these parts."""
    ranks: list[RankFigures]
    """Figures of each rank."""
    examples: list[WaitExample]
    """Longest waits on the rank."""


@dataclass(frozen=True)
class _Uneven:
    """Unevenness of the loads of one rank."""

    rank: int
    unevenness: float
    above: float
    """Number of requests above the mean."""
    since_us: int | None
    parts_frac: float
    own: list[float]
    mean: list[float]


def rank_imbalance(ranks: RecordedRanks) -> RankImbalance | None:
    """Return the imbalance defined in ``docs/findings/rank-imbalance.md``; None if even or unknown."""
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
    elif not far:
        measure, uneven = "tokens", _uneven(loads, TOKENS, None)
        requests = sum(rank.arrived for rank in ranks.each)
        if uneven.unevenness < UNEVEN_FRAC or requests < FEWEST_REQUESTS * len(ranks.each):
            return None
    figures = rank_figures(ranks, loads)
    return RankImbalance(
        largest=uneven.rank,
        measure=measure,
        unevenness_frac=uneven.unevenness,
        since_s=None if uneven.since_us is None else uneven.since_us / 1e6,
        uneven_frac=uneven.parts_frac,
        avoidable_ms=avoidable_us / 1e3,
        avoidable_frac=avoidable,
        lockstep_frac=_lockstep_frac(ranks) if far else None,
        why=_why(figures, uneven.rank),
        strip=uneven.own,
        mean_strip=uneven.mean,
        ranks=figures,
        examples=_examples(ranks.timeline(uneven.rank)) if avoidable_us else [],
    )


def _uneven(loads: RankLoads, load: pl.Expr, held: int | None) -> _Uneven:
    """Return how far one rank exceeds the others: the rank that delayed requests, else the most loaded."""
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
        own=of_part["own"].to_list(),
        mean=of_part["mean"].to_list(),
    )


def _lockstep_frac(ranks: RecordedRanks) -> float | None:
    """Return the share of the requests' time that even batches would save; the largest sets the pace."""
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
    """Return why this rank has more to do than the others."""
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


def _examples(timeline: Timeline) -> list[WaitExample]:
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
