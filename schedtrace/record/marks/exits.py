"""Events that the marks in ``schedule()`` record, and their conversion to lines with causes (``to_lines``).

A mark notes plain values at once, since vLLM's objects change after the exit. It never raises. A worked
example: sites 5 and 6 are two caps in a row, site 7 is the waiting loop's condition, site 8 an exit in it::

    num_new_tokens = min(num_new_tokens, threshold)          # site 5: Cap.LONG_PREFILL
    num_new_tokens = min(num_new_tokens, token_budget)       # site 6: Cap.TOKEN_BUDGET
    while self.waiting and token_budget > 0:                 # site 7: part 0 queue_empty, part 1 token_budget
        if len(self.running) == self.max_num_running_reqs:
            break                                            # site 8: max_num_seqs; refuses the head

==================================  ===================================  ==================================
what the marked code calls          event                                line
==================================  ===================================  ==================================
``exit_at_head(self, 8, 112,         site 8, budget 112, request_id w-3   ``Exit``: break, max_num_seqs,
queue)``                            (head of the queue)                  request w-3, budget_left 112
``end(self, 7, 0, None, None, 1)``  site 7, budget 0, part 1             ``Exit``: condition, token_budget,
                                                                         budget_left 0
``cap(self, 5, 64, request, 500,    site 6, budget 64, request_id w-3,   ``ChunkCap``: w-3, token_budget,
500, 64)``                          tokens_before 500, tokens_after 64   500 to 64 tokens
==================================  ===================================  ==================================

A request may not decode yet while its ``next_decode_eligible_step`` lies ahead, for one of two reasons. With
pipeline parallelism vLLM (0.23 and newer) lets it wait its turn between two decodes. A read-only request of a
diffusion model (0.31 and newer) waits, at any pipeline size, once all its denoising steps are in flight: it
ends with their output.
"""

import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import msgspec

from schedtrace.model.causes import WAITING_STATUS_CAUSES, Cap, Cause
from schedtrace.model.trace import AlsoSkipped, ChunkCap, Exit, ExitKind, Loop
from schedtrace.record import queues
from schedtrace.record.allocation import Refusal, why_refused
from schedtrace.record.disguise import RECORDERS
from schedtrace.record.marks import guards

recorder_by_id = RECORDERS.by_id

PP_STAGGER, READ_IN_FLIGHT, NOT_KNOWN_WHY = range(3)

_DIFFUSION = "vllm.v1.core.sched.diffusion_scheduler"


def why_not_eligible(scheduler: Any, request: Any) -> int:
    """Return why a request may not decode yet, as one of three constants; ``READ_IN_FLIGHT`` has priority."""
    diffusion = sys.modules.get(_DIFFUSION)
    if diffusion is not None and issubclass(type(scheduler), diffusion.DiffusionAsyncScheduler):
        width = diffusion.diffusion_canvas_width(request, scheduler.num_spec_tokens)
        if diffusion._read_in_flight(request, width):
            return READ_IN_FLIGHT
    return PP_STAGGER if getattr(scheduler, "use_pp", False) else NOT_KNOWN_WHY


_QUEUE_CAUSES = frozenset({Cause.QUEUE_EMPTY, guards.QUEUE_OR_INPUT_BUDGET})


@dataclass(frozen=True)
class Site:
    """Marked place in the source of a ``schedule()``."""

    loop: Loop
    kind: ExitKind | None
    """Kind of the exit; None for a cap or a preemption."""
    causes: tuple[str, ...]
    """Cause of the exit; if parts of the condition lead to different causes, one cause per part, in order of
    evaluation."""
    guard: str
    """Source text of the condition, cap or preemption; for an exit of unknown cause, with the latest
    assignments of the condition's flags."""
    location: str
    """Place in the source, as ``file:line``."""
    refuses_head: bool = False
    """Whether the exit refuses the head of the queue before the loop has taken a request from it."""
    parts: tuple[str, ...] = ()
    """Condition that was true for each part, if there are several causes."""
    operands: tuple[tuple[str, ...], ...] = ()
    """Texts of the operands that an unknown condition compares for each cause; the mark records their values.
    """

    def asks_queue(self, part: int) -> bool:
        """Return whether the part that decided tests whether a queue is empty."""
        return self.cause(part) in _QUEUE_CAUSES

    def cause(self, part: int) -> str:
        """Return the cause behind the part that decided."""
        return self.causes[part if len(self.causes) > 1 else 0]

    def condition(self, part: int) -> str:
        """Return the condition that held for the deciding part."""
        return self.parts[part] if len(self.parts) > 1 else self.guard

    def compared(self, part: int) -> tuple[str, ...]:
        """Return the texts of the operands that the deciding part compares."""
        return self.operands[part] if self.operands else ()


