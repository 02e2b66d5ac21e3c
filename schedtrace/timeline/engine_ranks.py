"""Ranks of one data-parallel run on one clock, and the passes that ranks in lock-step make together.

Ranks of a mixture-of-experts model run in lock-step: each makes one forward pass for every value of a common
step counter. A rank with nothing to compute runs a dummy batch. No rank begins a pass before all ranks have
finished the previous pass. Ranks of a dense model are independent engines (vLLM 0.14 and newer) and have no
counter.

For each rank, only a few numbers per step are kept (``RankSummary``), so that the rank's timeline can be
released.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import polars as pl

from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.engine_states import slow_on_device
from schedtrace.timeline.events import spans_by_kind
from schedtrace.timeline.frames import Offset, offset
from schedtrace.timeline.passes import PASS, PrefillStalls, measure_prefill_stalls
from schedtrace.timeline.pieces import NEXT_STEP
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.spans import LENGTH_US, level, merged, overlap_us, time_within
from schedtrace.timeline.step_time import FEATURES, StepTime, fit_step_time
from schedtrace.timeline.timeline import Timeline

STEPS = ("wave", "step_counter", "trial", "step", "start_us", "output_us")
"""Columns that ``RankSummary.steps`` takes from ``Timeline.steps``; null if a record lacks them."""


BEYOND = 1.5
"""Factor by which a feature may lie outside its recorded range for a model of step times to be trusted."""


@dataclass(frozen=True)
class Pace:
    """Step times of one rank as a function of the steps' work."""

    model: StepTime
    """Model of a step's time on the device."""
    work: dict[str, float]
    """Mean of each of ``FEATURES`` over the rank's steps."""
    least: dict[str, float]
    most: dict[str, float]
    """Largest value of each feature."""

    def knows(self, work: dict[str, float]) -> bool:
        """Return whether this work lies within, or close to, the range of the recorded steps.

        A model is not trusted far outside that range.
        """
        return all(self.least[name] / BEYOND <= work[name] <= self.most[name] * BEYOND for name in FEATURES)

    def expected_us(self, work: dict[str, float]) -> float:
        """Return the predicted duration, in microseconds, of a step with this work on the rank."""
        return float(pl.DataFrame(work).select(self.model.predicted()).item())


@dataclass(frozen=True)
class RankSummary:
    """Figures of one rank, on its own clock."""

    header: Header
    facts: frozenset[Fact]
    seats: int
    """Maximum number of running requests (``Timeline.seats``)."""
    requests_us: int
    """Total time of the rank's requests, in microseconds."""
    most_running: int
    """Largest number of requests that ran at the same time."""
    steps: pl.DataFrame
    """Table with a row per step that computed something: ``STEPS``, ``requests``, ``used_tokens``,
    ``decode_tokens`` and ``context_tokens``, all integers of 64 bits."""
    presence: pl.DataFrame
    """Consecutive spans: ``begin_us``, ``end_us``, and numbers of ``running`` and ``waiting`` requests."""
    arrived: int
    """Number of requests that reached the rank's scheduler."""
    pinned: int
    """Number of arrivals for which the client asked for this rank."""
    mean_prompt_tokens: float | None
    """Mean number of prompt tokens over the requests that arrived; None if no request did."""
    mean_output_tokens: float | None
    """Mean number of output tokens over the requests that ended; None if no request did."""
    kv_used_frac: float | None
    """Mean share of the KV blocks in use after the rank's steps; None if not recorded."""
    lives: pl.DataFrame
    """Table with a row per request: ``trial``, ``came_us``, ``gone_us`` (null: it did not end) and
    ``gave_up`` (its client disconnected)."""
    interrupted: pl.DataFrame
    """Spans (``begin_us``, ``end_us``) of the interruptions that the rank's own trace shows."""
    begins: bool
    """Whether the rank's trace begins with the engine's first step."""
    pace: Pace | None = None
    """Step times of the rank; None if too few steps have a time."""

    @property
    def rank_number(self) -> int:
        """Data-parallel rank number."""
        return self.header.engine_rank

    @property
    def in_lockstep(self) -> bool:
        """Whether the rank's steps have the counter that ranks in lock-step share."""
        return self.steps["wave"].count() > 0


