"""One step explained: the answer of ``schedtrace step``; ``docs/commands.md`` describes its JSON form."""

import msgspec

from schedtrace.model.message import Message

STORY_SCHEMA_VERSION = 4


class Newcomer(msgspec.Struct, kw_only=True):
    """One request that reached the scheduler since the step before."""

    request_id: str
    prompt_tokens: int
    max_tokens: int | None
    queued_us: int
    on_its_way_us: int | None
    """From the front end to the scheduler; None where the front end's time is not known."""


class Leaver(msgspec.Struct, kw_only=True):
    """One request that left the scheduler since the step before."""

    request_id: str
    status: str
    output_tokens: int


class Scheduled(msgspec.Struct, kw_only=True):
    """What one request got in the step."""

    request_id: str
    phase: str
    work: str | None
    """``prefill``, ``recompute`` (of what a preemption had thrown away) or ``decode``; None: its prompt's
    length is not recorded."""
    computed_tokens: int
    scheduled_tokens: int
    prompt_tokens: int | None
    """None: the trace began after it had come."""
    draft_tokens: int
    wanted_tokens: int | None
    """Before the first cap; None: no cap made its chunk smaller."""
    caps: list[str]
    """The limits that made its chunk smaller, in their order."""


class Stop(msgspec.Struct, kw_only=True):
    """Where the step stopped or skipped; successive exits of the same kind are one entry."""

    loop: str
    kind: str
    cause: str
    detail: str | None
    location: str | None
    via: str
    count: int
    """How many exits this is."""
    request_ids: list[str]
    """The requests it concerned, as far as recorded."""
    budget_left: int
    """When the first of them was taken."""
    blocks_needed: int | None
    blocks_free: int | None
    message: Message
    """The same in one sentence."""


class Victim(msgspec.Struct, kw_only=True):
    """One request that was preempted."""

    request_id: str
    for_request_id: str | None
    lost_tokens: int
    blocks_needed: int | None
    blocks_freed: int | None
    in_schedule: bool
    message: Message
    """The same in one sentence."""


class Waiter(msgspec.Struct, kw_only=True):
    """One request that waited after the step."""

    request_id: str
    wanted_tokens: int
    since_step: int
    """The first step after which it still waited."""
    waited_ms: float | None
    """From when it was queued, or preempted, to the end of ``schedule()``."""
    preempted: bool
    """It had run before and lost its KV blocks."""


class RankTurn(msgspec.Struct, kw_only=True):
    """What one rank did in the common step of ranks in lock-step."""

    engine_rank: int
    step: int | None
    """Its own step; None: it called no ``schedule()``, or the trace lacks it."""
    dummy: bool | None
    """It had nothing to compute and ran a dummy batch; None: its trace does not tell."""
    requests: int
    prefill_tokens: int
    """With those that a preemption had thrown away."""
    decode_tokens: int
    num_running: int | None
    num_waiting: int | None
    """After its step; None: no step."""
    back_us: int | None
    """From the first rank's start to when its output was back, or its dummy batch over; None: not known."""


class WhatIf(msgspec.Struct, kw_only=True):
    """What a different limit would have allowed in this step."""

    limit: str
    """vLLM's name of the setting, or ``kv_blocks``."""
    now: int | None
    """Its value in the step; for ``kv_blocks`` the free blocks."""
    then: int | None
    """The assumed value."""
    request_ids: list[str]
    """Waiting or shortened requests that would have got more."""
    tokens: int
    """How many more tokens the step would have scheduled."""
    message: Message
    """The same in one sentence."""


class StepStory(msgspec.Struct, kw_only=True):
    """The answer of ``schedtrace step``."""

    schema_version: int = STORY_SCHEMA_VERSION
    path: str
    label: str
    engine_rank: int
    step: int
    trial: int | None
    start_us: int
    into_recording_us: int
    """The same on the clock of the run's first trace, which ``--from`` and ``--to`` count on."""
    schedule_us: int
    output_us: int | None
    output_tokens: int | None
    token_budget: int
    """Token budget that ``schedule()`` worked with."""
    remaining_budget: int
    token_budget_set: int | None = None
    """Token budget of the settings, where ``schedule()`` worked with less."""
    seats: int
    """How many requests may run at once."""
    num_running_before: int
    num_running_after: int
    num_waiting_before: int
    num_waiting_after: int
    num_not_ready_after: int
    kv_blocks_total: int | None
    kv_blocks_free_before: int | None
    kv_blocks_free_after: int | None
    arrived: list[Newcomer]
    """In the scheduler since the step before."""
    finished: list[Leaver]
    """Gone since the step before."""
    interruptions: list[Message]
    """Interruptions of the engine's usual steps right before this step, in it and right after it."""
    late: list[Newcomer]
    """At the front end before the step's output was back, but in the scheduler only after the step began."""
    scheduled: list[Scheduled]
    """What each scheduled request got, in vLLM's order."""
    preempted: list[Victim]
    stops: list[Stop]
    """In the order in which they were taken."""
    waiting: list[Waiter]
    """The requests that waited after the step, reconstructed from the trace, in the order of the queue."""
    waiting_agrees: bool
    """The reconstruction has as many as the recorder counted."""
    what_if: list[WhatIf]
    """What a different limit would have allowed; empty where the trace has not enough to compute it."""
    what_if_assumes: list[Message]
    """The assumptions of these answers."""
    problems: list[Message] = []
    """What the trace lacks: requests and steps of which nothing is said here."""
    facts: list[Message] = []
    """What the trace records beside the decisions: who holds the KV blocks, what the caches gave, when the
    worker executed the step, which requests are neither running nor waiting."""
    wave: int | None = None
    """Of ranks in lock-step: the wave."""
    step_counter: int | None = None
    """Likewise: the common step counter."""
    ranks: list[RankTurn] = []
    """All ranks in this common step; empty where ranks are not in lock-step."""
