"""A request's life: the answer of ``schedtrace request``; ``docs/commands.md`` describes its JSON form.

Times are milliseconds since the request arrived at the front end; where that is not recorded, since the first
thing that is.
"""

import msgspec

from schedtrace.model.message import Message

LIFE_SCHEMA_VERSION = 4


class LifeState(msgspec.Struct, kw_only=True):
    """Period of a request's life in one state; periods follow each other without a gap."""

    state: str
    """``front_end``, ``waiting``, ``prefill``, ``decode``, ``recompute``, ``preempted``, ``set_aside`` or
    ``stalled``; ``interrupted`` while the engine was paused, did something else, or took far too long for a
    step; ``not_recorded`` where steps or parts of the trace are missing; ``unrecorded`` before the recording
    of a request that was there when it began."""
    cause: str | None
    """Cause of the wait, or of tokens kept from it: a word of ``docs/causes.md``, or ``next_step``; of
    ``interrupted`` the ``kind`` of the finding ``interruption``."""
    from_ms: float
    to_ms: float
    first_step: int | None
    """The first of the steps that refused or scheduled it; None if no step knew of it."""
    last_step: int | None
    tokens: int
    """Tokens scheduled for the request in these steps."""
    device_ms: float
    """Part of the time in which the device executed a batch, with this request or without it."""
    of_state: str | None = None
    """State that continues afterwards, for ``interrupted``."""

    @property
    def steps(self) -> int:
        """Number of steps from ``first_step`` to ``last_step``."""
        if self.first_step is None or self.last_step is None:
            return 0
        return self.last_step - self.first_step + 1


class LifeEvent(msgspec.Struct, kw_only=True):
    """Event in the life of a request."""

    at_ms: float
    what: str
    """``arrived``, ``queued``, ``scheduled``, ``chunk``, ``first_token``, ``decode``, ``preempted``,
    ``resumed``, ``waited`` (in vain), ``interrupted`` (while it ran) or ``finished``; where the trace has it
    ``present`` (there when the recording began), ``received``, ``asked``, ``grammar``, ``kv_load``,
    ``cached``, ``abort``, ``drafts``."""
    step: int | None
    last_step: int | None
    """Last step of a run of decodes; otherwise the same as ``step``."""
    message: Message
    """The same in a phrase."""


class Gap(msgspec.Struct, kw_only=True):
    """Time between two consecutive outputs of a request."""

    step: int
    """The step whose output ended it."""
    gap_ms: float
    preempted: bool
    """Whether the request was preempted meanwhile."""


class Life(msgspec.Struct, kw_only=True):
    """The answer of ``schedtrace request``."""

    schema_version: int = LIFE_SCHEMA_VERSION
    path: str
    label: str
    engine_rank: int
    request_id: str
    trial: int | None
    into_recording_ms: float
    """Time of its arrival, on the clock of the run's first trace."""
    prompt_tokens: int | None
    max_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    """Prompt tokens found in a cache at its first scheduling."""
    num_preemptions: int
    """Preemptions by the scheduler in this trace, counted as ``analyze`` counts them."""
    num_cache_resets: int
    """Preemptions by a reset of the prefix cache, counted separately."""
    status: str | None
    """``RequestStatus`` name without ``FINISHED_``; None if it did not leave while the trace was recorded."""
    e2e_ms: float | None
    """Time from arrival to leaving the scheduler: the sum of ``states``. None if it did not leave."""
    ttft_ms: float | None
    """Time from arrival to first output."""
    states: list[LifeState]
    events: list[LifeEvent]
    outputs: int
    """Number of steps whose output contained a token of this request."""
    mean_gap_ms: float | None
    """Mean time between these outputs."""
    gaps: list[Gap]
    """The longest gaps, at most ``MOST_GAPS``."""
    problems: list[Message] = []
    """Gaps of the trace, some of which may concern this request."""


MOST_GAPS = 5
