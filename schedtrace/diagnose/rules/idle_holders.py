"""``idle-holders``: requests that got nothing kept the KV blocks that others, or they, waited for."""

from typing import Any

import polars as pl

from schedtrace.diagnose.kv_blocks import usable_blocks
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import kv_space
from schedtrace.diagnose.rules.common import WAITED, Waited, advise, wait_figures, wait_finding
from schedtrace.diagnose.waits import charged
from schedtrace.model.causes import Cause
from schedtrace.model.message import Count, Steps
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.charges import IDLE_HOLDERS
from schedtrace.timeline.timeline import Timeline

NOUNS = {"session": "streaming session", "finished": "finished request", "request": "request"}
ADVICE = {
    "session": "fewer streaming sessions at once, or end those that wait: nothing else frees their blocks",
    "finished": "look at the KV connector's other side: it does not fetch the blocks of finished requests",
}
"""Advice where all holders are of this kind."""


class IdleHolders(Waited, kw_only=True):
    """Requests that kept blocks; the run of steps is the longest."""

    first_step: int
    """First step of the longest stretch."""
    last_step: int
    """Last step of that stretch."""
    time_ms: float
    """Time of that stretch."""
    kind: str
    """``session``, ``finished``, or ``request`` where the holders differ or are something else."""
    holders: int
    """Number of idle holders in that stretch."""
    largest: str
    """Holder that keeps most blocks."""
    largest_blocks: int
    """KV blocks that it keeps."""
    idle_blocks: int
    """KV blocks that all of them keep."""
    blocks_total: int | None
    """KV blocks of the cache."""
    deadlock: bool
    """Whether no request ran and each of the holders waited for blocks itself."""


def _find(timeline: Timeline) -> Findings:
    waits = charged(timeline, *RULE.charges)
    if waits is None:
        return
    evidence = IdleHolders(
        **wait_figures(waits), blocks_total=timeline.header.kv_blocks_total, **_longest(timeline)
    )
    verdict = (
        "KV blocks of requests that do not run limit this run: {who} kept theirs while requests spent "
        "{share:%} of their time waiting for KV blocks."
    )
    if evidence.deadlock:
        verdict = (
            "{who} wait for each other (a deadlock): each keeps its KV blocks and waits for more, and no "
            "request runs. Requests spent {share:%} of their time waiting for KV blocks."
        )
    room = advise("{space}, as room for all of them", space=kv_space(timeline))
    yield wait_finding(
        timeline,
        waits,
        title="Requests that do not run keep the KV blocks",
        verdict=verdict,
        holder="They kept {idle_blocks:n}[ of {usable:n} usable] blocks for {time_ms:ms} ({stretch}), "
        "{largest:id} the most ({largest_blocks:n}).",
        values={
            "who": Count(evidence.holders, NOUNS[evidence.kind]),
            "usable": usable_blocks(timeline.header),
            "longest_request": waits.longest_id,
            "longest_ms": waits.longest_us / 1e3,
            "stretch": Steps(evidence.first_step, evidence.last_step),
        },
        cause=Cause.KV_BLOCKS,
        message=WAITED,
        advice=[*([advise(ADVICE[evidence.kind])] if evidence.kind in ADVICE else []), room],
        evidence=evidence,
    )


def _longest(timeline: Timeline) -> dict[str, Any]:
    """Fields of the evidence: of the run of steps that took longest."""
    starts = timeline.steps.select(pl.col("step").cast(pl.Int64), "start_us")
    begins = starts.rename({"step": "first_step", "start_us": "begin_us"})
    over = starts.select(last_step=pl.col("step") - 1, over_us="start_us")
    rows = (
        timeline.idle_holders.join(begins, on="first_step", maintain_order="left")
        .join(over, on="last_step", how="left", maintain_order="left")
        .with_columns(us=pl.col("over_us").fill_null(timeline.end_us) - pl.col("begin_us"))
        .sort("us", "first_step", "blocks", "request_id", descending=[True, False, True, False])
    )
    of_run = rows.filter(pl.col("first_step") == rows["first_step"][0])
    largest = of_run.row(0, named=True)
    kinds = (
        of_run.group_by("kind").agg(pl.col("blocks").sum()).sort("blocks", "kind", descending=[True, False])
    )
    waiting = of_run.filter((pl.col("kind") != "finished") & ~pl.col("silent"))
    return {
        "first_step": largest["first_step"],
        "last_step": largest["last_step"],
        "time_ms": largest["us"] / 1e3,
        "kind": kinds["kind"][0] if kinds.height == 1 else "request",
        "holders": of_run.height,
        "largest": largest["request_id"],
        "largest_blocks": largest["blocks"],
        "idle_blocks": int(of_run["blocks"].sum()),
        "deadlock": largest["alone"] and of_run.height > 1 and waiting.height == of_run.height,
    }


RULE = Rule(
    code="idle-holders",
    summary="requests that got nothing kept the KV blocks that others waited for, or waited for each other",
    needs=frozenset({Fact.QUEUE, Fact.EXITS, Fact.TIMES, Fact.LIVES, Fact.BLOCKS}),
    find=_find,
    charges=(IDLE_HOLDERS,),
    specific=True,
)
