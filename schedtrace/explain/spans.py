"""Where a request's time went: spans that add up to its time end to end, and its state step by step."""

from itertools import groupby, pairwise

import polars as pl

from schedtrace.explain.rows import RequestRows
from schedtrace.model.life import Span, StateRun


def spans(rows: RequestRows) -> list[Span]:
    """Front end, waiting, prefill, decode; preempted and recompute where it lost its blocks.

    Prefill lasts from the start of the step that first schedules it to its first output, decode from then to
    its last output; recompute, after a preemption, from the step that resumes it to its next output.
    """
    end = rows.end_us if rows.end_us is not None else _trace_end(rows)
    changes = [(us, state) for us, state in sorted(_changes(rows), key=lambda change: change[0]) if us < end]
    found: list[Span] = []
    for (begin, state), (until, _) in pairwise([*changes, (end, "")]):
        if found and found[-1].state == state:
            found[-1].to_ms = rows.since_us(until)
        elif until > begin:
            found.append(Span(state=state, from_ms=rows.since_us(begin), to_ms=rows.since_us(until)))
    return found


def _changes(rows: RequestRows) -> list[tuple[int, str]]:
    """When which state begins."""
    found: list[tuple[int, str]] = []
    if rows.arrival:
        if rows.arrival["arrived_us"] is not None:
            found.append((rows.arrival["arrived_us"], "front_end"))
        found.append((rows.arrival["queued_us"], "waiting"))
    found += [(lost["start_us"], "preempted") for lost in rows.preemptions]
    computing = False
    for at, row in enumerate(rows.scheduled):
        if row["phase"] != "running" or not at:
            computing = row["work"] != "decode"
            found.append((row["start_us"], _computing(row["phase"]) if computing else "decode"))
        if computing and row["outputs"] and row["output_us"] is not None:
            computing = False
            lost = any(
                row["step"] < preempted["step"] and preempted["start_us"] <= row["output_us"]
                for preempted in rows.preemptions
            )
            if not lost:  # with steps in flight its output may come back after it was preempted
                found.append((row["output_us"], "decode"))
    return found


def _computing(phase: str) -> str:
    return "recompute" if phase == "resumed" else "prefill"


def _trace_end(rows: RequestRows) -> int:
    """The end of the trace, for a request that did not end in it."""
    steps = rows.timeline.steps
    last = steps.select(pl.max_horizontal(pl.col("output_us").max(), pl.col("end_us").max())).item()
    return int(last if last is not None else rows.begin_us)


def states(rows: RequestRows) -> list[StateRun]:
    """Its state in every step, from the first one that it waited for or was scheduled in to its last."""
    works = {row["step"]: row["work"] or "decode" for row in rows.scheduled}
    firsts = [row["since_step"] for row in rows.waits[:1]] + [row["step"] for row in rows.scheduled[:1]]
    if not firsts:
        return []
    last = max([*works, *(row["since_step"] for row in rows.waits[-1:])])
    here = rows.timeline.steps.filter((pl.col("step") >= min(firsts)) & (pl.col("step") <= last))[
        "step"
    ].to_list()
    waited = [(row["since_step"], row["left_step"], row["preempted"]) for row in rows.waits]

    def state(step: int) -> str:
        if step in works:
            return str(works[step])
        lost = next((lost for since, left, lost in waited if since <= step < left), None)
        return "skipped" if lost is None else "preempted" if lost else "waiting"

    runs = [(name, list(steps)) for name, steps in groupby(here, key=state)]
    return [StateRun(state=name, first_step=steps[0], steps=len(steps)) for name, steps in runs]