SITES: list[Site] = []
"""All marked places of this process; an event names its place by its number here."""

LONGEST_TEXT = 40
"""Maximum length, in characters, of a text that a condition compares; longer ones are cut off."""


class Event(msgspec.Struct, gc=False):
    """Record of one passed mark.

    Fields that most marks set come first, because positional arguments create a struct twice as fast.
    """

    site: int
    """Number of the place in ``SITES``."""
    budget: Any
    """Remaining token budget (int); None if the code at this place cannot see it."""
    part: int = 0
    """Number of the condition's part that decided."""
    pause: Any = None
    """vLLM's ``PauseState``; None before 0.17."""
    request_id: Any = None
    """Id of the request in question (str); None if there is none, or it is unknown."""
    status: Any = None
    """vLLM's ``RequestStatus`` of that request."""
    queued: int = 0
    """Number of requests that wait although the queue reports being empty."""
    tokens_before: int = 0
    """Tokens before a cap."""
    tokens_after: int = 0
    """Tokens after a cap."""
    refusal: Refusal | None = None
    """Reason for a failed allocation."""
    values: tuple[str, ...] = ()
    """Values of the operands of an unknown condition (see ``Site.operands``)."""
    held_back: bool = False
    """Whether balance scheduling keeps requests out of free seats (``queues.held_back``)."""


Noted = Event | tuple[int, Any, int, Any]
"""Record of a mark: an event or, if its other fields are empty, a tuple of its first fields.

In a steady decode, the only mark records that no request waits. A tuple is created and compared at half the
cost of a struct.
"""


def as_events(noted: Iterable[Noted]) -> list[Event]:
    """Return the marks' records as events."""
    return [Event(*fields) if isinstance(fields, tuple) else fields for fields in noted]


