"""Lines of the trace from the events of one ``schedule()`` call, off the scheduler's path."""

from collections import Counter
from collections.abc import Iterable, Sequence

from schedtrace.model.causes import WAITING_STATUS_CAUSES, Cap, Cause
from schedtrace.model.trace import AlsoSkipped, ChunkCap, Exit, Loop
from schedtrace.record.marks import guards
from schedtrace.record.marks.exits import SITES, Event, Noted, Site, as_events

MOST_PER_SITE = 64
"""Maximum number of exits of one site and cause in one call that are listed individually; more are only
counted.
"""

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
"""Cause and detail by the constant of ``exits.py`` that the mark noted."""

_WITH_DETAIL: dict[str, tuple[str, str | None]] = {
    guards.ONE_STEP_IN_FLIGHT: (Cause.OUTPUT_IN_FLIGHT, "pipeline_parallel"),
    guards.PADDED_BEYOND_MODEL: (Cause.SPEC_DECODE_PADDING, "max_model_len"),
}


def ended_loops(events: Iterable[Noted]) -> set[Loop]:
    """Return the loops whose end a mark noted, including those that the condition before them kept out."""
    sites = (SITES[event.site] for event in as_events(events))
    return {site.loop for site in sites if site.kind not in (None, "continue")}


def latest_preemption(events: Sequence[Noted]) -> Event | None:
    """Return the latest event if it was noted right before a preemption, else None."""
    for event in as_events(events[-1:]):
        site = SITES[event.site]
        if site.kind is None and not site.causes:
            return event
    return None


def sees_preemptions(sites: Iterable[int]) -> bool:
    """Return whether one of these marks is at a preemption."""
    return any(SITES[site].kind is None and not SITES[site].causes for site in sites)


def places(sites: Iterable[int]) -> int:
    """Return the number of marks that are at an exit or a cap."""
    return sum(bool(SITES[site].causes) for site in sites)


def to_lines(
    events: Iterable[Noted], remaining_budget: int, long_prefill_threshold: int
) -> tuple[list[Exit], list[ChunkCap]]:
    """Return a step's exits and caps as lines, in the order in which they were taken.

    Args:
        events: Events of one call.
        remaining_budget: Token budget left at its end, for schedulers whose budget the marks cannot see.
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
            exits[-1].also.append(AlsoSkipped(event.request_id, _budget_left(event, remaining_budget)))
            continue
        latest[alike] = line = Exit(
            loop=site.loop,
            kind=site.kind,
            cause=cause,
            request_id=event.request_id if counts[alike] <= MOST_PER_SITE else None,
            budget_left=_budget_left(event, remaining_budget),
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


def _budget_left(event: Event, remaining_budget: int) -> int:
    return remaining_budget if event.budget is None else event.budget


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
    """Return the cause and its detail; if a guard has several causes, the noted values decide."""
    cause = site.cause(event.part)
    cause_and_detail: tuple[str, str | None] = _WITH_DETAIL.get(cause, (cause, None))
    match cause:
        case guards.NOT_ELIGIBLE:
            cause_and_detail = _NOT_ELIGIBLE[event.part]
        case guards.BLOCKED_STATUS:
            cause_and_detail = (
                WAITING_STATUS_CAUSES.get(event.status_name or "", Cause.OTHER),
                event.status_name,
            )
        case guards.QUEUE_OR_INPUT_BUDGET | Cause.QUEUE_EMPTY:
            cause_and_detail = _queue_cause(event)
        case guards.ZERO_TOKENS:
            cap = zeroed[1] if zeroed is not None and zeroed[0] == event.request_id else None
            cause_and_detail = _ZERO_TOKEN_CAUSES.get(cap or "", Cause.NO_NEW_TOKENS), cap
            if cap is not None and guards.is_registered(cap):
                cause_and_detail = cap, None
        case Cause.PAUSED | Cause.TOKEN_BUDGET if event.pause_word == "PAUSED_ALL" or cause == Cause.PAUSED:
            cause_and_detail = Cause.PAUSED, event.pause_word  # that state sets the token budget to 0
        case Cause.MAX_NUM_SEQS if event.held_back:
            cause_and_detail = Cause.RANK_BALANCE, None  # the gate takes away the free seats
        case Cause.KV_BLOCKS:
            # Before vLLM 0.22 a method of its own checked the whole sequence.
            whole = "full_sequence" if "can_fit_full_sequence" in site.guard else None
            cause_and_detail = cause, event.refusal.limit if event.refusal else whole
    return cause_and_detail


def _queue_cause(event: Event) -> tuple[str, str | None]:
    """Return cause and detail of an exit at a queue that holds no request, or reports that it holds none."""
    if event.pause_word == "PAUSED_NEW" and (event.queued or event.request_id is not None):
        return Cause.PAUSED, event.pause_word  # somebody waits, in a queue that is closed
    return Cause.OTHER if event.queued else Cause.QUEUE_EMPTY, None


def _values(event: Event, site: Site) -> str | None:
    """Return the values that an unknown condition compared, as text."""
    if site.asks_queue(event.part):
        return f"{event.queued} waiting requests"
    pairs = zip(site.compared(event.part), event.values, strict=False)
    return "; ".join(f"{text} = {value}" for text, value in pairs) or None


def unknown_guards(sites: Iterable[int]) -> list[str]:
    """Return the sites whose cause this version cannot determine, as texts."""
    return [
        f"{SITES[site].location}: {SITES[site].condition(place)}"
        for site in sites
        for place, cause in enumerate(SITES[site].causes)
        if cause == Cause.OTHER
    ]
