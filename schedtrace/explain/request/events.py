"""What happened to a request, in order and in words."""

from collections.abc import Iterator

from schedtrace.diagnose.rules.common import counted
from schedtrace.explain.request.chunks import causes_of, computing, event_of
from schedtrace.explain.request.facts import facts
from schedtrace.explain.request.rows import RequestRows
from schedtrace.model.life import LifeEvent, Wait


def life_events(rows: RequestRows, waited: list[Wait]) -> list[LifeEvent]:
    """Everything from its arrival to its end; decodes that follow each other are one event."""
    found = [
        *_coming(rows),
        *facts(rows),
        *computing(rows, waited),
        *_losing(rows),
        *_waiting_in_vain(rows, waited),
        *_leaving(rows),
    ]
    return sorted(found, key=lambda event: event.at_ms)


def _coming(rows: RequestRows) -> Iterator[LifeEvent]:
    came = rows.arrival
    if came is None:
        return
    most = f", at most {came['max_tokens']:,} to generate" if came["max_tokens"] is not None else ""
    about = f"{came['prompt_tokens']:,} prompt tokens{most}"
    if came["priority"]:
        about += f", priority {came['priority']}"
    if came["lora"]:
        about += f", LoRA {came['lora']}"
    if came["arrived_us"] is None:
        yield event_of(rows, came["queued_us"], "queued", f"in the scheduler's queue: {about}")
        return
    yield event_of(rows, came["arrived_us"], "arrived", f"at the front end: {about}")
    yield event_of(rows, came["queued_us"], "queued", "in the scheduler's queue")


def _losing(rows: RequestRows) -> Iterator[LifeEvent]:
    for one in rows.preemptions:
        whom = one["for_request_id"]
        if not one["in_schedule"]:
            why = "by a reset of the prefix cache"
        elif whom == rows.request_id:
            why = "for want of blocks of its own"
        else:
            why = f"for {whom}" if whom else "for a request that could not be seen"
        said = f"preempted {why}: {counted(one['lost_tokens'], 'computed token')} lost"
        yield event_of(rows, one["start_us"], "preempted", said, one["step"])


def _waiting_in_vain(rows: RequestRows, waited: list[Wait]) -> Iterator[LifeEvent]:
    """A wait that no step ended: it was aborted meanwhile, or the trace ends with it."""
    for wait in waited:
        if wait.left_step is None and wait.since_step is not None:
            said = f"waited {wait.wait_ms:,.1f} ms and was not scheduled{causes_of(wait)}"
            queued = rows.queued_us if rows.queued_us is not None else rows.begin_us
            lost = [one["start_us"] for one in rows.preemptions if one["step"] == wait.since_step]
            yield event_of(
                rows, lost[0] if wait.preempted and lost else queued, "waited", said, wait.since_step
            )


def _leaving(rows: RequestRows) -> Iterator[LifeEvent]:
    gone = rows.finish
    if gone is not None:
        said = f"{gone['status']} with {counted(gone['output_tokens'], 'output token')}"
        yield event_of(rows, gone["finished_us"], "finished", said)
