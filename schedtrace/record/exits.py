"""What the marks in ``schedule()`` note, and the trace lines that are made of it later.

A mark appends one tuple of plain values, since the objects change after the exit; an ``Event`` is made of it
off the scheduler's path. It never raises.
"""

from itertools import pairwise
from typing import Any

import msgspec

from schedtrace.record import queues
from schedtrace.record.allocation import Refusal, why_refused
from schedtrace.record.sites import Site

SITES: list[Site] = []
"""All marked places of this process; an event says its place by its number here."""

Noted = tuple[Any, ...]
"""The fields of an ``Event`` in their order, without trailing ones at their default."""


class Event(msgspec.Struct, gc=False):
    """One mark that was passed."""

    site: int
    budget: int | None
    request_id: str | None = None
    status: str | None = None
    """Of the request; noted as vLLM's ``RequestStatus``."""
    which: int = 0
    """Of a condition: the number of the first part that was false."""
    queued: bool = True
    """Whether somebody is left in the queue in question."""
    pause: str = "UNPAUSED"
    """Noted as vLLM's ``PauseState``."""
    before: int = 0
    now: int = 0
    """Tokens before and after a cap."""
    refusal: Refusal | None = None


def event_of(noted: Noted) -> Event:
    """What a mark noted, with words in place of vLLM's enumerations."""
    event = Event(*noted)
    event.status = getattr(event.status, "name", None)
    event.pause = getattr(event.pause, "name", "UNPAUSED")
    return event


class Marks:
    """The object that the marks call: it stands in place of a constant of the code.

    ``scheduler`` is the one that is scheduling; it keeps the events, or None while nothing is recorded.
    """

    @staticmethod
    def exit(scheduler: Any, site: int, budget: Any, request: Any, queue: Any) -> None:
        """A ``break`` or ``continue`` is about to be taken."""
        events = scheduler._schedtrace_events
        if events is None:
            return
        try:
            if request is not None:
                events.append((site, budget, request.request_id, request.status))
                return
            if not SITES[site].refuses_head:
                events.append((site, budget))
                return
            queued, head = queue is None, None
            if scheduler._schedtrace_queued:
                queued = queued or bool(queue)
                following = queue.peek_request() if queue else queues.head(scheduler)
                head = getattr(following, "request_id", None)
            events.append((site, budget, head, None, 0, queued, queues.pause_state(scheduler)))
        except Exception as error:
            _failed(scheduler, (site, budget), error)

    @staticmethod
    def refused(scheduler: Any, site: int, budget: Any, request: Any, arguments: Any) -> None:
        """``allocate_slots`` has returned None, and the loop is about to be left."""
        _refused(scheduler, site, budget, request, arguments)

    @staticmethod
    def end(scheduler: Any, site: int, budget: Any, which: int, left_out: Any) -> None:
        """A loop's condition, or the gate before a loop, was false."""
        events = scheduler._schedtrace_events
        if events is None:
            return
        try:
            first, status = None, None
            if left_out is not None:
                first, status = left_out.request_id, left_out.status
            elif scheduler._schedtrace_queued and SITES[site].loop == "waiting":
                first = getattr(queues.head(scheduler), "request_id", None)
            events.append((site, budget, first, status, which, True, queues.pause_state(scheduler)))
        except Exception as error:
            _failed(scheduler, (site, budget, None, None, which), error)

    @staticmethod
    def cap(scheduler: Any, site: int, budget: Any, request: Any, *tokens: int) -> None:
        """Some of the limits from ``site`` on have made the number of tokens smaller.

        ``tokens``: before the first of these sites, and after each of them.
        """
        events = scheduler._schedtrace_events
        if events is None:
            return
        try:
            first, status = (None, None) if request is None else (request.request_id, request.status)
            for place, (before, now) in enumerate(pairwise(tokens), start=site):
                if now < before:
                    events.append((place, budget, first, status, 0, True, None, before, now))
        except Exception as error:
            _failed(scheduler, (site, budget), error)

    @staticmethod
    def preempts(scheduler: Any, site: int, request: Any, arguments: Any) -> None:
        """``allocate_slots`` has returned None, and somebody is about to be preempted for ``request``."""
        _refused(scheduler, site, None, request, arguments)


def _refused(scheduler: Any, site: int, budget: Any, request: Any, arguments: Any) -> None:
    events = scheduler._schedtrace_events
    if events is None:
        return
    try:
        told = (None, None) if request is None else (request.request_id, request.status)
    except Exception as error:
        _failed(scheduler, (site, budget), error)
        return
    try:
        refusal = why_refused(scheduler.kv_cache_manager, arguments)
    except Exception as error:
        _failed(scheduler, (site, budget, *told), error)
    else:
        events.append((site, budget, *told, 0, True, None, 0, 0, refusal))


def _failed(scheduler: Any, noted: Noted, error: Exception) -> None:
    """What the event lacks is left out, and the trace says so."""
    scheduler._schedtrace_events.append(noted)
    scheduler._schedtrace_recorder.mark_failed(error)
