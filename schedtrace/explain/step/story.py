"""One step, told: who was there, who got what, who was refused where and why, what else would have fitted."""

from typing import Any

import polars as pl

from schedtrace.errors import UsageError
from schedtrace.explain.step.comings import arrived, finished, too_late
from schedtrace.explain.step.facts import step_facts
from schedtrace.explain.step.parts import shares, stops, victims, waiters
from schedtrace.explain.step.what_if import what_if
from schedtrace.model.story import StepStory, Waiter, WhatIf
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from schedtrace.timeline.timeline import Timeline, make_timeline
from schedtrace.timeline.waits import mismatches, waiting_after, waits

THIS_STEP_ALONE = "this step alone is told, not what the change would do to later ones"
NO_CACHE_HITS = (
    "a waiting prompt that the prefix cache holds in part would have needed less; which do is not recorded"
)
LISTS = {"arrived", "finished", "preempted"}
"""Columns of a step that its story tells otherwise."""


def tell_step(run: Run, number: int, *, engine: int = 0) -> StepStory:
    """The story of one ``schedule()`` call.

    Args:
        run: A run.
        number: The step's number.
        engine: Data-parallel rank.

    Raises:
        UsageError: there is no such step or engine.
    """
    timeline = make_timeline(_trace(run, engine), run.manifest, whole=True)
    row = _row(run, timeline, number)
    queue = waits(timeline)
    agrees = mismatches(timeline, queue).filter(pl.col("step") == number).is_empty()
    waiting = waiters(timeline, waiting_after(queue, number), row)
    got, ended = shares(timeline, number), stops(timeline, number)
    possible = what_if(timeline, row, waiting=waiting if agrees else [], shares=got, stops=ended)
    return StepStory(
        path=str(run.path),
        label=run.label,
        engine_rank=timeline.rank,
        **{name: row[name] for name in set(StepStory.__struct_fields__) & row.keys() - LISTS},
        seats=timeline.seats,
        arrived=arrived(timeline, row),
        finished=finished(timeline, row),
        late=too_late(timeline, row),
        shares=got,
        preempted=victims(timeline, number),
        stops=ended,
        waiting=waiting,
        waiting_agrees=agrees,
        what_if=possible,
        what_if_assumes=_assumed(timeline, possible, waiting),
        facts=step_facts(timeline, row),
    )


def _assumed(timeline: Timeline, possible: list[WhatIf], waiting: list[Waiter]) -> list[str]:
    told = {request_id for answer in possible for request_id in answer.request_ids}
    admitted = told & {one.request_id for one in waiting}
    hits = [NO_CACHE_HITS] if admitted and timeline.header.enable_prefix_caching else []
    return [THIS_STEP_ALONE, *hits] if possible else []


def _trace(run: Run, engine: int) -> Trace:
    by_rank = {trace.header.engine_rank: trace for trace in run.traces}
    if engine not in by_rank:
        msg = f"--engine {engine}: {run.path} has engine {', '.join(map(str, by_rank))}"
        raise UsageError(msg)
    return by_rank[engine]


def _row(run: Run, timeline: Timeline, number: int) -> dict[str, Any]:
    rows = timeline.steps.filter(pl.col("step") == number).to_dicts()
    if rows:
        return rows[0]
    there = timeline.steps["step"].to_list()
    if not there:
        msg = f"step {number}: no step was recorded in {run.path}"
        raise UsageError(msg)
    but = ", with gaps" if len(there) < there[-1] - there[0] + 1 else ""
    msg = f"step {number}: {run.path} has the steps {there[0]} to {there[-1]}{but}"
    raise UsageError(msg)
