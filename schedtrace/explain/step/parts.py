"""The parts of a step's story: who got what, where it stopped, who was preempted, who still waits."""

from itertools import groupby
from typing import Any

import polars as pl

from schedtrace.diagnose.rules.common import counted
from schedtrace.explain.step.why import names, sentence
from schedtrace.model.story import Scheduled, Stop, Victim, Waiter
from schedtrace.timeline.timeline import Timeline
from schedtrace.timeline.work import with_work

SAME_STOP = ("loop", "kind", "cause", "detail", "location", "guard", "via")


def shares(timeline: Timeline, number: int) -> list[Scheduled]:
    """What each scheduled request got, and what cut it."""
    caps: dict[str, list[dict[str, Any]]] = {}
    for cap in timeline.caps.filter(pl.col("step") == number).to_dicts():
        caps.setdefault(cap["request_id"], []).append(cap)
    rows = with_work(timeline, timeline.requests_in(number)).to_dicts()
    own = set(Scheduled.__struct_fields__) - {"wanted_tokens", "caps"}
    return [
        Scheduled(
            **{name: row[name] for name in own},
            wanted_tokens=caps[row["request_id"]][0]["wanted_tokens"] if row["request_id"] in caps else None,
            caps=[cap["cap"] for cap in caps.get(row["request_id"], [])],
        )
        for row in rows
    ]


def stops(timeline: Timeline, number: int) -> list[Stop]:
    """Its exits in order; those of one kind that follow each other are one."""
    exits = timeline.exits.filter(pl.col("step") == number).to_dicts()
    own = set(Stop.__struct_fields__) - {"count", "request_ids", "message"}
    found = []
    for _, alike in groupby(exits, key=lambda exit_: [exit_[name] for name in SAME_STOP]):
        group = list(alike)
        first, count = group[0], sum(exit_["count"] for exit_ in group)
        whom = list(dict.fromkeys(exit_["request_id"] for exit_ in group if exit_["request_id"]))
        found.append(
            Stop(
                **{name: first[name] for name in own},
                count=count,
                request_ids=whom,
                message=sentence(timeline, first, names(whom, count)),
            )
        )
    return found


def victims(timeline: Timeline, number: int) -> list[Victim]:
    """Who lost its blocks."""
    own = set(Victim.__struct_fields__) - {"message"}
    lost = timeline.preemptions.filter(pl.col("step") == number).to_dicts()
    return [Victim(**{name: one[name] for name in own}, message=_preempted(one)) for one in lost]


def _preempted(one: dict[str, Any]) -> str:
    whom = one["for_request_id"]
    if not one["in_schedule"]:
        why = "outside schedule(), by a reset of the prefix cache"
    elif whom == one["request_id"]:
        why = "because it needed blocks itself and nobody else was left to take them from"
    else:
        why = f"for {whom}" if whom else "for a request that could not be seen"
        if one["blocks_needed"] is not None:
            why += f", which needed {counted(one['blocks_needed'], 'more KV block')}"
    freed = "" if one["blocks_freed"] is None else f", {counted(one['blocks_freed'], 'block')} freed at once"
    times = one["num_preemptions"] or 0
    again = f"; preempted {times} times by now" if times > 1 else ""
    tokens = counted(one["lost_tokens"], "computed token")
    return f"{one['request_id']} was preempted {why}: {tokens} lost{freed}{again}."


def waiters(timeline: Timeline, queue: pl.DataFrame, row: dict[str, Any]) -> list[Waiter]:
    """Those of ``waits(timeline)`` who waited after the step, with how long they had waited when it ended."""
    queued = timeline.arrivals.select("request_id", "queued_us").unique("request_id", keep="first")
    preempted = timeline.steps.select(pl.col("step").cast(pl.Int64).alias("since_step"), "start_us")
    since = pl.when(pl.col("preempted")).then(pl.col("start_us")).otherwise(pl.col("queued_us"))
    rows = (
        queue.join(queued, on="request_id", how="left", maintain_order="left")
        .join(preempted, on="since_step", how="left", maintain_order="left")
        .with_columns(waited_ms=(row["end_us"] - since) / 1e3)
    )
    return [Waiter(**one) for one in rows.select(*Waiter.__struct_fields__).to_dicts()]