def rank_of(timeline: Timeline) -> RankSummary:
    """Return the figures that rules about all ranks need from one rank's timeline."""
    steps = timeline.steps
    arrivals = timeline.first_arrivals
    most = steps["num_running_after"].max()
    columns = [pl.col(name) if name in steps.columns else pl.lit(None).alias(name) for name in STEPS]
    sizes = ("used_tokens", "decode_tokens", "context_tokens")
    computing = steps.filter(pl.col("total_requests") > 0)
    return RankSummary(
        header=timeline.header,
        facts=timeline.facts,
        seats=timeline.seats,
        requests_us=timeline.requests_us,
        most_running=most if isinstance(most, int) else 0,
        steps=computing.select(*columns, *sizes, requests=pl.col("total_requests")).cast(pl.Int64),
        presence=_presence(timeline),
        arrived=arrivals.height,
        pinned=arrivals["pinned_rank"].count() if "pinned_rank" in arrivals.columns else 0,
        mean_prompt_tokens=_mean(arrivals["prompt_tokens"]),
        mean_output_tokens=_mean(timeline.finishes["output_tokens"]),
        kv_used_frac=_mean(steps.select(kv_used_frac()).to_series()),
        lives=_lives(timeline),
        interrupted=merged(timeline.events)[["begin_us", "end_us"]],
        begins=timeline.begins,
        pace=_pace(steps),
    )


def _lives(timeline: Timeline) -> pl.DataFrame:
    ends = timeline.finishes.unique("request_id", keep="last").select(
        "request_id",
        gone_us="finished_us",
        gave_up=(pl.col("status") == "ABORTED") & ~pl.col("in_schedule"),
    )
    asked = timeline.started_requests
    return asked.join(ends, on="request_id", how="left", maintain_order="left").select(
        pl.col("trial").cast(pl.Int64),
        pl.coalesce("arrived_us", "queued_us").cast(pl.Int64).alias("came_us"),
        pl.col("gone_us").cast(pl.Int64),
        pl.col("gave_up").fill_null(value=False),
    )


def _pace(steps: pl.DataFrame) -> Pace | None:
    timed = (
        steps.filter(pl.col("total_requests") > 0)
        .with_columns(busy_us=pl.col("execution_us"))
        .drop_nulls(["busy_us", *FEATURES])
    )
    model = fit_step_time(timed)
    if model is None:
        return None
    work = pl.col(*FEATURES).cast(pl.Float64)
    mean, least, most = (
        timed.select(statistic).row(0, named=True) for statistic in (work.mean(), work.min(), work.max())
    )
    return Pace(model, mean, least, most)


def kv_used_frac() -> pl.Expr:
    """Return the share of KV blocks in use after a step; vLLM's null block counts as used."""
    return 1 - pl.col("kv_blocks_free_after") / pl.col("kv_blocks_total")


def _presence(timeline: Timeline) -> pl.DataFrame:
    """Return the number of running and refused requests over time."""
    refused = pl.col("state").is_in(QUEUED) & pl.col("cause").ne_missing(pl.lit(NEXT_STEP))
    runs = ~pl.col("state").is_in([*QUEUED, "front_end"])
    states = timeline.request_states.filter(refused | runs).select(
        "begin_us", "end_us", running=runs.cast(pl.Int64), waiting=refused.cast(pl.Int64)
    )
    return (
        level(states, running="running", waiting="waiting")
        .select(pl.col("at").alias("begin_us"), pl.col("until").alias("end_us"), "running", "waiting")
        .drop_nulls("end_us")
    )


def _mean(values: pl.Series) -> float | None:
    mean = values.drop_nulls().mean()
    return float(mean) if isinstance(mean, int | float) else None


PARTS = 60
"""Number of equal parts into which a run's time is divided."""


@dataclass
class RankLoads:
    """Work of the ranks of a run."""

    loads: pl.DataFrame
    """Table with a row per rank and part of the run: ``part``, ``begin_us``, ``rank``, mean numbers of
    ``running`` and ``waiting`` requests, and ``tokens`` of the steps that began in the part. Parts without
    any request are left out."""
    avoidable_us: dict[int, int]
    """Microseconds, by rank, in which its requests were refused although another rank had a free seat and
    refused none."""
    waited_us: dict[int, int]
    """Total time, by rank, in which its requests were refused, in microseconds."""

    def means(self) -> pl.DataFrame:
        """Return a row per rank: ``rank``, mean ``running`` and ``waiting`` requests over the parts."""
        return self.loads.group_by("rank").agg(pl.col("running", "waiting").mean()).sort("rank")


