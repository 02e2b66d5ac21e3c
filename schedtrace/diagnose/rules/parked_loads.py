"""``parked-loads``: requests that wait for KV blocks from elsewhere hold the KV cache meanwhile."""

from typing import TypedDict

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import kv_space
from schedtrace.diagnose.rules.common import Waited, advise, wait_figures, wait_finding
from schedtrace.diagnose.waits import charged, mean
from schedtrace.model.causes import Cause
from schedtrace.model.message import NOTHING
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.charges import PARKED_LOADS
from schedtrace.timeline.spans import level
from schedtrace.timeline.timeline import Timeline


class ParkedLoads(Waited, kw_only=True):
    """Parked requests and what they hold."""

    parked: float | None
    """Mean number of parked requests in these steps."""
    running: float | None
    """Mean number of running requests in these steps."""
    parked_blocks: int | None
    """Most KV blocks that parked requests held at once; None: the trace does not record loads."""
    parked_requests: int | None
    """Most requests that were parked at once; None likewise."""
    blocks_total: int | None
    """KV blocks of the cache."""
    oldest_ms: float | None
    """Longest time from a load's begin to its arrival, or to the trace's end; None likewise."""


def _find(timeline: Timeline) -> Findings:
    waits = charged(timeline, PARKED_LOADS)
    if waits is None:
        return
    evidence = ParkedLoads(
        **wait_figures(waits),
        parked=mean(waits.steps, pl.col("kv_loads_parked")),
        running=mean(waits.steps, pl.col("num_running_after")),
        blocks_total=timeline.header.kv_blocks_total,
        **_parked(timeline),
    )
    total = evidence.blocks_total or 0
    held = (
        "Parked requests held {parked_blocks:n} of {usable:n} usable blocks at most"
        "[; the longest load took {oldest_ms:ms}]."
    )
    yield wait_finding(
        timeline,
        waits,
        evidence=evidence,
        title="KV transfers hold the cache",
        verdict="KV blocks held for transfers limit this run: requests spent {share:%} of their time "
        "waiting for KV blocks while {mean_parked:n request} waited for KV from elsewhere and "
        "{mean_running:n} ran.",
        holder=NOTHING if evidence.parked_blocks is None else held,
        cause=Cause.REMOTE_KV_PENDING,
        message="{requests:n request} waited, {longest_request:id} the longest ({longest_ms:ms}). Why "
        "the other side is not ready is not known in this process: its own trace, matched by the "
        "transfer, would show it.",
        values={
            "mean_parked": round(evidence.parked or 0),
            "mean_running": round(evidence.running or 0),
            "usable": total - 1 if total else None,
            "longest_request": waits.longest_id,
            "longest_ms": waits.longest_us / 1e3,
        },
        advice=[
            advise("look at the KV connector's other side: its transfers take too long"),
            advise(
                "{space}: {blocks:n block} instead of {total:n}, as room for parked requests",
                setting="num_gpu_blocks_override",
                value=2 * total or None,
                space=kv_space(timeline, 2 * total or None),
                blocks=2 * total,
                total=total,
            ),
        ],
    )


class Parked(TypedDict):
    """Figures of parked loads; None: the trace does not record loads."""

    parked_blocks: int | None
    parked_requests: int | None
    oldest_ms: float | None


def _parked(timeline: Timeline) -> Parked:
    """Return the most blocks and requests that were parked at once, and the longest that a load took."""
    nothing = Parked(parked_blocks=None, parked_requests=None, oldest_ms=None)
    if "kv_loads" not in timeline.lists:
        return nothing
    loads = timeline.lists["kv_loads"].select("request_id", "event", "at_us", "blocks").collect()
    begun = loads.filter(pl.col("event") == "begun").unique("request_id", keep="first")
    if begun.is_empty():
        return nothing
    over = loads.filter(pl.col("event") != "begun").group_by("request_id").agg(over_us=pl.col("at_us").max())
    spans = begun.join(over, on="request_id", how="left").with_columns(
        pl.col("over_us").fill_null(timeline.end_us), held=pl.col("blocks").list.sum().fill_null(0)
    )
    parked = level(spans, "at_us", "over_us", blocks="held", requests=1)
    oldest_us = spans.select((pl.col("over_us") - pl.col("at_us")).max()).item()
    blocks, requests = parked.select(pl.col("blocks", "requests").max().fill_null(0)).row(0)
    return Parked(parked_blocks=blocks, parked_requests=requests, oldest_ms=oldest_us / 1e3)


RULE = Rule(
    code="parked-loads",
    summary="requests that wait for KV blocks from elsewhere held the KV cache",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES, Fact.BLOCKS}),
    find=_find,
    charges=(PARKED_LOADS,),
    specific=True,
    proven=(("remote_kv_pending", "num_gpu_blocks_override"),),
)
