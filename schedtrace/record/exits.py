"""What the marks in ``schedule()`` note, and the trace lines that are made of it later.

A mark appends one tuple of plain values, since the objects change after the exit; an ``Event`` is made of it
off the scheduler's path. It never raises.
"""

from itertools import pairwise
from typing import Any

import msgspec

from schedtrace.record import eligibility, queues
from schedtrace.record.allocation import Refusal, why_refused
from schedtrace.record.marking import Site

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
    """Of a condition: the number of the first part that was false. Of a check of seats that comes before the
    next request: 1 where other ranks take them (``queues.held_back``)."""
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
        noted: Noted = (site, budget)
        try:
            if request is not None:
                noted = (site, budget, request.request_id, request.status)
            elif SITES[site].refuses_head:
                waits = scheduler._schedtrace_queued  # or the queue is empty, and need not be asked
                which = int(queues.held_back(scheduler))
                noted = (site, budget, None, None, which, queue is None or (waits and bool(queue)))
                noted = (*noted, queues.pause_state(scheduler))
                if waits:
                    following = queue.peek_request() if queue else queues.head(scheduler)
                    noted = (site, budget, getattr(following, "request_id", None), *noted[3:])
        except Exception as error:
            _failed(scheduler, error)
        events.append(noted)

    @staticmethod
    def refused(scheduler: Any, site: int, budget: Any, request: Any, arguments: Any) -> None:
        """``allocate_slots`` has returned None, and the loop is about to be left."""
        _refused(scheduler, site, budget, request, arguments)
        recorder = getattr(scheduler, "_schedtrace_recorder", None)
        if recorder is None or request is None or scheduler._schedtrace_events is None:
            return
        try:
            recorder.facts.head_refused(scheduler, request, arguments)
        except Exception as error:
            recorder.mark_failed(error)

    @staticmethod
    def end(scheduler: Any, site: int, budget: Any, which: int, left_out: Any) -> None:
        """A loop's condition, or the gate before a loop, was false."""
        events = scheduler._schedtrace_events
        if events is None:
            return
        noted: Noted = (site, budget, None, None, which)
        try:
            noted = (site, budget, None, None, which, True, queues.pause_state(scheduler))
            if left_out is not None:
                noted = (site, budget, left_out.request_id, left_out.status, *noted[4:])
            elif scheduler._schedtrace_queued and SITES[site].loop == "waiting":
                noted = (site, budget, getattr(queues.head(scheduler), "request_id", None), *noted[3:])
        except Exception as error:
            _failed(scheduler, error)
        events.append(noted)

    @staticmethod
    def cap(scheduler: Any, site: int, budget: Any, request: Any, *tokens: int) -> None:
        """Some of the limits from ``site`` on have made the number of tokens smaller.

        ``tokens``: before the first of these sites, and after each of them.
        """
        events = scheduler._schedtrace_events
        if events is None:
            return
        first, status = None, None
        try:
            if request is not None:
                first, status = request.request_id, request.status
        except Exception as error:
            _failed(scheduler, error)
        try:
            for place, (before, now) in enumerate(pairwise(tokens), start=site):
                if now < before:
                    events.append((place, budget, first, status, 0, True, None, before, now))
        except Exception as error:
            _failed(scheduler, error)
            events.append((site, budget, first, status))

    @staticmethod
    def preempts(scheduler: Any, site: int, request: Any, arguments: Any) -> None:
        """``allocate_slots`` has returned None, and somebody is about to be preempted for ``request``."""
        _refused(scheduler, site, None, request, arguments)

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


def _refused(scheduler: Any, site: int, budget: Any, request: Any, arguments: Any) -> None:
    events = scheduler._schedtrace_events
    if events is None:
        return
    noted: Noted = (site, budget)
    try:
        if request is not None:
            noted = (site, budget, request.request_id, request.status)
        refusal = why_refused(scheduler.kv_cache_manager, arguments)
        first, status = noted[2:] or (None, None)
        noted = (site, budget, first, status, 0, True, None, 0, 0, refusal)
    except Exception as error:
        _failed(scheduler, error)
    events.append(noted)


def _failed(scheduler: Any, error: Exception) -> None:
    """What the event lacks is left out, and the trace says so."""
    scheduler._schedtrace_recorder.mark_failed(error)
