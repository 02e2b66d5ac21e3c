"""Split of the requests' time into parts that add up to 100 %, which a report shows first."""

from collections.abc import Sequence
from itertools import pairwise

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.model.report import EngineTime, RequestTime, TimePart
from schedtrace.timeline.charges import CHARGES, OF_KV
from schedtrace.timeline.engine_states import BUSY, STATES, with_engine_time
from schedtrace.timeline.events import DEVICE, INTERRUPTED, STARVED
from schedtrace.timeline.frames import RECORDED
from schedtrace.timeline.pieces import NEXT_STEP
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.spans import LENGTH_US, merged, overlap_us, total_us, until
from schedtrace.timeline.timeline import Timeline

COMPUTING = ("prefill", "decode", "recompute")


def time_split(engines: Sequence[pl.DataFrame]) -> list[TimePart]:
    """Return the parts of all requests' time, the largest first; empty without requests.

    Args:
        engines: ``engine_split`` of each engine.
    """
    rows = pl.concat(engines)
    total = int(rows["us"].sum())
    if not total:
        return []
    sums = rows.group_by("part", "cause").agg(pl.col("us").sum()).filter(pl.col("us") > 0)
    ordered = sums.sort("us", "part", "cause", descending=[True, False, False], nulls_last=True)
    return [
        TimePart(part=part, cause=cause, time_ms=us / 1e3, share_frac=us / total)
        for part, cause, us in ordered.iter_rows()
    ]


def engine_split(timeline: Timeline) -> pl.DataFrame:
    """Return one row per ``part`` and ``cause`` with its ``us``; waits are listed by their charges.

    The host's time is a separate part, not included in the others.
    """
    states = with_engine_time(timeline.recorded_states, timeline.engine_states)
    computing = pl.col("state").is_in(COMPUTING)
    next_step = pl.col("cause").eq_missing(pl.lit(NEXT_STEP))
    own = computing | next_step
    taken = pl.when(own).then(overlap_us(states, timeline.host_spans))
    on_its_way = pl.col("state") == "front_end"
    delayed = pl.when(on_its_way).then(overlap_us(_at_the_engine(timeline, states), timeline.host_spans))
    waited_for_processor = merged(timeline.events.filter(kind=STARVED, part=DEVICE))
    starved = pl.when(own).then(overlap_us(states, waited_for_processor)).otherwise(0)
    states = states.with_columns(lost_us=pl.coalesce(taken, delayed, 0), starved_us=starved)
    host = pl.when(computing).then(pl.max_horizontal("host_us", "lost_us")).otherwise(0)
    none = pl.lit(None, pl.String)
    rest = states.filter(next_step | ~pl.col("state").is_in([*QUEUED, "stalled"]))
    charged = timeline.charges.filter(pl.col("state") != "recompute")
    of_charge = pl.when(pl.col("charge").is_in([*CHARGES])).then("cause").otherwise("charge")
    interrupted = pl.col("charge") == INTERRUPTED
    of_charge = pl.when(interrupted).then(pl.lit(None, pl.String)).otherwise(of_charge)
    of_kv = pl.col("cause").is_in([str(cause) for cause in OF_KV])
    parts = [
        charged.with_columns(cause=of_charge).select(
            part=pl.when(pl.col("charge") == INTERRUPTED)
            .then(pl.lit(INTERRUPTED))
            .when(pl.col("state") == "stalled")
            .then("state")
            .otherwise(pl.lit("waiting")),
            cause=pl.when(of_kv).then(pl.lit(str(Cause.KV_BLOCKS))).otherwise("cause"),
            us="time_us",
        ),
        rest.select(
            part=pl.when(next_step).then("cause").otherwise("state"),
            cause=none,
            us=LENGTH_US - pl.max_horizontal(host, "lost_us") - pl.col("starved_us"),
        ),
        states.filter(computing).select(
            part=pl.lit("between_steps"), cause=none, us=host - pl.col("lost_us")
        ),
        states.select(part=pl.lit(INTERRUPTED), cause=none, us=pl.col("lost_us") + pl.col("starved_us")),
    ]
    rows = pl.concat([part.cast({"us": pl.Int64}) for part in parts])
    return rows.group_by("part", "cause").agg(pl.col("us").sum())


def _at_the_engine(timeline: Timeline, states: pl.DataFrame) -> pl.DataFrame:
    """Return the rows, each from the moment at which the engine's process received the request.

    A row is empty if that moment is not recorded.
    """
    received = timeline.first_arrivals[["request_id", "received_us"]]
    begin = pl.max_horizontal("begin_us", pl.min_horizontal("received_us", "end_us"))
    received_states = states.join(received, on="request_id", how="left", maintain_order="left")
    return received_states.select(begin_us=begin, end_us="end_us")


STRIP_CELLS = 40


def request_time(timeline: Timeline) -> list[RequestTime]:
    """Return the time of all requests by state and cause, the longest first, with interruptions cut out."""
    states = timeline.interrupted_states.filter(RECORDED)
    total = total_us(states)
    if not total:
        return []
    starts = timeline.steps["start_us"].drop_nulls().to_list()
    cells = min(STRIP_CELLS, len(starts))  # equal parts of the run's steps
    moments = [starts[cell * len(starts) // cells] for cell in range(cells)] + [timeline.end_us]
    everything = _between(states, moments)
    times = []
    for rows in states.partition_by("state", "cause", maintain_order=True):
        time_us = total_us(rows)
        parts = zip(_between(rows, moments), everything, strict=True)
        times.append(
            RequestTime(
                engine_rank=timeline.rank,
                state=rows["state"][0],
                cause=rows["cause"][0],
                time_ms=time_us / 1e3,
                share_frac=time_us / total,
                requests=rows["request_id"].n_unique(),
                strip=[part / whole if whole else 0.0 for part, whole in parts],
            )
        )
    return sorted(times, key=lambda share: (-share.time_ms, share.state, share.cause or ""))


def engine_time(timeline: Timeline) -> list[EngineTime]:
    """Return the states of the engine that occurred."""
    spent = dict(timeline.engine_states.group_by("state").agg(LENGTH_US.sum().alias("us")).iter_rows())
    busy = sum(us for state, us in spent.items() if state in BUSY)
    return [
        EngineTime(
            engine_rank=timeline.rank,
            state=state,
            time_ms=spent[state] / 1e3,
            busy_frac=spent[state] / busy if state in BUSY else None,
        )
        for state in STATES
        if spent.get(state)
    ]


def _between(rows: pl.DataFrame, moments: list[int]) -> list[float]:
    return [after - before for before, after in pairwise(until(rows, moments))]
