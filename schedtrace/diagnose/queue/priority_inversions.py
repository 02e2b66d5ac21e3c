"""Requests of higher priority that waited while one of lower priority was scheduled."""

import numpy as np
import polars as pl

from schedtrace.timeline.timeline import Timeline

COLUMNS = {
    "step": pl.Int64,
    "trial": pl.Int64,
    "request_id": pl.String,
    "priority": pl.Int64,
    "by": pl.String,
    "by_priority": pl.Int64,
}


def priority_inversions(timeline: Timeline) -> pl.DataFrame:
    """One row per step that scheduled a request from the queue and left a more urgent, ready one there.

    Only under ``--scheduling-policy priority``, where a smaller number goes first. A request that the step
    skipped by name, or was refused by name, does not count. Columns: ``step``, ``trial``, ``request_id`` and
    ``priority`` of the most urgent one left, ``by`` and ``by_priority``: of the least urgent one scheduled.
    """
    queue = timeline.waits
    if timeline.header.scheduler_config.get("policy") != "priority" or queue.is_empty():
        return pl.DataFrame(schema=COLUMNS)
    since, left = queue["since_step"].to_numpy(), queue["left_step"].to_numpy()
    urgency, ids = queue["priority"].to_numpy(), queue["request_id"].to_numpy()
    named = set(timeline.exits.filter(pl.col("loop") == "waiting").select("step", "request_id").iter_rows())
    asked = timeline.arrivals.select("request_id", "priority").unique("request_id", keep="first")
    came = (
        timeline.admitted.lazy()
        .select("step", "trial", "request_id")
        .collect()
        .join(asked, on="request_id")
        .sort("step", "priority", descending=[False, True])
        .unique("step", keep="first", maintain_order=True)
    )
    rows = []
    for step, trial, by, by_priority in came.iter_rows():
        behind = np.flatnonzero((since <= step) & (step < left) & (urgency < by_priority))
        ready = [at for at in behind if (step, ids[at]) not in named]
        if ready:
            first = min(ready, key=lambda at: (urgency[at], at))
            rows.append((step, trial, str(ids[first]), int(urgency[first]), by, by_priority))
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")
