"""Where the requests' time went, as parts that add up: what a report shows first."""

from collections.abc import Sequence

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.model.report import TimePart
from schedtrace.timeline.charges import CHARGES, INTERRUPTED, OF_KV
from schedtrace.timeline.engine_states import with_engine_time
from schedtrace.timeline.events import interrupted_us
from schedtrace.timeline.pieces import LENGTH_US
from schedtrace.timeline.request_states import NEXT_STEP, QUEUED
from schedtrace.timeline.timeline import Timeline

COMPUTING = ("prefill", "decode", "recompute")


def time_split(engines: Sequence[pl.DataFrame]) -> list[TimePart]:
    """The parts of all requests' time, the largest first; none without requests.

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
    """One row per ``part`` and ``cause`` with its ``us``: waits by what they are charged to.

    The rest is without the host's time, which is a part of its own.
    """
    states = with_engine_time(timeline.request_states, timeline.engine_states)
    computing = pl.col("state").is_in(COMPUTING)
    next_step = pl.col("cause").eq_missing(pl.lit(NEXT_STEP))
    lost = pl.when(computing | next_step).then(interrupted_us(timeline, states)).otherwise(0)
    states = states.with_columns(lost_us=lost)
    host = pl.when(computing).then(pl.max_horizontal("host_us", "lost_us")).otherwise(0)
    none = pl.lit(None, pl.String)
    others = states.filter(next_step | ~pl.col("state").is_in([*QUEUED, "stalled"]))
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
        others.select(
            part=pl.when(next_step).then("cause").otherwise("state"),
            cause=none,
            us=LENGTH_US - pl.max_horizontal(host, "lost_us"),
        ),
        states.filter(computing).select(
            part=pl.lit("between_steps"), cause=none, us=host - pl.col("lost_us")
        ),
        states.select(part=pl.lit(INTERRUPTED), cause=none, us="lost_us"),
    ]
    rows = pl.concat([part.cast({"us": pl.Int64}) for part in parts])
    return rows.group_by("part", "cause").agg(pl.col("us").sum())
