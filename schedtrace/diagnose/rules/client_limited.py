"""``client-limited``: the client keeps a fixed number of requests open, fewer than the engine would take."""

import polars as pl

from schedtrace.model.facts import Fact
from schedtrace.model.message import Count, Share, message
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.timeline.timeline import Timeline

CODE = "client-limited"
SUMMARY = "the client keeps a fixed number of requests open, fewer than the engine would take"
NEEDS = (Fact.TIMES, Fact.LIVES)

MOST_FRAC = 0.5
"""More than half of the time so many are open, and most arrivals follow a finish at once."""
FOLLOWS_FRAC = 0.8
FEWEST_TURNS = 3
"""Arrivals per open request: fewer show no pattern."""


class OpenRequests(Evidence, kw_only=True):
    """How many requests were open."""

    open_requests: int
    of_time_frac: float
    following_frac: float


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/client-limited.md``."""
    evidence = _evidence(timeline)
    if evidence is None:
        return []
    level = Count(evidence.open_requests, "request")
    return [
        Finding(
            code=CODE,
            title=message("The client sends too little"),
            verdict=message(
                "The client is the limit: it keeps {level} open and sends the next one when one ends; the "
                "engine has {seats} and nothing waited for a limit.",
                level=level,
                seats=Count(timeline.seats, "seat"),
            ),
            severity="info",
            cause=None,
            via="recorded",
            engine_rank=timeline.rank,
            count=timeline.steps.height,
            trials=[],
            steps=[],
            tokens=0,
            message=message(
                "{level} were open for {share} of the busy time; {following} of the later requests came "
                "within a step of another one's end. The pattern is a hint: the trace does not see the "
                "client.",
                level=level,
                share=Share(evidence.of_time_frac),
                following=Share(evidence.following_frac),
            ),
            advice=[
                Advice(message=message("more connections, or a higher concurrency, to load this engine"))
            ],
            evidence=evidence,
        )
    ]


def _evidence(timeline: Timeline) -> OpenRequests | None:
    """None unless the client keeps a number of requests open.

    Regular arrivals look alike, so each arrival also has to follow a finish within one step.
    """
    came = timeline.arrivals.filter(~pl.col("streaming_update")).select(
        "trial", us=pl.coalesce("arrived_us", "queued_us")
    )
    gone = timeline.finishes.select(us="finished_us")
    if came.is_empty() or gone.is_empty():
        return None
    changes = (
        pl.concat([came.select("us", change=pl.lit(1)), gone.with_columns(change=pl.lit(-1))])
        .group_by("us")
        .agg(pl.col("change").sum())
        .sort("us")
        .with_columns(open=pl.col("change").cum_sum(), us_long=pl.col("us").shift(-1) - pl.col("us"))
        .drop_nulls()
        .filter(pl.col("open") > 0)
    )
    total = int(changes["us_long"].sum())
    if not total:
        return None
    most = changes.group_by("open").agg(pl.col("us_long").sum()).sort("us_long", "open", descending=True)
    level, time_us = most.row(0)
    later = came.sort("us").filter(pl.int_range(pl.len()).over("trial") >= level)  # a trial begins anew
    if (
        time_us <= MOST_FRAC * total
        or later.height < FEWEST_TURNS * level
        or level >= (timeline.seats or level + 1)
    ):
        return None
    step_us = float(timeline.steps.select((pl.col("output_us") - pl.col("start_us")).median()).item() or 0)
    follows = later.join_asof(gone.sort("us").with_columns(gone_us="us"), on="us").select(
        soon=(pl.col("us") - pl.col("gone_us")) <= step_us
    )
    following = float(follows["soon"].fill_null(value=False).mean() or 0)  # type: ignore[arg-type]  # booleans
    if following < FOLLOWS_FRAC:
        return None
    return OpenRequests(open_requests=int(level), of_time_frac=time_us / total, following_frac=following)
