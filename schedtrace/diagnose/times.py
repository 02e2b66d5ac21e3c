"""Where the time of a run went: of its requests, by state and cause, and of its engines."""

from itertools import pairwise

import polars as pl

from schedtrace.model.report import EngineTime, RequestTime
from schedtrace.timeline.engine_states import STATES
from schedtrace.timeline.pieces import LENGTH_US
from schedtrace.timeline.shares import until
from schedtrace.timeline.timeline import Timeline

STRIP_CELLS = 40


def request_time(timeline: Timeline) -> list[RequestTime]:
    """The states and causes of all requests, the longest first."""
    states = timeline.request_states
    total = int(states.select(LENGTH_US.sum()).item() or 0)
    if not total:
        return []
    moments = _moments(timeline)
    everything = _between(states, moments)
    found = []
    for (state, cause), rows in states.group_by("state", "cause", maintain_order=True):
        time_us = int(rows.select(LENGTH_US.sum()).item())
        parts = zip(_between(rows, moments), everything, strict=True)
        found.append(
            RequestTime(
                engine_rank=timeline.rank,
                state=str(state),
                cause=None if cause is None else str(cause),
                time_ms=time_us / 1e3,
                share_frac=time_us / total,
                requests=rows["request_id"].n_unique(),
                strip=[part / whole if whole else 0.0 for part, whole in parts],
            )
        )
    return sorted(found, key=lambda share: (-share.time_ms, share.state, share.cause or ""))


def engine_time(timeline: Timeline) -> list[EngineTime]:
    """The states of the engine that occurred."""
    spent = dict(timeline.engine_states.group_by("state").agg(LENGTH_US.sum().alias("us")).iter_rows())
    busy = sum(us for state, us in spent.items() if state != "idle")
    return [
        EngineTime(
            engine_rank=timeline.rank,
            state=state,
            time_ms=spent[state] / 1e3,
            busy_frac=None if state == "idle" else spent[state] / busy,
        )
        for state in STATES
        if spent.get(state)
    ]


def _moments(timeline: Timeline) -> list[int]:
    """The edges of equal parts of the run's steps."""
    starts = timeline.steps["start_us"].drop_nulls().to_list()
    cells = min(STRIP_CELLS, len(starts))
    return [starts[cell * len(starts) // cells] for cell in range(cells)] + [timeline.end_us]


def _between(rows: pl.DataFrame, moments: list[int]) -> list[float]:
    return [after - before for before, after in pairwise(until(rows, moments))]
