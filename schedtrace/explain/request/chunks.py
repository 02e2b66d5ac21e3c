"""What a request computed, and what it waited for before, in words."""

from collections.abc import Iterator
from itertools import groupby

import polars as pl

from schedtrace.diagnose.rules.common import counted
from schedtrace.explain.request.rows import RequestRows, Row
from schedtrace.model.life import LifeEvent, Wait

LEAST_TOLD_MS = 0.05
"""Less would be printed as 0.0."""


def computing(rows: RequestRows, waited: list[Wait]) -> Iterator[LifeEvent]:
    """Admissions, chunks of prefill, the first token, decodes that follow each other as one."""
    waits = {wait.left_step: wait for wait in waited}
    first_token = rows.first_token_us
    if first_token is not None:
        step = next((row["step"] for row in rows.got if row["output_us"] == first_token), None)
        yield event_of(rows, first_token, "first_token", "first token back", step)
    keys = {row["step"]: _key(row) for row in rows.got}
    for (work, _), group in groupby(rows.got, key=lambda row: keys[row["step"]]):
        run = list(group)
        first = run[0]
        if first["phase"] != "running" and first["step"] in waits:
            what = "resumed" if first["phase"] == "resumed" else "scheduled"
            yield event_of(rows, first["start_us"], what, _after(waits[first["step"]], what), first["step"])
        if work == "decode":
            yield _decodes(rows, run)
        else:
            for row in run:
                yield event_of(rows, row["start_us"], "chunk", _chunk(rows, row), row["step"])


def _key(row: Row) -> tuple[str, int]:
    """Decodes go together until the next preemption."""
    return (row["work"] or "decode", row["lost_tokens"])


def _chunk(rows: RequestRows, row: Row) -> str:
    start, end = row["computed_tokens"], row["computed_tokens"] + row["scheduled_tokens"]
    lost = row["lost_tokens"]
    of = max(row["prompt_tokens"] or 0, lost, end)
    work = f"{row['work'] or 'computation'} of {counted(row['scheduled_tokens'], 'token')}"
    if row["work"] == "recompute" and end > lost and lost < (row["prompt_tokens"] or 0):
        work = f"recompute of {lost - start:,} and prefill of {counted(end - lost, 'token')}"
    cached = f", {start:,} found in a cache" if row["phase"] != "running" and start else ""
    caps = rows.caps.get(row["step"], [])
    capped = f", cut by {', '.join(caps)}" if caps else ""
    return f"{work}, to {end:,} of {of:,}{cached}{capped}"


def _decodes(rows: RequestRows, run: list[Row]) -> LifeEvent:
    first, last = run[0], run[-1]
    tokens = sum(row["scheduled_tokens"] for row in run)
    drafts = sum(row["draft_tokens"] for row in run)
    said = f"decoded in {counted(len(run), 'step')}, {counted(tokens, 'token')} scheduled"
    said += f", {drafts:,} of them drafts" if drafts else ""
    steps = rows.timeline.steps.filter(
        (pl.col("step") >= first["step"]) & (pl.col("step") <= last["step"]) & (pl.col("total_requests") > 0)
    ).height
    if steps > len(run):
        said += (
            f"; {counted(steps - len(run), 'step')} between went without it{_why_without(rows, first, last)}"
        )
    event = event_of(rows, first["start_us"], "decode", said, first["step"])
    event.last_step = last["step"]
    return event


def _why_without(rows: RequestRows, first: Row, last: Row) -> str:
    causes = (
        rows.timeline.exits.filter(
            (pl.col("request_id") == rows.request_id)
            & (pl.col("loop") == "running")
            & pl.col("step").is_between(first["step"], last["step"])
        )
        .unique(["step", "cause"])
        .group_by("cause")
        .len()
        .sort("len", "cause", descending=[True, False])
    )
    told = [f"{count} {cause}" for cause, count in causes.iter_rows()]
    return f" ({', '.join(told)})" if told else ""


def _after(wait: Wait, what: str) -> str:
    again = "again " if what == "resumed" else ""
    if wait.wait_ms < LEAST_TOLD_MS:
        return f"scheduled {again}at once"
    return f"scheduled {again}after {wait.wait_ms:,.1f} ms in the queue{causes_of(wait)}"


def causes_of(wait: Wait) -> str:
    """``: 3 steps kv_blocks (9.0 ms)``; nothing where it did not wait through a step."""
    parts = [
        f"{counted(cause.steps, 'step')} {cause.cause} ({cause.wait_ms:,.1f} ms)" for cause in wait.causes
    ]
    if wait.causes and wait.before_step_ms >= LEAST_TOLD_MS:
        parts.append(f"{wait.before_step_ms:,.1f} ms until a step began")
    return f": {', '.join(parts)}" if parts else ""


def event_of(rows: RequestRows, us: int, what: str, message: str, step: int | None = None) -> LifeEvent:
    """An event at a time of the trace's clock."""
    return LifeEvent(at_ms=rows.since_us(us), what=what, step=step, last_step=step, message=message)
