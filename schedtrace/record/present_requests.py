"""Who is in a scheduler when its recording begins: looked at once between two steps, written by the writer.

What changes with every step is copied on the engine's thread; what a request keeps for its life is read when
the line is made.
"""

import time
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from schedtrace.model.trace import Present, PresentState
from schedtrace.record import arrival_facts, queues


class Seen(NamedTuple):
    """A request between two steps."""

    request: Any
    """vLLM's; let go as soon as its line is made."""
    status: str
    """Name of its ``RequestStatus``."""
    state: PresentState
    computed_tokens: int
    output_tokens: int
    num_preemptions: int | None
    events: tuple[Any, ...]
    """vLLM's ``EngineCoreEvent``s since its latest output; none where statistics are off."""
    in_flight: bool
    """A step that has it may be in flight."""


class Snapshot(NamedTuple):
    """What was copied of a scheduler between two steps, as it was found."""

    at_ns: int
    """When, on the monotonic clock."""
    requests: list[Any]
    statuses: list[Any]
    """Of each, like what follows."""
    computed_tokens: list[int]
    output_tokens: list[int]
    num_preemptions: list[int | None]
    events: list[list[Any]]
    """Their own lists, which may grow."""
    running: list[Any]
    waiting: queues.Waiting
    in_flight: bool

    def seen(self) -> list[Seen]:
        """Everybody who runs or waits, the running ones first, in the scheduler's order where it is known."""
        place = {id(request): number for number, request in enumerate(self.requests)}
        order = (*self.running, *queues.in_order(self.waiting), *self.requests)
        numbers = dict.fromkeys(place[id(one)] for one in order if id(one) in place)
        found = (self._one(number) for number in numbers)
        return [one for one in found if one is not None]

    def _one(self, number: int) -> Seen | None:
        status, events = self.statuses[number], self.events[number]
        if status.name.startswith("FINISHED"):
            return None
        outputs, preemptions = self.output_tokens[number], self.num_preemptions[number]
        runs = status.name == "RUNNING"
        before = status.name == "PREEMPTED" or bool(preemptions) or outputs > 0
        return Seen(
            self.requests[number],
            status.name,
            "running" if runs else "preempted" if before else "waiting",
            self.computed_tokens[number],
            outputs,
            preemptions,
            tuple(event for event in events if event.timestamp * 1e9 <= self.at_ns),
            runs and self.in_flight,
        )


class WerePresent(NamedTuple):
    """Who was there when recording began."""

    snapshot: Snapshot
    salt: arrival_facts.Salt
    """Of the trace's hashes."""


_status, _events = attrgetter("status"), attrgetter("events")
_computed, _outputs = attrgetter("num_computed_tokens"), attrgetter("_output_token_ids")
_preemptions = attrgetter("num_preemptions")


def snapshot(scheduler: Any, *, in_flight: bool) -> Snapshot:
    """A copy of what the next step may change, as quick as can be.

    A list for each attribute: a tuple for each request would set off the garbage collector.

    Args:
        scheduler: Between two steps, on its thread.
        in_flight: Whether steps are, whose outputs are not back.
    """
    requests = list(scheduler.requests.values())
    try:
        preemptions: list[int | None] = list(map(_preemptions, requests))
    except AttributeError:  # before vLLM 0.11.2 they were not counted
        preemptions = [None] * len(requests)
    return Snapshot(
        time.monotonic_ns(),
        requests,
        list(map(_status, requests)),
        list(map(_computed, requests)),
        list(map(len, map(_outputs, requests))),
        preemptions,
        list(map(_events, requests)),
        list(scheduler.running),
        queues.waiting_now(scheduler),
        in_flight,
    )


def present(seen: Seen, salt: arrival_facts.Salt, anchor_ns: int, wall_anchor_us: int) -> Present:
    """The entry of a request, without its prefix.

    Args:
        seen: As it was.
        salt: Of the trace.
        anchor_ns: Monotonic clock at which the trace's time is 0.
        wall_anchor_us: Unix time then.
    """
    request = seen.request
    lora = getattr(request, "lora_request", None)
    times = dict(_times(seen.events, anchor_ns))
    fields = arrival_facts.asked_for(request)
    if (found := arrival_facts.sibling(request.request_id, salt)) is not None:
        fields["sibling_index"], fields["parent"] = found
    return Present(
        request_id=request.request_id,
        state=seen.state,
        arrived_us=int(request.arrival_time * 1e6) - wall_anchor_us,
        prompt_tokens=request.num_prompt_tokens,
        queued_us=times.get("QUEUED"),
        scheduled_us=times.get("SCHEDULED") if not seen.num_preemptions else None,
        computed_tokens=seen.computed_tokens,
        output_tokens=seen.output_tokens,
        num_preemptions=seen.num_preemptions,
        max_tokens=request.max_tokens,
        priority=request.priority,
        lora=None if lora is None else lora.lora_name,
        **fields,
    )


def _times(events: Iterable[Any], anchor_ns: int) -> Iterable[tuple[str, int]]:
    """Name of an event to its time in the trace, the first of each kind; vLLM's are monotonic seconds."""
    for event in reversed(tuple(events)):
        yield event.type.name, int(event.timestamp * 1e6) - anchor_ns // 1000
