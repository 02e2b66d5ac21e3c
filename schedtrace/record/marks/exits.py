"""What the marks in ``schedule()`` note, and the trace lines that are made of it later.

A mark appends one tuple of plain values, since the objects change after the exit; an ``Event`` is made of it
off the scheduler's path. It never raises.

A request may not decode yet while its ``next_decode_eligible_step`` lies ahead, for one of two reasons. With
pipeline parallelism vLLM (0.23 and newer) lets it wait its turn between two decodes. A read-only request of a
diffusion model (0.31 and newer) waits, at any pipeline size, once all its denoising steps are in flight: it
ends with their output.
"""

import sys
from collections import deque
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import msgspec

from schedtrace.model.causes import Cause
from schedtrace.model.trace import ExitKind, Loop
from schedtrace.record import queues
from schedtrace.record.allocation import Refusal, why_refused
from schedtrace.record.disguise import RECORDERS
from schedtrace.record.marks import guards

recorder_by_id = RECORDERS.by_id

PP_STAGGER, READ_IN_FLIGHT, NOT_KNOWN_WHY = range(3)

_DIFFUSION = "vllm.v1.core.sched.diffusion_scheduler"


def why_not_eligible(scheduler: Any, request: Any) -> int:
    """One of the three constants; of a read in flight that awaits its turn as well, the former."""
    diffusion = sys.modules.get(_DIFFUSION)
    if diffusion is not None and issubclass(type(scheduler), diffusion.DiffusionAsyncScheduler):
        width = diffusion.diffusion_canvas_width(request, scheduler.num_spec_tokens)
        if diffusion._read_in_flight(request, width):
            return READ_IN_FLIGHT
    return PP_STAGGER if getattr(scheduler, "use_pp", False) else NOT_KNOWN_WHY


_QUEUE_CAUSES = frozenset({Cause.QUEUE_EMPTY, guards.QUEUE_OR_INPUT_BUDGET})


@dataclass(frozen=True)
class Site:
    """One marked place."""

    loop: Loop
    kind: ExitKind | None
    """None: a cap or a preemption, no exit."""
    causes: tuple[str, ...]
    """One; where parts of a condition lead to several, one for each part, in the order of evaluation."""
    guard: str
    """The condition, as the source has it; of one that is not known, what was true of it."""
    location: str
    """``file:line``."""
    refuses_head: bool = False
    """Whether it is the first in the queue whom it refuses, where no request was taken yet."""
    parts: tuple[str, ...] = ()
    """For each of several causes, what was true of that part of the condition."""
    operands: tuple[tuple[str, ...], ...] = ()
    """For each cause that is not known, the texts of what is compared there; the mark has their values."""

    def asks_queue(self, which: int) -> bool:
        """Whether the part that decided says that a queue holds nobody."""
        return self.cause(which) in _QUEUE_CAUSES

    def cause(self, which: int) -> str:
        """That of the part that decided."""
        return self.causes[which if len(self.causes) > 1 else 0]

    def condition(self, which: int) -> str:
        """What was true of the part that decided."""
        return self.parts[which] if len(self.parts) > 1 else self.guard

    def compared(self, which: int) -> tuple[str, ...]:
        """The texts of what the part that decided compares."""
        return self.operands[which] if self.operands else ()


SITES: list[Site] = []
"""All marked places of this process; an event says its place by its number here."""

LONGEST_TEXT = 40
"""Characters of a text that a condition compares."""

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
    """Of a condition with several parts: the number of the one that decided."""
    queued: int = 0
    """Requests that wait although the queue that is looked at says that it holds none."""
    pause: str = "UNPAUSED"
    """Noted as vLLM's ``PauseState``."""
    before: int = 0
    now: int = 0
    """Tokens before and after a cap."""
    refusal: Refusal | None = None
    values: tuple[str, ...] = ()
    """What an unknown condition compared (``Site.operands``)."""
    held_back: bool = False
    """Other ranks take the seats that are free (``queues.held_back``)."""


def event_of(noted: Noted) -> Event:
    """What a mark noted, with words in place of vLLM's enumerations."""
    event = Event(*noted)
    event.status = getattr(event.status, "name", None)
    event.pause = getattr(event.pause, "name", "UNPAUSED")
    return event