class Marks:
    """Object that the marks call; ``marking.py`` puts it in the place of a constant in the code.

    ``scheduler`` is the scheduler whose ``schedule()`` runs; its recorder collects the events of the current
    call.
    """

    @staticmethod
    def exit(
        scheduler: Any,
        site: int,
        budget: Any,
        request: Any,
        queue: Any,
        part: int = 0,
        values: tuple[Any, ...] = (),
    ) -> None:
        """Record that a ``break`` or ``continue`` is about to be executed."""
        if request is None and SITES[site].refuses_head:
            Marks.exit_at_head(scheduler, site, budget, queue, part, values)
            return
        recorder = recorder_by_id(id(scheduler))
        if recorder is None or (events := recorder.events) is None:
            return
        event: Event | None = None
        try:
            if request is not None:
                event = Event(site, budget, part, None, request.request_id, request.status)
            else:
                event = Event(site, budget, part)
            if values:
                event.values = _texts(values)
        except Exception as error:
            _failed(scheduler, error)
        events.append(event or Event(site, budget, part))

    @staticmethod
    def exit_at_head(
        scheduler: Any, site: int, budget: Any, queue: Any, part: int = 0, values: tuple[Any, ...] = ()
    ) -> None:
        """Record that a ``break`` is about to refuse the head of a queue, if any request waits."""
        recorder = recorder_by_id(id(scheduler))
        if recorder is None or (events := recorder.events) is None:
            return
        event: Event | None = None
        try:
            if not (recorder.queued or values):  # nobody waits: no queue need be read
                events.append((site, budget, part, queues.pause_state(scheduler)))
                return
            event = Event(site, budget, part, queues.pause_state(scheduler))
            if recorder.queued:
                head = queues.first_of(queue)
                _note_head(event, scheduler, events, queues.head(scheduler) if head is None else head)
                event.held_back = queues.held_back(scheduler)
            if values:
                event.values = _texts(values)
        except Exception as error:
            _failed(scheduler, error)
        events.append(event or Event(site, budget, part))

    @staticmethod
    def allocation_refused(scheduler: Any, site: int, budget: Any, request: Any, arguments: Any) -> None:
        """Record that ``allocate_slots`` has returned None, and that the code is about to leave the loop."""
        _note_refusal(scheduler, site, budget, request, arguments)
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
        part: int = 0,
        values: tuple[Any, ...] = (),
    ) -> None:
        """Record that a loop's condition, or the condition before a loop, was false.

        ``queue`` and ``index``: the list over which the loop iterates, and its current position.
        """
        recorder = recorder_by_id(id(scheduler))
        if recorder is None or (events := recorder.events) is None:
            return
        event: Event | None = None
        try:
            event = Event(site, budget, part, queues.pause_state(scheduler))
            if type(queue) is list and index < len(queue):
                left_out = queue[index]
                event.request_id, event.status = left_out.request_id, left_out.status
            elif recorder.queued and SITES[site].loop == "waiting":
                _note_head(event, scheduler, events, queues.head(scheduler))
            if values:
                event.values = _texts(values)
        except Exception as error:
            _failed(scheduler, error)
        events.append(event or Event(site, budget, part))

    @staticmethod
    def done(scheduler: Any, site: int) -> None:
        """Record that a loop ended at the end of its list; such an end refuses no request."""
        recorder = recorder_by_id(id(scheduler))
        if recorder is not None and (events := recorder.events) is not None:
            events.append(Event(site, None))

    @staticmethod
    def cap(scheduler: Any, site: int, budget: Any, request: Any, *tokens: int) -> None:
        """Record that one or more limits, from ``site`` on, have reduced the number of tokens.

        ``tokens``: the number before the first of these sites, and after each of them.
        """
        recorder = recorder_by_id(id(scheduler))
        if recorder is None or (events := recorder.events) is None:
            return
        request_id, status = None, None
        try:
            if request is not None:
                request_id, status = request.request_id, request.status
        except Exception as error:
            _failed(scheduler, error)
        try:
            for place, (before, after) in enumerate(pairwise(tokens), start=site):
                if after < before:
                    event = Event(place, budget, 0, None, request_id, status)
                    event.tokens_before, event.tokens_after = before, after
                    events.append(event)
        except Exception as error:
            _failed(scheduler, error)
            events.append(Event(site, budget, request_id=request_id, status=status))

    @staticmethod
    def preempts(scheduler: Any, site: int, request: Any, arguments: Any) -> None:
        """Record that ``allocate_slots`` returned None, so that a request is preempted for ``request``."""
        _note_refusal(scheduler, site, None, request, arguments)

    @staticmethod
    def preempting(scheduler: Any, victim: Any) -> None:
        """Record a request that ``schedule()`` itself is about to preempt, as in vLLM up to 0.11."""
        recorder = recorder_by_id(id(scheduler))
        if recorder is not None and recorder.events is not None:
            recorder.request_preempted(scheduler, victim)

    @staticmethod
    def victim_preempted(scheduler: Any) -> None:
        """Record that ``schedule()`` has freed the preempted request's blocks."""
        recorder = recorder_by_id(id(scheduler))
        if recorder is not None and recorder.events is not None:
            recorder.request_was_preempted()

    @staticmethod
    def why_not_eligible(scheduler: Any, request: Any) -> int:
        """Return why ``next_decode_eligible_step`` lies ahead, as the ``part`` of the exit's event."""
        try:
            return why_not_eligible(scheduler, request)
        except Exception as error:
            _failed(scheduler, error)
            return NOT_KNOWN_WHY


def _note_head(event: Event, scheduler: Any, events: list[Noted], head: Any) -> None:
    """Record the next request or, if a queue reports being empty, how many requests it may hold back.

    vLLM's own queues are really empty in this case. Any other queue may hold requests back: those that are
    neither running nor finished, and were not skipped in this call.
    """
    event.request_id = getattr(head, "request_id", None)
    if head is not None or not SITES[event.site].asks_queue(event.part) or queues.can_read_queues(scheduler):
        return
    sites = (SITES[earlier.site] for earlier in as_events(events))
    skipped = sum(site.loop == "waiting" and site.kind == "continue" for site in sites)
    event.queued = max(0, RECORDERS[scheduler].count_waiting(scheduler) - skipped)


