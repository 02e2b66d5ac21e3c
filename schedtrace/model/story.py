"""Stories of a step and of a request: the documents of ``schedtrace step`` and ``schedtrace request``.

``docs/commands.md`` describes their JSON forms. The times of a request's life are milliseconds since its
arrival at the front end or, if that is not recorded, since the first recorded event.
"""

import msgspec

from schedtrace.model.message import Message

STORY_SCHEMA_VERSION = 4


class Newcomer(msgspec.Struct, kw_only=True):
    """Request that reached the scheduler since the step before."""

    request_id: str
    prompt_tokens: int
    max_tokens: int | None
    queued_us: int
    on_its_way_us: int | None
    """Time from front end to scheduler; None if the arrival at the front end is not recorded."""


class Leaver(msgspec.Struct, kw_only=True):
    """Request that left the scheduler since the step before."""

    request_id: str
    status: str
    output_tokens: int


class Scheduled(msgspec.Struct, kw_only=True):
    """Tokens that a request got in the step."""

    request_id: str
    phase: str
    work: str | None
    """``prefill``, ``recompute`` (of tokens that a preemption discarded) or ``decode``; None if the prompt's
    length is not recorded."""
    computed_tokens: int
    scheduled_tokens: int
    prompt_tokens: int | None
    """Length of the prompt; None if the trace began after the request had arrived."""
    draft_tokens: int
    wanted_tokens: int | None
    """Tokens wanted before the first cap; None if no cap made its chunk smaller."""
    caps: list[str]
    """Limits that made the request's chunk smaller, in the order of their application."""


class Stop(msgspec.Struct, kw_only=True):
    """Place at which the step stopped, or skipped requests; successive exits of one kind share an entry."""

    loop: str
    kind: str
    cause: str
    detail: str | None
    location: str | None
    via: str
    count: int
    """Number of exits in this entry."""
    request_ids: list[str]
    """Requests that the exits concerned, as far as recorded."""
    budget_left: int
    """Token budget left when the first exit of the entry was taken."""
    blocks_needed: int | None
    blocks_free: int | None
    message: Message
    """Sentence with the same content."""


class Victim(msgspec.Struct, kw_only=True):
    """A preempted request."""

    request_id: str
    for_request_id: str | None
    lost_tokens: int
    blocks_needed: int | None
    blocks_freed: int | None
    in_schedule: bool
    message: Message
    """Sentence with the same content."""


class Waiter(msgspec.Struct, kw_only=True):
    """Request that waited after the step."""

    request_id: str
    wanted_tokens: int
    since_step: int
    """First step after which the request still waited."""
    waited_ms: float | None
    """Time from when the request was queued or preempted to the end of ``schedule()``."""
    preempted: bool
    """Whether the request had run before and lost its KV blocks."""


class RankTurn(msgspec.Struct, kw_only=True):
    """Part that one rank had in a common step of ranks in lock-step."""

    engine_rank: int
    step: int | None
    """Number of the rank's own step; None if the rank called no ``schedule()``, or the trace lacks the step.
    """
    dummy: bool | None
    """Whether the rank had nothing to compute and ran a dummy batch; None if not recorded."""
    requests: int
    prefill_tokens: int
    """Prefill tokens, including those recomputed after a preemption."""
    decode_tokens: int
    num_running: int | None
    num_waiting: int | None
    """Number of requests that waited after the rank's step; None without a step."""
    back_us: int | None
    """Time from the first rank's start to this rank's output, or to the end of its dummy batch; None if not
    known."""


class WhatIf(msgspec.Struct, kw_only=True):
    """Effect that a different limit would have had on this step."""

    limit: str
    """vLLM's name of the setting, or ``kv_blocks``."""
    now: int | None
    """Value of the limit in the step; for ``kv_blocks``, the number of free blocks."""
    then: int | None
    """Value of the limit that is assumed instead."""
    request_ids: list[str]
    """Waiting or shortened requests that would have got more tokens."""
    tokens: int
    """Additional tokens that the step would have scheduled."""
    message: Message
    """Sentence with the same content."""


