"""What all ranks of a run together need of one: a few numbers a step, so that its timeline may be let go.

Of these also how many requests each has over time, and who waited on one while another had room.
"""

from dataclasses import dataclass

import polars as pl

from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.request_states import NEXT_STEP, QUEUED
from schedtrace.timeline.spans import LENGTH_US, level, time_within
from schedtrace.timeline.step_time import FEATURES, StepTime, fit_step_time
from schedtrace.timeline.timeline import Timeline

PASS = ("wave", "step_counter")
"""What the steps of all ranks of one pass of a lock-step run have in common."""
STEPS = ("wave", "step_counter", "trial", "step", "start_us", "output_us")
"""Columns of ``Timeline.steps`` that ``Rank.steps`` has as they are; null where a record lacks them."""


BEYOND = 1.5
"""A half more than the most of a feature: so far a model of step times is believed."""


@dataclass(frozen=True)
class Pace:
    """How long the steps of one rank take for their work."""

    model: StepTime
    """Of its time on the device."""
    work: dict[str, float]
    """Mean of each of ``FEATURES`` over its steps."""
    least: dict[str, float]
    most: dict[str, float]
    """The range of each."""

    def knows(self, work: dict[str, float]) -> bool:
        """Whether its steps had about as much of each feature: far beyond, a model guesses."""
        return all(self.least[name] / BEYOND <= work[name] <= self.most[name] * BEYOND for name in FEATURES)

    def expected_us(self, work: dict[str, float]) -> float:
        """What a step with this work takes on the rank."""
        return float(pl.DataFrame(work).select(self.model.predicted()).item())


@dataclass(frozen=True)
class Rank:
    """One rank, on its own clock."""

    header: Header
    facts: frozenset[Fact]
    seats: int
    """As ``Timeline.seats``."""
    requests_us: int
    """All its requests' time."""
    most_running: int
    """Requests that ran at a time, at most."""
    steps: pl.DataFrame
    """One row per step that computed something: ``STEPS``, ``requests``, ``used_tokens``, ``decode_tokens``.
    All are integers of 64 bits."""
    presence: pl.DataFrame
    """Spans with ``begin_us``, ``end_us``, ``running`` and ``waiting`` requests, without gaps."""
    arrived: int
    """Requests that reached its scheduler."""
    pinned: int
    """Of these: the client asked for this rank."""
    mean_prompt_tokens: float | None
    """Of those that arrived; None: none did."""
    mean_output_tokens: float | None
    """Of those that ended; None: none did."""
    kv_used_frac: float | None
    """Mean share of the KV blocks in use after its steps; None: not recorded."""
    pace: Pace | None = None
    """None: too few steps tell it."""

    @property
    def number(self) -> int:
        """Data-parallel rank."""
        return self.header.engine_rank

    @property
    def in_lockstep(self) -> bool:
        """Whether its steps have the counter that ranks in lock-step share."""
        return self.steps["wave"].count() > 0


def rank_of(timeline: Timeline) -> Rank:
    """Take from a timeline what all ranks together need."""
    steps = timeline.steps
    came = timeline.first_arrivals
    most = steps["num_running_after"].max()
    return Rank(
        header=timeline.header,
        facts=timeline.facts,
        seats=timeline.seats,
        requests_us=timeline.requests_us,
        most_running=most if isinstance(most, int) else 0,
        steps=_steps(steps),
        presence=_presence(timeline),
        arrived=came.height,
        pinned=came["pinned_rank"].count() if "pinned_rank" in came.columns else 0,
        mean_prompt_tokens=_mean(came["prompt_tokens"]),
        mean_output_tokens=_mean(timeline.finishes["output_tokens"]),
        kv_used_frac=_mean(steps.select(kv_used_frac()).to_series()),
        pace=_pace(steps),
    )


def _pace(steps: pl.DataFrame) -> Pace | None:
    timed = (
        steps.filter(pl.col("total_requests") > 0)
        .with_columns(busy_us=pl.coalesce("execute_us", "busy_us"))
        .drop_nulls(["busy_us", *FEATURES])
    )
    model = fit_step_time(timed)
    if model is None:
        return None
    work = pl.col(*FEATURES).cast(pl.Float64)
    mean, least, most = (
        timed.select(one).row(0, named=True) for one in (work.mean(), work.min(), work.max())
    )
    return Pace(model, mean, least, most)


def kv_used_frac() -> pl.Expr:
    """Share of the KV blocks that are in use after a step: a block less than vLLM has is the null block."""
    return 1 - pl.col("kv_blocks_free_after") / pl.col("kv_blocks_total")


def _steps(steps: pl.DataFrame) -> pl.DataFrame:
    known = [pl.col(name) if name in steps.columns else pl.lit(None).alias(name) for name in STEPS]
    computing = steps.filter(pl.col("total_requests") > 0)
    return computing.select(*known, "used_tokens", "decode_tokens", requests=pl.col("total_requests")).cast(
        pl.Int64
    )