def rank_loads(ranks: list[RankSummary], offsets_us: dict[int, int]) -> RankLoads | None:
    """Return the loads of all ranks; None if no rank has a request.

    Args:
        ranks: Ranks of one run.
        offsets_us: Microseconds to add to each rank's times to convert them to a common clock.
    """
    spans = {
        rank.rank_number: rank.presence.with_columns(
            pl.col("begin_us", "end_us") + offsets_us[rank.rank_number]
        )
        for rank in ranks
    }
    present = [presence for presence in spans.values() if presence.height]
    if not present:
        return None
    begin = min(int(presence["begin_us"].min()) for presence in present)  # type: ignore[arg-type]  # a column of integers
    end = max(int(presence["end_us"].max()) for presence in present)  # type: ignore[arg-type]  # likewise
    room = _with_room(ranks, spans, begin, end)
    edges = [begin + (end - begin) * part // PARTS for part in range(PARTS + 1)]
    parts = pl.DataFrame({"part": range(PARTS), "begin_us": edges[:-1], "end_us": edges[1:]})
    parts = parts.filter(LENGTH_US > 0)
    counts = {name: pl.col(name) for name in ("running", "waiting")}
    means = [
        parts.hstack(time_within(parts, presence, counts)).select(
            *("part", "begin_us"),
            pl.lit(rank, pl.Int64).alias("rank"),
            *(pl.col(name) / LENGTH_US for name in counts),
        )
        for rank, presence in spans.items()
    ]
    tokens = _tokens(ranks, offsets_us, parts)
    loads = pl.concat(means).join(tokens, on=("part", "rank"), how="left", maintain_order="left")
    busy = (pl.col("running") + pl.col("waiting")).sum().over("part") > 0
    avoidable_us = {}  # time in which a rank refused requests while another had room
    for rank, presence in spans.items():
        waits = presence.filter(pl.col("waiting") > 0)
        within = time_within(waits, room, {"us": pl.col("room")})
        avoidable_us[rank] = int((within["us"] * waits["waiting"]).sum())
    return RankLoads(
        loads=loads.filter(busy).with_columns(pl.col("tokens").fill_null(0)),
        avoidable_us=avoidable_us,
        waited_us={
            rank: int((presence["waiting"] * presence.select(LENGTH_US).to_series()).sum())
            for rank, presence in spans.items()
        },
    )


def _tokens(ranks: list[RankSummary], offsets_us: dict[int, int], parts: pl.DataFrame) -> pl.DataFrame:
    """Return ``part``, ``rank`` and the ``tokens`` that the rank's steps computed in the part."""
    begins = parts.select("part", pl.col("begin_us").cast(pl.Int64)).sort("begin_us")
    return pl.concat(
        [
            rank.steps.select(pl.col("start_us") + offsets_us[rank.rank_number], tokens="used_tokens")
            .sort("start_us")
            .join_asof(begins, left_on="start_us", right_on="begin_us")
            .drop_nulls("part")
            .group_by("part", rank=pl.lit(rank.rank_number, pl.Int64))
            .agg(pl.col("tokens").sum())
            for rank in ranks
        ]
    )


def _with_room(
    ranks: list[RankSummary], spans: dict[int, pl.DataFrame], begin: int, end: int
) -> pl.DataFrame:
    """Return spans with ``room``: whether at least one rank has a free seat and refuses no request."""
    each = []
    for rank in ranks:
        presence = spans[rank.rank_number]
        full = (pl.col("waiting") > 0) | ((pl.col("running") >= rank.seats) if rank.seats else False)
        each += [
            pl.DataFrame({"begin_us": begin, "end_us": end, "open": 1}),
            presence.filter(full).select("begin_us", "end_us", open=pl.lit(-1, pl.Int64)),
        ]
    return (
        level(pl.concat(each), open="open")
        .select(begin_us="at", end_us="until", room=pl.col("open") > 0)
        .drop_nulls()
    )


SCHEMA = {
    "wave": pl.Int64,
    "step_counter": pl.Int64,
    "rank": pl.Int64,
    "trial": pl.Int64,
    "step": pl.Int64,
    "start_us": pl.Int64,
    "output_us": pl.Int64,
    "requests": pl.Int64,
    "prefill_tokens": pl.Int64,
    "decode_tokens": pl.Int64,
    "context_tokens": pl.Int64,
}


FEWEST_ALIKE, FEWEST_IDLE = 3, 30
"""Minimum number of passes of one size, both with and without an idle rank, for that size to be compared, and
minimum number of compared passes with an idle rank."""
LONGER_FRAC, MOST_SIZES = 0.1, 0.9
"""Minimum additional time of passes with an idle rank, as a share of the usual time, and minimum share of
these passes that have a size with additional time."""


class IdleExcess(NamedTuple):
    """Additional time of passes in which a rank has no request."""

    us: float
    """Sum over the passes, in microseconds."""
    frac: float
    """Additional time as a share of the time of as many passes in which every rank computes."""
    requests_us: float
    """Sum of the additional time over all requests that were computed in the passes."""


@dataclass
class RecordedRanks:
    """All ranks of one run together, without their timelines."""

    each: list[RankSummary]
    """Ranks in order of their number."""
    timeline: Callable[[int], Timeline]
    """Function that builds a rank's timeline again, for rules that examine a single rank."""

    @classmethod
    def from_timelines(cls, timelines: Iterable[Timeline]) -> Self:
        """Summarize timelines that are in memory."""
        by_rank = {timeline.rank: timeline for timeline in timelines}
        return cls([rank_of(timeline) for timeline in by_rank.values()], by_rank.__getitem__)

    @property
    def first_header(self) -> Header:
        """Header of the first rank; settings are the same for all."""
        return self.each[0].header

    @property
    def seats_per_rank(self) -> int:
        """Maximum number of running requests on one rank."""
        return self.each[0].seats

    @cached_property
    def offsets_us(self) -> dict[int, int]:
        """Microseconds to add to each rank's times to convert them to the clock of the first rank's trace."""
        return {rank: offset.us for rank, offset in self._offsets.items()}

    @cached_property
    def _offsets(self) -> dict[int, Offset]:
        return {rank.rank_number: offset(rank.header, self.first_header) for rank in self.each}

    @cached_property
    def hosts(self) -> int:
        """Number of hosts on which the ranks ran."""
        return len({rank.header.host for rank in self.each})

    @cached_property
    def uncertainty_us(self) -> int | None:
        """Largest error between the clocks of two ranks, in microseconds; None if unknown."""
        uncertainties_us = [
            offset.uncertainty_us for offset in self._offsets.values() if offset.uncertainty_us is not None
        ]
        return max(uncertainties_us) if len(uncertainties_us) == len(self._offsets) else None

    @cached_property
    def lockstep(self) -> bool:
        """Whether the ranks run in lock-step; False for a single rank or without a recorded step counter."""
        return len(self.each) > 1 and any(rank.in_lockstep for rank in self.each)

    @cached_property
    def missing_ranks(self) -> int:
        """Number of ranks in lock-step whose traces are missing; their effect on the others is unknown."""
        size = max(rank.header.data_parallel_size or 1 for rank in self.each)
        return max(0, size - len(self.each)) if self.lockstep else 0

    @cached_property
    def total_requests_us(self) -> int:
        """Total time of all requests on all ranks, in microseconds."""
        return sum(rank.requests_us for rank in self.each)

    @property
    def most_running(self) -> int:
        """Largest number of requests that ran at the same time on one rank."""
        return max(rank.most_running for rank in self.each)

    @cached_property
    def turns(self) -> pl.DataFrame:
        """Table with a row per rank and pass in which the rank computed requests, not a dummy batch.

        Columns, in order of ranks and their steps: ``wave``, ``step_counter``, ``rank``, ``trial``, ``step``;
        ``start_us`` and ``output_us`` on the common clock; ``requests``; ``prefill_tokens`` (including tokens
        that are recomputed after a preemption), ``decode_tokens`` and ``context_tokens``. Empty for
        independent ranks.
        """
        if not self.lockstep:
            return pl.DataFrame(schema=SCHEMA)
        return pl.concat([self._turns(rank) for rank in self.each])

    def _turns(self, rank: RankSummary) -> pl.DataFrame:
        later = self.offsets_us[rank.rank_number]
        return (
            rank.steps.filter(pl.col("wave").is_not_null())
            .with_columns(
                pl.col("start_us", "output_us") + later,
                rank=pl.lit(rank.rank_number, pl.Int64),
                prefill_tokens=pl.col("used_tokens") - pl.col("decode_tokens"),
            )
            .select(*SCHEMA)
        )

    @cached_property
    def passes(self) -> pl.DataFrame:
        """Table with a row per pass in which a rank computed something, in order.

        Columns: ``wave``, ``step_counter``, ``trial``; ``begin_us`` and ``end_us``: from the time when the
        last rank finished the previous pass (or from the first start, for the first pass of a wave and after
        passes of dummy batches only) to the time when the last rank finishes this one; ``length_us``;
        ``computing`` and ``prefilling``: numbers of ranks that compute and that prefill; ``largest`` and
        ``decoding``: the largest number of requests, and of possibly decoding requests, on a rank;
        ``requests``: the requests of all ranks; ``most_prefill``: the largest number of prefill tokens on a
        rank; ``most_context`` and ``context_tokens``: the largest number of context tokens on a rank, and
        those of all ranks.
        """
        of_wave = pl.col("wave")
        follows = (of_wave == of_wave.shift(1)) & (
            pl.col("step_counter") == pl.col("step_counter").shift(1) + 1
        )
        return (
            self.turns.group_by(*PASS)
            .agg(
                pl.col("trial").first(),
                first_us=pl.col("start_us").min(),
                end_us=pl.col("output_us").max(),
                computing=pl.len(),
                prefilling=(pl.col("prefill_tokens") > 0).sum(),
                largest=pl.col("requests").max(),
                decoding=pl.min_horizontal("requests", "decode_tokens").max(),
                requests=pl.col("requests").sum(),
                most_prefill=pl.col("prefill_tokens").max(),
                most_context=pl.col("context_tokens").max(),
                context_tokens=pl.col("context_tokens").sum(),
            )
            .sort(*PASS)
            .with_columns(begin_us=pl.when(follows).then(pl.col("end_us").shift(1)).otherwise("first_us"))
            .with_columns(length_us=pl.col("end_us") - pl.col("begin_us"))
            .filter(pl.col("length_us") > 0)
            .drop("first_us")
        )

    @cached_property
    def slow_passes(self) -> pl.DataFrame:
        """Passes that took far longer than the work of any rank explains, in order of time.

        Columns: ``PASS``; ``begin_us`` and ``end_us`` of the part beyond the expected time; ``factor``,
        ``place`` and ``trial``; ``kind``, ``period_steps`` and ``period_us`` as in ``events``. A pass is left
        out if interruptions in a rank's own trace cover at least half of that part. Empty if a rank's trace
        is missing.
        """
        passes = self.passes.with_row_index("step").with_columns(
            pl.col("step").cast(pl.Int64),
            device_us="length_us",
            device_end_us="end_us",
            overlap_us=0,
            used_tokens=pl.col("most_prefill") + pl.col("decoding"),
            prefill_tokens="most_prefill",
            decode_tokens="decoding",
            context_tokens="most_context",
        )
        slow = slow_on_device(passes.clear() if self.missing_ranks else passes)
        for rank in self.each:
            later_us = self.offsets_us[rank.rank_number]
            own = rank.interrupted.with_columns(pl.col("begin_us", "end_us") + later_us)
            slow = slow.filter(overlap_us(slow, own) < LENGTH_US / 2)
        place = pl.int_range(pl.len()).over("trial").alias("place")
        slow = slow.join(passes.select(*PASS, "step", place), on="step", maintain_order="left")
        by_kind = spans_by_kind(slow, begins=all(rank.begins for rank in self.each))
        unknown = slow.clear().with_columns(kind=pl.lit(""), period_steps=pl.lit(0.0), period_us=pl.lit(0.0))
        return pl.concat([unknown, *by_kind], how="diagonal_relaxed").drop("step", "part").sort("begin_us")

    @cached_property
    def passes_us(self) -> int:
        """Total time of all passes, in microseconds."""
        return int(self.passes["length_us"].sum())

    @cached_property
    def waves(self) -> pl.DataFrame:
        """Table with a row per wave and trial: ``passes`` and ``time_us`` from its first to its last work."""
        return self.passes.group_by("wave", "trial").agg(
            passes=pl.col("step_counter").max() - pl.col("step_counter").min() + 1,
            time_us=pl.col("end_us").max() - pl.col("begin_us").min(),
        )

    @cached_property
    def lockstep_us(self) -> int:
        """Total time from the first to the last computing pass of each wave and trial, in microseconds."""
        return int(self.waves["time_us"].sum())

    @cached_property
    def dummies(self) -> pl.DataFrame:
        """Table with a row per rank in lock-step: ``rank``, and number and time of its dummy batches.

        A pass counts if it lies between the first and the last pass of its wave and trial in which a rank
        computed something, and if this rank did not compute in it. Dummy batches that only end a wave are
        thus left out. A dummy batch lasts as long as its pass. Columns: ``rank``, ``batches``, ``time_us``.
        """
        whole, whole_us = int(self.waves["passes"].sum()), self.lockstep_us
        took = self.turns.select(*PASS, "rank").join(self.passes.select(*PASS, "length_us"), on=PASS)
        each = took.group_by("rank").agg(turns=pl.len(), own_us=pl.col("length_us").sum())
        ranks = pl.DataFrame({"rank": [rank.rank_number for rank in self.each]}).join(
            each, on="rank", how="left", maintain_order="left"
        )
        return ranks.select(
            "rank",
            batches=whole - pl.col("turns").fill_null(0).cast(pl.Int64),
            time_us=whole_us - pl.col("own_us").fill_null(0),
        )

    @cached_property
    def idle_excess(self) -> IdleExcess | None:
        """Additional time of passes while a rank has no request; None if it is zero, small or unknown.

        Passes without prefill are compared if they have the same number of requests on the fullest rank.
        """
        if self.missing_ranks or self.passes.is_empty():
            return None
        idle, length = pl.col("computing") < len(self.each), pl.col("length_us")
        sizes = (
            self.passes.filter(pl.col("prefilling") == 0)
            .group_by("largest")
            .agg(
                passes=idle.sum(),
                full=(~idle).sum(),
                usual_us=length.filter(~idle).median(),
                longer_us=length.filter(idle).median() - length.filter(~idle).median(),
                requests=pl.col("requests").filter(idle).mean(),
            )
            .filter(pl.min_horizontal("passes", "full") >= FEWEST_ALIKE)
        )
        sums = sizes.select(
            pl.col("passes").sum(),
            shows=pl.col("passes").filter(pl.col("longer_us") > 0).sum(),
            us=(pl.col("passes") * pl.col("longer_us")).sum(),
            usual_us=(pl.col("passes") * pl.col("usual_us")).sum(),
            requests_us=(pl.col("passes") * pl.col("longer_us") * pl.col("requests")).sum(),
        ).row(0, named=True)
        shown = sums["passes"] >= FEWEST_IDLE and sums["shows"] >= MOST_SIZES * sums["passes"]
        if not shown or sums["us"] < LONGER_FRAC * sums["usual_us"]:
            return None
        return IdleExcess(sums["us"], sums["us"] / sums["usual_us"], sums["requests_us"])

    @cached_property
    def prefill_stalls(self) -> PrefillStalls | None:
        """Time that ranks in lock-step waited for prefills of other ranks; None if unknown."""
        if self.missing_ranks or not self.lockstep:
            return None
        lost = self.slow_passes.select(*PASS, lost_us=LENGTH_US)
        usual = self.passes.join(lost, on=PASS, how="left", maintain_order="left")
        usual = usual.with_columns(pl.col("length_us") - pl.col("lost_us").fill_null(0)).drop("lost_us")
        return measure_prefill_stalls(usual, self.turns)

    @cached_property
    def loads(self) -> RankLoads | None:
        """Loads of the ranks over time; None if no rank has a request."""
        return rank_loads(self.each, self.offsets_us)
