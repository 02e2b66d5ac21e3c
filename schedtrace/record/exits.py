"""What the marks in ``schedule()`` note, and the trace lines that are made of it later.

A mark notes scalars only, since the objects change after the exit, and it never raises.
"""

from typing import Any

import msgspec

from schedtrace.record import eligibility, queues
from schedtrace.record.allocation import Refusal, why_refused
from schedtrace.record.sites import Site

SITES: list[Site] = []
"""All marked places of this process; an event says its place by its number here."""


class Event(msgspec.Struct, gc=False):
    """One mark that was passed; it refers to nothing that could refer back (``gc=False``)."""

    site: int
    budget: int | None
    request_id: str | None = None
    status: str | None = None
    """Of the request."""
    which: int = 0
    """Of a condition: the number of the first part that was false."""
    queued: bool = True
    """Whether somebody is left in the queue in question."""
    pause: str | None = None
    before: int = 0
    now: int = 0
    """Tokens before and after a cap."""
    refusal: Refusal | None = None


class Marks:
    """The object that the marks call: it stands in place of a constant of the code.

    ``scheduler`` is the one that is scheduling; it keeps the events, or None while nothing is recorded.
    """

    @staticmethod
    def exit(scheduler: Any, site: int, budget: Any, request: Any, queue: Any) -> None:
        """A ``break`` or ``continue`` is about to be taken."""
        try:
            event = _note(scheduler, site, budget, request)
            if event is not None and request is None and SITES[site].refuses_head:
                event.queued = True if queue is None else bool(queue)
                event.pause = queues.pause_state(scheduler)
                following = queue.peek_request() if queue else queues.head(scheduler)
                event.request_id = getattr(following, "request_id", None)
        except Exception as error:
            _failed(scheduler, error)

    @staticmethod
    def refused(scheduler: Any, site: int, budget: Any, request: Any, arguments: Any) -> None:
        """``allocate_slots`` has returned None, and the loop is about to be left."""
        try:
            event = _note(scheduler, site, budget, request)
            if event is not None:
                event.refusal = why_refused(scheduler.kv_cache_manager, arguments)
        except Exception as error:
            _failed(scheduler, error)

    @staticmethod
    def end(scheduler: Any, site: int, budget: Any, which: int, left_out: Any) -> None:
        """A loop's condition, or the gate before a loop, was false."""
        try:
            event = _note(scheduler, site, budget, left_out)
            if event is not None:
                event.which = which
                event.pause = queues.pause_state(scheduler)
                if left_out is None and SITES[site].loop == "waiting":
                    event.request_id = getattr(queues.head(scheduler), "request_id", None)
        except Exception as error:
            _failed(scheduler, error)

    @staticmethod
    def cap(scheduler: Any, site: int, budget: Any, request: Any, before: int, now: int) -> None:
        """A limit has made the number of tokens smaller."""
        try:
            event = _note(scheduler, site, budget, request)
            if event is not None:
                event.before, event.now = before, now
        except Exception as error:
            _failed(scheduler, error)

    @staticmethod
    def preempts(scheduler: Any, site: int, request: Any, arguments: Any) -> None:
        """``allocate_slots`` has returned None, and somebody is about to be preempted for ``request``."""
        try:
            event = _note(scheduler, site, None, request)
            if event is not None:
                event.refusal = why_refused(scheduler.kv_cache_manager, arguments)
        except Exception as error:
            _failed(scheduler, error)

    @staticmethod
    def preempting(scheduler: Any, victim: Any) -> None:
        """To vLLM 0.11 ``schedule()`` preempts by itself, and is about to."""
        if scheduler._schedtrace_events is not None:
            scheduler._schedtrace_recorder.request_preempted(scheduler, victim)

    @staticmethod
    def preempted(scheduler: Any) -> None:
        """It has freed the victim's blocks."""
        if scheduler._schedtrace_events is not None:
            scheduler._schedtrace_recorder.request_was_preempted()

    @staticmethod
    def why_not_eligible(scheduler: Any, request: Any) -> int:
        """Which of the reasons for a ``next_decode_eligible_step`` ahead it is: a number for ``end``."""
        try:
            return eligibility.why_not_eligible(scheduler, request)
        except Exception as error:
            _failed(scheduler, error)
            return eligibility.UNKNOWN


def _failed(scheduler: Any, error: Exception) -> None:
    """What the event lacks is left out, and the trace says so."""
    scheduler._schedtrace_recorder.mark_failed(error)


def _note(scheduler: Any, site: int, budget: Any, request: Any) -> Event | None:
    events = scheduler._schedtrace_events
    if events is None:
        return None
    event = Event(site, budget)
    events.append(event)
    if request is not None:
        event.request_id = request.request_id
        event.status = request.status.name
    return event