def _presence(timeline: Timeline) -> pl.DataFrame:
    """``waiting`` requests were refused, so one that no step could see yet is neither running nor waiting."""
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
"""Equal parts that a run's time is looked at in."""


@dataclass
class RankLoads:
    """What the ranks of a run had to do."""

    loads: pl.DataFrame
    """One row per part of the run and rank: ``part``, ``begin_us``, ``rank``, mean ``running`` and
    ``waiting`` requests, and ``tokens`` of the steps that began in it. Parts in which no rank had a request
    are left out."""
    avoidable_us: dict[int, int]
    """Rank to the time that its requests were refused while another rank had a seat and nobody waiting."""
    waited_us: dict[int, int]
    """Rank to all the time that its requests were refused."""

    def means(self) -> pl.DataFrame:
        """One row per rank: ``rank``, and mean ``running`` and ``waiting`` requests over these parts."""
        return self.loads.group_by("rank").agg(pl.col("running", "waiting").mean()).sort("rank")


def rank_loads(ranks: list[Rank], offsets_us: dict[int, int]) -> RankLoads | None:
    """The loads of all ranks; None where none has a request.

    Args:
        ranks: Of one run.
        offsets_us: What to add to each rank's times to have them on one clock.
    """
    spans = {
        rank.number: rank.presence.with_columns(pl.col("begin_us", "end_us") + offsets_us[rank.number])
        for rank in ranks
    }
    every = [one for one in spans.values() if one.height]
    if not every:
        return None
    begin = min(int(one["begin_us"].min()) for one in every)  # type: ignore[arg-type]  # a column of integers
    end = max(int(one["end_us"].max()) for one in every)  # type: ignore[arg-type]  # likewise
    room = _with_room(ranks, spans, begin, end)
    edges = [begin + (end - begin) * part // PARTS for part in range(PARTS + 1)]
    parts = pl.DataFrame({"part": range(PARTS), "begin_us": edges[:-1], "end_us": edges[1:]})
    parts = parts.filter(LENGTH_US > 0)
    loads = pl.concat([_means(parts, one, rank) for rank, one in spans.items()]).join(
        _tokens(ranks, offsets_us, parts), on=("part", "rank"), how="left", maintain_order="left"
    )
    busy = (pl.col("running") + pl.col("waiting")).sum().over("part") > 0
    return RankLoads(
        loads=loads.filter(busy).with_columns(pl.col("tokens").fill_null(0)),
        avoidable_us={rank: _waiting_us(one, room) for rank, one in spans.items()},
        waited_us={
            rank: int((one["waiting"] * one.select(LENGTH_US).to_series()).sum())
            for rank, one in spans.items()
        },
    )


def _means(parts: pl.DataFrame, spans: pl.DataFrame, rank: int) -> pl.DataFrame:
    counts = {name: pl.col(name) for name in ("running", "waiting")}
    spent = time_within(parts, spans, counts)
    means = [pl.col(name) / LENGTH_US for name in counts]
    return pl.concat([parts, spent], how="horizontal").select(
        "part", "begin_us", pl.lit(rank, pl.Int64).alias("rank"), *means
    )


def _tokens(ranks: list[Rank], offsets_us: dict[int, int], parts: pl.DataFrame) -> pl.DataFrame:
    """``part``, ``rank`` and ``tokens`` that its steps computed."""
    begins = parts.select("part", pl.col("begin_us").cast(pl.Int64)).sort("begin_us")
    return pl.concat(
        [
            rank.steps.select(pl.col("start_us") + offsets_us[rank.number], tokens="used_tokens")
            .sort("start_us")
            .join_asof(begins, left_on="start_us", right_on="begin_us")
            .drop_nulls("part")
            .group_by("part", rank=pl.lit(rank.number, pl.Int64))
            .agg(pl.col("tokens").sum())
            for rank in ranks
        ]
    )


def _with_room(ranks: list[Rank], spans: dict[int, pl.DataFrame], begin: int, end: int) -> pl.DataFrame:
    """Spans in which at least one rank has a free seat and refuses nobody."""
    each = []
    for rank in ranks:
        one = spans[rank.number]
        full = (pl.col("waiting") > 0) | ((pl.col("running") >= rank.seats) if rank.seats else False)
        each += [
            pl.DataFrame({"begin_us": begin, "end_us": end, "open": 1}),
            one.filter(full).select("begin_us", "end_us", open=pl.lit(-1, pl.Int64)),
        ]
    return (
        level(pl.concat(each), open="open")
        .select(begin_us="at", end_us="until", room=pl.col("open") > 0)
        .drop_nulls()
    )


def _waiting_us(spans: pl.DataFrame, room: pl.DataFrame) -> int:
    """Time that requests of a rank were refused in, while another had room."""
    waits = spans.filter(pl.col("waiting") > 0)
    within = time_within(waits, room, {"us": pl.col("room")})
    return int((within["us"] * waits["waiting"]).sum())
