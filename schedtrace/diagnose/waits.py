"""Facts that findings about waits share: the requests of a charge, their times, and its steps."""

from dataclasses import dataclass

import msgspec
import polars as pl

from schedtrace.timeline.spans import steps_of
from schedtrace.timeline.timeline import Timeline

FOUND_FROM_FRAC = 0.01
"""Least share of the requests' time; less does not affect any of their latencies."""


@dataclass(frozen=True)
class Charged:
    """Time that is charged to some causes."""

    rows: pl.DataFrame
    """Rows of ``timeline.charges``."""
    time_us: int
    share_frac: float
    """Share of all requests' time."""
    requests: int
    """Number of requests that waited for it, or recomputed tokens."""
    longest_us: int
    longest_id: str
    """Request with the longest of these waits, added up."""
    steps: pl.DataFrame
    """Steps of ``timeline.steps`` in which the requests waited."""


def charged(timeline: Timeline, *charges: str) -> Charged | None:
    """Return the time charged to these causes; None below ``FOUND_FROM_FRAC`` of the requests' time."""
    time_us = sum(timeline.charged_us.get(str(charge), 0) for charge in set(charges))
    if not timeline.requests_us or time_us / timeline.requests_us < FOUND_FROM_FRAC:
        return None
    rows = timeline.charges.filter(pl.col("charge").is_in([str(charge) for charge in charges]))
    each = totals(rows, "time_us")
    return Charged(
        rows=rows,
        time_us=time_us,
        share_frac=time_us / timeline.requests_us,
        requests=each.height,
        longest_us=int(each["time_us"][0]),
        longest_id=str(each["request_id"][0]),
        steps=steps_of(timeline.steps, rows),
    )


def totals(rows: pl.DataFrame, amount: str, by: str = "request_id") -> pl.DataFrame:
    """Return the sum of an amount for each request, or another key: the largest first."""
    return rows.group_by(by).agg(pl.col(amount).sum()).sort(amount, by, descending=[True, False])


class ClassTime(msgspec.Struct, kw_only=True):
    """Time of one priority class in some steps."""

    priority: int
    """Priority; lower is more urgent."""
    running: float
    """Mean number of its requests that got tokens."""


def running_classes(timeline: Timeline, steps: pl.DataFrame) -> list[ClassTime]:
    """Return the priority classes of requests that got tokens in these steps, the most urgent first."""
    asked = timeline.known_requests[["request_id", "priority"]]
    ran = timeline.request_states.filter(pl.col("tokens") > 0).join(asked, on="request_id")
    inside = ran.with_columns(steps=steps_inside(ran, steps))
    each = inside.group_by("priority").agg(pl.col("steps").sum()).sort("priority")
    return [
        ClassTime(priority=priority, running=count / max(1, steps.height))
        for priority, count in each.iter_rows()
        if count
    ]


def steps_inside(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.Series:
    """Return the number of these steps that each row with ``begin_step`` and ``end_step`` covers."""
    numbers = steps["step"]
    first = numbers.search_sorted(rows["begin_step"], side="left").cast(pl.Int64)
    last = numbers.search_sorted(rows["end_step"], side="right").cast(pl.Int64)
    return pl.Series(last - first).clip(0)


def mean(rows: pl.DataFrame, value: pl.Expr) -> float | None:
    """Return the mean over the rows that have a value."""
    average = rows.select(value.cast(pl.Float64).mean()).item()
    return None if average is None else float(average)
