"""How many requests each rank of a run has over time, and who waited on one while another had room."""

from dataclasses import dataclass

import polars as pl

from schedtrace.timeline.pieces import LENGTH_US
from schedtrace.timeline.rank import Rank
from schedtrace.timeline.spans import level, time_within

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