class StepStory(msgspec.Struct, kw_only=True):
    """Document of ``schedtrace step``."""

    schema_version: int = STORY_SCHEMA_VERSION
    path: str
    label: str
    engine_rank: int
    step: int
    trial: int | None
    start_us: int
    into_recording_us: int
    """Start of the step on the clock of the run's first trace, to which ``--from`` and ``--to`` refer."""
    schedule_us: int
    output_us: int | None
    output_tokens: int | None
    token_budget: int
    """Token budget that ``schedule()`` worked with."""
    remaining_budget: int
    token_budget_set: int | None = None
    """Token budget according to the settings, if ``schedule()`` worked with a smaller one."""
    seats: int
    """Maximum number of running requests (``max_num_seqs``)."""
    num_running_before: int
    num_running_after: int
    num_waiting_before: int
    num_waiting_after: int
    num_not_ready_after: int
    kv_blocks_total: int | None
    kv_blocks_free_before: int | None
    kv_blocks_free_after: int | None
    arrived: list[Newcomer]
    """Requests that reached the scheduler since the step before."""
    finished: list[Leaver]
    """Requests that left the scheduler since the step before."""
    interruptions: list[Message]
    """Phrases about interruptions of the engine right before, during and right after this step."""
    late: list[Newcomer]
    """Requests that reached the front end before the step's output, but reached the scheduler only after the
    step began."""
    scheduled: list[Scheduled]
    """Scheduled requests and their tokens, in vLLM's order."""
    preempted: list[Victim]
    stops: list[Stop]
    """Exits in the order in which they were taken."""
    waiting: list[Waiter]
    """Requests that waited after the step, reconstructed from the trace, in queue order."""
    waiting_agrees: bool
    """Whether the reconstruction has as many requests as the recorder counted."""
    what_if: list[WhatIf]
    """Effects of different limits; empty if the trace lacks the facts to compute them."""
    what_if_assumes: list[Message]
    """Assumptions behind ``what_if``."""
    problems: list[Message] = []
    """Sentences about gaps in the trace; requests and steps in these gaps may be missing from this story."""
    facts: list[Message] = []
    """Recorded facts other than decisions: holders of KV blocks, cache hits, execution by the worker,
    requests neither running nor waiting.
    """
    wave: int | None = None
    """Wave of ranks in lock-step."""
    step_counter: int | None = None
    """Common step counter of ranks in lock-step."""
    ranks: list[RankTurn] = []
    """All ranks in this common step; empty if ranks are not in lock-step."""


LIFE_SCHEMA_VERSION = 4


class LifeState(msgspec.Struct, kw_only=True):
    """Period of a request's life in one state; periods follow each other without a gap."""

    state: str
    """``front_end``, ``waiting``, ``prefill``, ``decode``, ``recompute``, ``preempted``, ``set_aside`` or
    ``stalled``; ``interrupted`` while the engine was paused, did something else, or took far too long for a
    step; ``not_recorded`` where steps or parts of the trace are missing; ``unrecorded`` before the recording
    began, if the request was already there."""
    cause: str | None
    """Cause of the wait, or of tokens withheld from the request: a word of ``docs/causes.md``, or
    ``next_step``; for ``interrupted``, the ``kind`` in the finding ``interruption``."""
    from_ms: float
    to_ms: float
    first_step: int | None
    """First step that refused or scheduled the request in this period; None if no step knew of the request.
    """
    last_step: int | None
    tokens: int
    """Tokens scheduled for the request in the period."""
    device_ms: float
    """Part of the time in which the device executed a batch, whether this request was in it or not."""
    of_state: str | None = None
    """State that continues after an interruption (``interrupted``)."""

    @property
    def step_count(self) -> int:
        """Number of steps from ``first_step`` to ``last_step``."""
        if self.first_step is None or self.last_step is None:
            return 0
        return self.last_step - self.first_step + 1


class LifeEvent(msgspec.Struct, kw_only=True):
    """Event in the life of a request."""

    at_ms: float
    what: str
    """``arrived``, ``queued``, ``scheduled``, ``chunk``, ``first_token``, ``decode``, ``preempted``,
    ``resumed``, ``waited`` (in vain), ``interrupted`` (while it ran) or ``finished``; if the trace has them,
    ``present`` (present when the recording began), ``received``, ``asked``, ``grammar``, ``kv_load``,
    ``cached``, ``abort``, ``drafts``."""
    step: int | None
    last_step: int | None
    """Last step of a series of decodes; otherwise the same as ``step``."""
    message: Message
    """Phrase with the same content."""


class Gap(msgspec.Struct, kw_only=True):
    """Time between two consecutive outputs of one request."""

    step: int
    """Step whose output ended the gap."""
    gap_ms: float
    preempted: bool
    """Whether the request was preempted during the gap."""


class Life(msgspec.Struct, kw_only=True):
    """Document of ``schedtrace request``."""

    schema_version: int = LIFE_SCHEMA_VERSION
    path: str
    label: str
    engine_rank: int
    request_id: str
    trial: int | None
    into_recording_ms: float
    """Time of the request's arrival on the clock of the run's first trace."""
    prompt_tokens: int | None
    max_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    """Prompt tokens found in a cache when the request was first scheduled."""
    num_preemptions: int
    """Number of preemptions by the scheduler in this trace, counted as ``analyze`` counts them."""
    num_cache_resets: int
    """Number of preemptions by a reset of the prefix cache, which are counted separately."""
    status: str | None
    """``RequestStatus`` name without ``FINISHED_``; None if the request did not leave while the trace was
    recorded."""
    e2e_ms: float | None
    """Time from the request's arrival until it left the scheduler: the sum of ``states``. None if it did not
    leave."""
    ttft_ms: float | None
    """Time from arrival to first output."""
    states: list[LifeState]
    events: list[LifeEvent]
    outputs: int
    """Number of steps whose output contained a token of this request."""
    mean_gap_ms: float | None
    """Mean time between outputs with a token of the request."""
    gaps: list[Gap]
    """The longest gaps, at most ``MOST_GAPS``."""
    problems: list[Message] = []
    """Sentences about gaps in the trace, some of which may concern this request."""


MOST_GAPS = 5
