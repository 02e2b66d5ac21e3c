"""``parked-loads``: requests that wait for KV blocks from elsewhere hold the KV cache meanwhile."""

import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.allowed import kv_space
from schedtrace.diagnose.rules.common import wait_finding
from schedtrace.diagnose.waits import charged, mean
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline.charges import PARKED_LOADS
from schedtrace.timeline.spans import level
from schedtrace.timeline.timeline import Timeline

CODE = "parked-loads"
CHARGES = (PARKED_LOADS,)


class ParkedLoads(Evidence, kw_only=True):
    """Parked requests and what they hold."""

    share_frac: float
    wait_ms: float
    requests: int
    parked: float | None
    running: float | None
    parked_blocks: int | None
    parked_requests: int | None
    blocks_total: int | None
    oldest_ms: float | None


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/parked-loads.md``."""
    waits = charged(timeline, *CHARGES)
    if waits is None:
        return []
    blocks, requests, oldest_us = _parked(timeline)
    evidence = ParkedLoads(
        share_frac=waits.share_frac,
        wait_ms=waits.time_us / 1e3,
        requests=waits.requests,
        parked=mean(waits.steps, pl.col("kv_loads_parked")),
        running=mean(waits.steps, pl.col("num_running_after")),
        parked_blocks=blocks,
        parked_requests=requests,
        blocks_total=timeline.header.kv_blocks_total,
        oldest_ms=None if oldest_us is None else oldest_us / 1e3,
    )
    return [
        wait_finding(
            timeline,
            waits,
            code=CODE,
            title=say("KV transfers hold the cache"),
            verdict=say(
                "KV blocks held for transfers limit this run: requests spent {share:%} of their time "
                "waiting for KV blocks while {parked:n request} waited for KV from elsewhere and "
                "{running:n} ran.",
                share=waits.share_frac,
                parked=round(evidence.parked or 0),
                running=round(evidence.running or 0),
            ),
            holder=_holder(evidence),
            cause=Cause.REMOTE_KV_PENDING,
            message=say(
                "{requests:n request} waited, {longest:id} the longest ({wait:us}). Why the other "
                "side is not ready is not known in this process: its own trace, matched by the "
                "transfer, would show it.",
                requests=waits.requests,
                longest=waits.longest_id,
                wait=waits.longest_us,
            ),
            advice=[
                Advice(message=say("look at the KV connector's other side: its transfers take too long")),
                Advice(
                    message=say(
                        "{space}: {blocks:n block} instead of {total:n}, as room for parked requests",
                        space=kv_space(timeline, 2 * (evidence.blocks_total or 0) or None),
                        blocks=2 * (evidence.blocks_total or 0),
                        total=evidence.blocks_total or 0,
                    ),
                    setting="num_gpu_blocks_override",
                    value=2 * (evidence.blocks_total or 0) or None,
                ),
            ],
            evidence=evidence,
        )
    ]


def _holder(evidence: ParkedLoads) -> Message:
    if evidence.parked_blocks is None:
        return NOTHING
    oldest = NOTHING
    if evidence.oldest_ms is not None:
        oldest = say("; the longest load took {age:us}", age=1e3 * evidence.oldest_ms)
    return say(
        "Parked requests held {blocks:n} of {total:n} usable blocks at most{oldest}.",
        blocks=evidence.parked_blocks,
        total=evidence.blocks_total - 1 if evidence.blocks_total else None,
        oldest=oldest,
    )


def _parked(timeline: Timeline) -> tuple[int | None, int | None, int | None]:
    """Most blocks and requests parked at once, and the longest that a load took, in microseconds."""
    if "kv_loads" not in timeline.lists:
        return None, None, None
    loads = timeline.lists["kv_loads"].select("request_id", "event", "at_us", "blocks").collect()
    begun = loads.filter(pl.col("event") == "begun").unique("request_id", keep="first")
    if begun.is_empty():
        return None, None, None
    over = loads.filter(pl.col("event") != "begun").group_by("request_id").agg(over_us=pl.col("at_us").max())
    spans = begun.join(over, on="request_id", how="left").with_columns(
        pl.col("over_us").fill_null(timeline.end_us), held=pl.col("blocks").list.sum().fill_null(0)
    )
    parked = level(spans, "at_us", "over_us", blocks="held", requests=1)
    age = spans.select((pl.col("over_us") - pl.col("at_us")).max()).item()
    return int(parked["blocks"].max() or 0), int(parked["requests"].max() or 0), int(age)  # type: ignore[arg-type]  # integers


RULE = Rule(
    code=CODE,
    summary="requests that wait for KV blocks from elsewhere held the KV cache",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES, Fact.BLOCKS}),
    find=find,
    charges=tuple(map(str, CHARGES)),
    specific=True,
    proven=(("remote_kv_pending", "num_gpu_blocks_override"),),
)