class Marks:
    """The object that the marks call: it stands in place of a constant of the code.

    ``scheduler`` is the one that is scheduling; its recorder keeps the events of the call that runs.
    """

    @staticmethod
    def exit(
        scheduler: Any,
        site: int,
        budget: Any,
        request: Any,
        queue: Any,
        which: int = 0,
        values: tuple[Any, ...] = (),
    ) -> None:
        """A ``break`` or ``continue`` is about to be taken."""
        recorder = recorder_by_id(id(scheduler))
        if recorder is None or (events := recorder.events) is None:
            return
        noted: Noted = (site, budget, None, None, which)
        try:
            if request is not None:
                noted = (site, budget, request.request_id, request.status, which)
            elif SITES[site].refuses_head:
                noted = (*noted, 0, queues.pause_state(scheduler))
                if recorder.queued:  # or nobody waits, and no queue need be read
                    following = queues.first_of(queue)
                    if following is None:
                        following = queues.head(scheduler)
                    noted = (site, budget, getattr(following, "request_id", None), *noted[3:])
                    if following is None and SITES[site].asks_queue(which):
                        noted = _with_queue(scheduler, events, noted)
                noted = (*noted, 0, 0, None, (), queues.held_back(scheduler))
            if values:
                noted = _with_values(noted, values)
        except Exception as error:
            _failed(scheduler, error)
        events.append(noted)

    @staticmethod
    def refused(scheduler: Any, site: int, budget: Any, request: Any, arguments: Any) -> None:
        """``allocate_slots`` has returned None, and the loop is about to be left."""
        _refused(scheduler, site, budget, request, arguments)
        recorder = recorder_by_id(id(scheduler))
        if recorder is None or request is None or recorder.events is None:
            return
        try:
            recorder.facts.head_refused(scheduler, request, arguments)
        except Exception as error:
            recorder.mark_failed(error)

    @staticmethod
    def end(
        scheduler: Any,
        site: int,
        budget: Any,
        queue: Any,
        index: Any,
        which: int = 0,
        values: tuple[Any, ...] = (),
    ) -> None:
        """A loop's condition, or the gate before a loop, was false.

        ``queue`` and ``index``: the loop went through the one by the other.
        """
        recorder = recorder_by_id(id(scheduler))
        if recorder is None or (events := recorder.events) is None:
            return
        noted: Noted = (site, budget, None, None, which)
        try:
            noted = (site, budget, None, None, which, 0, queues.pause_state(scheduler))
            if type(queue) is list and index < len(queue):
                left_out = queue[index]
                noted = (site, budget, left_out.request_id, left_out.status, *noted[4:])
            elif recorder.queued and SITES[site].loop == "waiting":
                following = queues.head(scheduler)
                noted = (site, budget, getattr(following, "request_id", None), *noted[3:])
                if following is None and SITES[site].asks_queue(which):
                    noted = _with_queue(scheduler, events, noted)
            if values:
                noted = _with_values(noted, values)
        except Exception as error:
            _failed(scheduler, error)
        events.append(noted)

    @staticmethod
    def cap(scheduler: Any, site: int, budget: Any, request: Any, *tokens: int) -> None:
        """Some of the limits from ``site`` on have made the number of tokens smaller.

        ``tokens``: before the first of these sites, and after each of them.
        """
        recorder = recorder_by_id(id(scheduler))
        if recorder is None or (events := recorder.events) is None:
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
                    events.append((place, budget, first, status, 0, 0, None, before, now))
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
        recorder = recorder_by_id(id(scheduler))
        if recorder is not None and recorder.events is not None:
            recorder.request_preempted(scheduler, victim)

    @staticmethod
    def preempted(scheduler: Any) -> None:
        """It has freed the victim's blocks."""
        recorder = recorder_by_id(id(scheduler))
        if recorder is not None and recorder.events is not None:
            recorder.request_was_preempted()

    @staticmethod
    def why_not_eligible(scheduler: Any, request: Any) -> int:
        """Which of the reasons for a ``next_decode_eligible_step`` ahead it is: a number for ``end``."""
        try:
            return why_not_eligible(scheduler, request)
        except Exception as error:
            _failed(scheduler, error)
            return NOT_KNOWN_WHY


_DEFAULTS = tuple(field.default for field in msgspec.structs.fields(Event))


def _with_queue(scheduler: Any, events: list[Noted], noted: Noted) -> Noted:
    """``noted`` with how many are left in a queue that has said it holds nobody.

    vLLM's own queues hold nobody then. Another one may hold back whom it has: whoever neither runs, nor is
    done, nor was skipped in this call.
    """
    if queues.readable(scheduler):
        return noted
    skips = (SITES[one[0]] for one in events)
    skipped = sum(site.loop == "waiting" and site.kind == "continue" for site in skips)
    left = RECORDERS[scheduler].num_waiting(scheduler) - skipped
    return (*noted[:5], max(0, left), *noted[6:])


def _with_values(noted: Noted, values: tuple[Any, ...]) -> Noted:
    if len(values) == 1 and isinstance(values[0], bool):
        return noted  # what was true of it says as much
    whole = (*noted, *_DEFAULTS[len(noted) :])
    place = Event.__struct_fields__.index("values")
    return (*whole[:place], tuple(map(plain_text, values)), *whole[place + 1 :])


def plain_text(value: Any) -> str:
    """A value as text, without asking any object but Python's own: others are told by their class."""
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return repr(value)
    if kind is str:
        return repr(value if len(value) <= LONGEST_TEXT else f"{value[:LONGEST_TEXT]}...")
    if issubclass(kind, Enum):
        return f"{kind.__name__}.{value._name_}"
    if kind in (list, tuple, dict, set, frozenset, deque):
        return f"{kind.__name__} of {len(value)}"
    return f"a {kind.__name__}"


def _refused(scheduler: Any, site: int, budget: Any, request: Any, arguments: Any) -> None:
    recorder = recorder_by_id(id(scheduler))
    if recorder is None or (events := recorder.events) is None:
        return
    noted: Noted = (site, budget)
    try:
        if request is not None:
            noted = (site, budget, request.request_id, request.status)
        refusal = why_refused(scheduler.kv_cache_manager, arguments)
        first, status = noted[2:] or (None, None)
        noted = (site, budget, first, status, 0, 0, None, 0, 0, refusal)
    except Exception as error:
        _failed(scheduler, error)
    events.append(noted)


def _failed(scheduler: Any, error: Exception) -> None:
    """What the event lacks is left out, and the trace says so."""
    if (recorder := recorder_by_id(id(scheduler))) is not None:
        recorder.mark_failed(error)
