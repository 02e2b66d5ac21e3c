"""``kv-held-idle``: requests that get no tokens keep the KV blocks that they or other requests wait for."""

from typing import Any

import polars as pl

from schedtrace.diagnose.kv_cache import usable_blocks
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import kv_space, twice_the_blocks
from schedtrace.diagnose.rules.common import WAITED, Waited, advise, wait_figures, wait_finding
from schedtrace.diagnose.waits import charged, mean, totals
from schedtrace.model.causes import Cause
from schedtrace.model.message import NOTHING, Count, Steps
from schedtrace.model.report import Finding
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.charges import IDLE_HOLDERS, PARKED_LOADS
from schedtrace.timeline.spans import level
from schedtrace.timeline.timeline import Timeline

NOUNS = {
    "session": "streaming session",
    "finished": "finished request",
    "aborted": "aborted request",
    "request": "request",
}
ADVICE = {
    "session": "fewer streaming sessions at once, or end those that wait: nothing else frees their blocks",
    "finished": "look at the KV connector's other side: it does not fetch the blocks of finished requests",
    "aborted": "look at the KV connector and its other side: the KV loads of requests that were aborted "
    "meanwhile never end, and vLLM frees their blocks only then. A restart frees them, too",
}
"""Advice by kind of holder, given if all holders are of the same kind."""


class ParkedLoads(Waited, kw_only=True):
    """Requests whose KV loads are in progress (*parked*), and the blocks that they hold."""

    parked: float | None
    """Mean number of parked requests in the steps with waits."""
    running: float | None
    """Mean number of running requests in the steps with waits."""
    parked_blocks: int | None
    """Maximum number of KV blocks that parked requests held at once; None: the trace does not record loads.
    """
    blocks_total: int | None
    """Number of KV blocks in the cache."""
    oldest_ms: float | None
    """Longest time from a load's beginning to its arrival, or to the trace's end; None: the trace does not
    record loads.
    """


class IdleHolders(Waited, kw_only=True):
    """Requests that kept blocks without getting tokens, in the longest series of steps with such requests."""

    first_step: int
    """First step of the longest series."""
    last_step: int
    """Last step of the longest series."""
    time_ms: float
    """Duration of the longest series."""
    kind: str
    """Kind of the holders: ``session``, ``finished``, ``aborted`` (during a KV load that has not ended) or
    ``request`` (several kinds, or another kind)."""
    holders: int
    """Number of idle holders in the longest series."""
    largest: str
    """Holder that keeps the most blocks."""
    largest_blocks: int
    """Number of KV blocks that the largest holder keeps."""
    idle_blocks: int
    """Number of KV blocks that all idle holders keep."""
    median_hold_ms: float | None
    """Median time for which finished requests kept their blocks; None if no holder is a finished request, or
    this is not recorded."""
    longest_hold_ms: float | None
    """Longest time for which a finished request kept its blocks, up to the end of the trace if it still did.
    """
    deadlock: bool
    """Whether no request ran, and there were several holders, each of which waited for blocks, too."""


def _find(timeline: Timeline) -> Findings:
    for finding in (_parked_loads(timeline), _idle_holders(timeline)):
        if finding is not None:
            yield finding


def _parked_loads(timeline: Timeline) -> Finding | None:
    """Return the finding about requests that wait for KV from elsewhere; None if no other waits for them."""
    waits = charged(timeline, PARKED_LOADS)
    if waits is None:
        return None
    blocks, oldest_ms = _parked(timeline)
    evidence = ParkedLoads(
        **wait_figures(waits),
        parked=mean(waits.steps, pl.col("kv_loads_parked")),
        running=mean(waits.steps, pl.col("num_running_after")),
        blocks_total=timeline.header.kv_blocks_total,
        parked_blocks=blocks,
        oldest_ms=oldest_ms,
    )
    total = evidence.blocks_total or 0
    held = (
        "Parked requests held {parked_blocks:n} of {usable:n} usable blocks at most"
        "[; the longest load took {oldest_ms:ms}]."
    )
    return wait_finding(
        timeline,
        waits,
        evidence=evidence,
        title="KV transfers hold the cache",
        verdict="KV blocks held for transfers limit this run: requests spent {share:%} of their time "
        "waiting for KV blocks while {mean_parked:n request} waited for KV from elsewhere and "
        "{mean_running:n} ran.",
        holder=NOTHING if evidence.parked_blocks is None else held,
        cause=Cause.REMOTE_KV_PENDING,
        message="{requests:n request} waited, {longest_request:id} the longest ({longest_ms:ms}). This "
        "process does not know why the other side is not ready; the other side's trace of the same transfers "
        "would show it.",
        values={
            "mean_parked": round(evidence.parked or 0),
            "mean_running": round(evidence.running or 0),
            "usable": total - 1 if total else None,
        },
        advice=[
            advise("look at the KV connector's other side: its transfers take too long"),
            twice_the_blocks(timeline, ", as room for parked requests"),
        ],
    )