def _texts(values: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the operands' values as texts; empty for a single bool, which adds nothing to the condition."""
    return () if len(values) == 1 and isinstance(values[0], bool) else tuple(map(plain_text, values))


def plain_text(value: Any) -> str:
    """Return a value as a short text; a collection becomes its length, and any other object its class."""
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


def _note_refusal(scheduler: Any, site: int, budget: Any, request: Any, arguments: Any) -> None:
    """Record a failed allocation with the limit behind it."""
    recorder = recorder_by_id(id(scheduler))
    if recorder is None or (events := recorder.events) is None:
        return
    event = Event(site, budget)
    try:
        if request is not None:
            event.request_id, event.status = request.request_id, request.status
        event.refusal = why_refused(scheduler.kv_cache_manager, arguments)
    except Exception as error:
        _failed(scheduler, error)
    events.append(event)


def _failed(scheduler: Any, error: Exception) -> None:
    """Write a notice that an event lacks a value, because the value could not be read."""
    if (recorder := recorder_by_id(id(scheduler))) is not None:
        recorder.mark_failed(error)


MOST_PER_SITE = 64
"""Maximum number of exits per site and cause that are listed individually for one call; further exits are
only counted."""

_ZERO_TOKEN_CAUSES: dict[str, Cause] = {
    Cap.ENCODER_BUDGET: Cause.ENCODER_BUDGET,
    Cap.MAMBA_ALIGNMENT: Cause.MAMBA_ALIGNMENT,
    Cap.PREFILL_LOOKAHEAD: Cause.PREFILL_LOOKAHEAD,
    Cap.TOKEN_BUDGET: Cause.TOKEN_BUDGET,
    Cap.INPUT_BUDGET: Cause.INPUT_BUDGET,
}


_NOT_ELIGIBLE: tuple[tuple[Cause, str | None], ...] = (
    (Cause.PP_STAGGER, None),
    (Cause.OUTPUT_IN_FLIGHT, "diffusion_read_only"),
    (Cause.OTHER, None),
)
"""Cause and detail for each result of ``why_not_eligible``, in the order of its constants."""

_WITH_DETAIL: dict[str, tuple[str, str | None]] = {
    guards.ONE_STEP_IN_FLIGHT: (Cause.OUTPUT_IN_FLIGHT, "pipeline_parallel"),
    guards.PADDED_BEYOND_MODEL: (Cause.SPEC_DECODE_PADDING, "max_model_len"),
}


def ended_loops(events: Iterable[Noted]) -> set[Loop]:
    """Return the loops whose end a mark recorded, including those skipped by the condition before them."""
    sites = (SITES[event.site] for event in as_events(events))
    return {site.loop for site in sites if site.kind not in (None, "continue")}


def latest_preemption(events: Sequence[Noted]) -> Event | None:
    """Return the latest event if it was recorded right before a preemption; otherwise None."""
    for event in as_events(events[-1:]):
        site = SITES[event.site]
        if site.kind is None and not site.causes:
            return event
    return None


def sees_preemptions(sites: Iterable[int]) -> bool:
    """Return whether any of these marks is at a preemption."""
    return any(SITES[site].kind is None and not SITES[site].causes for site in sites)


def places(sites: Iterable[int]) -> int:
    """Return the number of marks that are at an exit or a cap."""
    return sum(bool(SITES[site].causes) for site in sites)


def to_lines(
    events: Iterable[Noted], remaining_budget: int, long_prefill_threshold: int
) -> tuple[list[Exit], list[ChunkCap]]:
    """Return a step's exits and caps as lines, in the order in which they occurred.

    Args:
        events: Events of one call.
        remaining_budget: Token budget left after the call, for schedulers whose budget the marks cannot see.
        long_prefill_threshold: ``long_prefill_token_threshold`` as configured, to distinguish it from the
            adaptive threshold.
    """
    exits: list[Exit] = []
    caps: list[ChunkCap] = []
    counts: Counter[tuple[int, str, str | None]] = Counter()
    latest: dict[tuple[int, str, str | None], Exit] = {}
    zeroed: tuple[str | None, str] | None = None
    for event in as_events(events):
        site = SITES[event.site]
        if site.kind is None and site.causes:
            caps.append(_cap(event, site, long_prefill_threshold))
            if event.tokens_after == 0:
                zeroed = (event.request_id, caps[-1].cap)
            continue
        if site.kind is None:
            continue  # a preemption has a line of its own
        cause, detail = _cause(event, site, zeroed)
        if cause == guards.LOOP_DONE:
            continue
        budget_left = remaining_budget if event.budget is None else event.budget
        alike = (event.site, cause, detail)
        counts[alike] += 1
        if counts[alike] > MOST_PER_SITE + 1:
            latest[alike].count += 1
            continue
        if (
            counts[alike] <= MOST_PER_SITE
            and exits
            and exits[-1] is latest.get(alike)
            and event.refusal is None
            and cause not in {Cause.OTHER, Cause.KV_BLOCKS}  # the event adds its request and budget only
        ):
            exits[-1].also.append(AlsoSkipped(event.request_id, budget_left))
            continue
        latest[alike] = line = Exit(
            loop=site.loop,
            kind=site.kind,
            cause=cause,
            request_id=event.request_id if counts[alike] <= MOST_PER_SITE else None,
            budget_left=budget_left,
            detail=detail,
            guard=site.condition(event.part) if cause == Cause.OTHER else None,
            values=_values(event, site) if cause == Cause.OTHER else None,
            location=site.location,
            via="source",
        )
        if event.refusal is not None:
            line.blocks_needed, line.blocks_free = event.refusal.needed, event.refusal.free
        exits.append(line)
    return exits, caps


def _cap(event: Event, site: Site, long_prefill_threshold: int) -> ChunkCap:
    cap = site.causes[0]
    if cap == Cap.TOKEN_BUDGET and event.budget is not None and event.tokens_after < event.budget:
        cap = Cap.INPUT_BUDGET  # the smaller of the two is what was left of the slots for drafts
    if cap == Cap.LONG_PREFILL and event.tokens_after > long_prefill_threshold:
        cap = Cap.LONG_PREFILL_ADAPTIVE
    return ChunkCap(
        request_id=event.request_id,
        cap=cap,
        wanted_tokens=event.tokens_before,
        capped_tokens=event.tokens_after,
        location=site.location,
        statement=site.guard if cap == Cap.OTHER else None,
    )


def _cause(event: Event, site: Site, zeroed: tuple[str | None, str] | None) -> tuple[str, str | None]:
    """Return the cause and its detail; if a guard has several causes, the recorded values determine which."""
    cause = site.cause(event.part)
    pause = getattr(event.pause, "name", "UNPAUSED")
    cause_and_detail: tuple[str, str | None] = _WITH_DETAIL.get(cause, (cause, None))
    match cause:
        case guards.NOT_ELIGIBLE:
            cause_and_detail = _NOT_ELIGIBLE[event.part]
        case guards.BLOCKED_STATUS:
            status = getattr(event.status, "name", None)
            cause_and_detail = WAITING_STATUS_CAUSES.get(status or "", Cause.OTHER), status
        case guards.QUEUE_OR_INPUT_BUDGET | Cause.QUEUE_EMPTY:
            if pause == "PAUSED_NEW" and (event.queued or event.request_id is not None):
                cause_and_detail = Cause.PAUSED, pause  # somebody waits, in a closed queue
            else:
                cause_and_detail = Cause.OTHER if event.queued else Cause.QUEUE_EMPTY, None
        case guards.ZERO_TOKENS:
            cap = zeroed[1] if zeroed is not None and zeroed[0] == event.request_id else None
            cause_and_detail = _ZERO_TOKEN_CAUSES.get(cap or "", Cause.NO_NEW_TOKENS), cap
            if cap is not None and guards.is_registered(cap):
                cause_and_detail = cap, None
        case Cause.PAUSED | Cause.TOKEN_BUDGET if pause == "PAUSED_ALL" or cause == Cause.PAUSED:
            cause_and_detail = Cause.PAUSED, pause  # that state sets the token budget to 0
        case Cause.MAX_NUM_SEQS if event.held_back:
            cause_and_detail = Cause.RANK_BALANCE, None  # the gate takes away the free seats
        case Cause.KV_BLOCKS:
            # Before vLLM 0.22 a method of its own checked the whole sequence.
            whole = "full_sequence" if "can_fit_full_sequence" in site.guard else None
            cause_and_detail = cause, event.refusal.limit if event.refusal else whole
    return cause_and_detail


def _values(event: Event, site: Site) -> str | None:
    """Return the values that an unknown condition compared, as text."""
    if site.asks_queue(event.part):
        return f"{event.queued} waiting requests"
    pairs = zip(site.compared(event.part), event.values, strict=False)
    return "; ".join(f"{text} = {value}" for text, value in pairs) or None


def unknown_guards(sites: Iterable[int]) -> list[str]:
    """Return the location and condition of each site whose cause this version cannot determine."""
    return [
        f"{SITES[site].location}: {SITES[site].condition(place)}"
        for site in sites
        for place, cause in enumerate(SITES[site].causes)
        if cause == Cause.OTHER
    ]