def _parked(timeline: Timeline) -> tuple[int | None, float | None]:
    """Return the most blocks that parked requests held at once, and the longest duration of a load in ms.

    None if the trace does not record loads.
    """
    if "kv_loads" not in timeline.lists:
        return None, None
    loads = timeline.lists["kv_loads"].select("request_id", "event", "at_us", "blocks").collect()
    begun = loads.filter(pl.col("event") == "begun").unique("request_id", keep="first")
    if begun.is_empty():
        return None, None
    over = loads.filter(pl.col("event") != "begun").group_by("request_id").agg(over_us=pl.col("at_us").max())
    spans = begun.join(over, on="request_id", how="left").with_columns(
        pl.col("over_us").fill_null(timeline.end_us), held=pl.col("blocks").list.sum().fill_null(0)
    )
    blocks = (
        level(spans, "at_us", "over_us", blocks="held").select(pl.col("blocks").max().fill_null(0)).item()
    )
    return blocks, spans.select((pl.col("over_us") - pl.col("at_us")).max()).item() / 1e3


def _idle_holders(timeline: Timeline) -> Finding | None:
    """Return the finding about requests that kept blocks without tokens; None if nobody waits for them."""
    waits = charged(timeline, IDLE_HOLDERS)
    if waits is None:
        return None
    evidence = IdleHolders(**wait_figures(waits), **_longest(timeline))
    verdict = (
        "KV blocks of requests that do not run limit this run: {who} kept theirs while requests spent "
        "{share:%} of their time waiting for KV blocks."
    )
    if evidence.deadlock:
        verdict = (
            "{who} wait for each other (a deadlock): each keeps its KV blocks and waits for more, and no "
            "request runs. Requests spent {share:%} of their time waiting for KV blocks."
        )
    advice = [advise(ADVICE[evidence.kind])] if evidence.kind in ADVICE else []
    if evidence.kind != "aborted":  # these only grow more
        advice.append(advise("{space}, as room for all of them", space=kv_space(timeline)))
    return wait_finding(
        timeline,
        waits,
        title="Requests that do not run keep the KV blocks",
        verdict=verdict,
        holder="They kept {idle_blocks:n}[ of {usable:n} usable] blocks for {time_ms:ms} ({stretch}), "
        "{largest:id} the most ({largest_blocks:n}).[ Finished requests kept theirs for {median_hold_ms:ms} "
        "at the median and {longest_hold_ms:ms} at most.]",
        values={
            "who": Count(evidence.holders, NOUNS[evidence.kind]),
            "usable": usable_blocks(timeline.header),
            "stretch": Steps(evidence.first_step, evidence.last_step),
        },
        cause=Cause.KV_BLOCKS,
        message=WAITED,
        advice=advice,
        evidence=evidence,
    )


def _longest(timeline: Timeline) -> dict[str, Any]:
    """Return the evidence about the longest series of steps in which idle requests held blocks."""
    starts = timeline.steps.select(pl.col("step").cast(pl.Int64), "start_us")
    begins = starts.rename({"step": "first_step", "start_us": "begin_us"})
    over = starts.select(last_step=pl.col("step") - 1, over_us="start_us")
    rows = (
        timeline.charge_tables.idle_holders.join(begins, on="first_step", maintain_order="left")
        .join(over, on="last_step", how="left", maintain_order="left")
        .with_columns(us=pl.col("over_us").fill_null(timeline.end_us) - pl.col("begin_us"))
        .sort("us", "first_step", "blocks", "request_id", descending=[True, False, True, False])
    )
    of_run = rows.filter(pl.col("first_step") == rows["first_step"][0])
    largest = of_run.row(0, named=True)
    kinds = totals(of_run, "blocks", by="kind")
    median_ms = longest_ms = None
    if "finished" in kinds["kind"]:
        events = timeline.kv_sends.group_by("request_id").agg(
            begun_us=pl.col("at_us").filter(pl.col("event") == "begun").min(),
            ended_us=pl.col("at_us").filter(pl.col("event") == "ended").max(),
        )
        holds = events.select((pl.col("ended_us").fill_null(timeline.end_us) - pl.col("begun_us")) / 1e3)
        longest_ms, median_ms = holds.select(pl.all().max(), median=pl.all().median()).row(0)
    waiting = of_run.filter(~pl.col("kind").is_in(["finished", "aborted"]) & ~pl.col("silent"))
    return {
        "first_step": largest["first_step"],
        "last_step": largest["last_step"],
        "time_ms": largest["us"] / 1e3,
        "kind": kinds["kind"][0] if kinds.height == 1 else "request",
        "holders": of_run.height,
        "largest": largest["request_id"],
        "largest_blocks": largest["blocks"],
        "idle_blocks": int(of_run["blocks"].sum()),
        "median_hold_ms": median_ms,
        "longest_hold_ms": longest_ms,
        "deadlock": largest["alone"] and of_run.height > 1 and waiting.height == of_run.height,
    }


RULE = Rule(
    code="kv-held-idle",
    summary="requests that got no token kept the KV blocks that others waited for; one finding per cause",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES, Fact.BLOCKS}),
    find=_find,
    charges=(PARKED_LOADS, IDLE_HOLDERS),
    specific=True,
    proven=(("remote_kv_pending", "num_gpu_blocks_override"),),
)
