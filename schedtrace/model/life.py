"""One request's life: the answer of ``schedtrace request``; ``docs/commands.md`` describes its JSON form.

Times are milliseconds since the request arrived at the front end; where that is not recorded, since the first
thing that is.
"""

import msgspec

from schedtrace.model.message import Message

LIFE_SCHEMA_VERSION = 2


class Span(msgspec.Struct, kw_only=True):
    """A piece of the time that a request took; the spans follow each other without a gap."""

    state: str
    """``front_end``, ``waiting``, ``prefill``, ``decode``, ``preempted`` or ``recompute``."""
    from_ms: float
    to_ms: float


class WaitedFor(msgspec.Struct, kw_only=True):
    """One cause that it waited for."""

    cause: str
    """A word of ``docs/causes.md``."""
    steps: int
    wait_ms: float
    """From these steps to the next one each."""


class Wait(msgspec.Struct, kw_only=True):
    """One time that it was in the waiting queue."""

    since_step: int | None
    """First step after which it waited; None: the first step that could schedule it did."""
    left_step: int | None
    """The step that scheduled it; None: none did."""
    preempted: bool
    """It had lost its KV blocks before."""
    wait_ms: float
    before_step_ms: float
    """Of these, until the next step began."""
    causes: list[WaitedFor]
    """The rest, the longest first."""


class LifeEvent(msgspec.Struct, kw_only=True):
    """Something that happened to it."""

    at_ms: float
    what: str
    """``arrived``, ``queued``, ``scheduled``, ``chunk``, ``first_token``, ``decode``, ``preempted``,
    ``resumed``, ``waited`` (in vain) or ``finished``; where the trace has it ``received``, ``asked``,
    ``grammar``, ``kv_load``, ``cached``, ``abort``, ``drafts``."""
    step: int | None
    last_step: int | None
    """Of a run of decodes; else the same as ``step``."""
    message: Message
    """The same in a phrase."""


class Gap(msgspec.Struct, kw_only=True):
    """The time between two of its outputs."""

    step: int
    """The step whose output ended it."""
    gap_ms: float
    preempted: bool
    """It was preempted meanwhile."""


class StateRun(msgspec.Struct, kw_only=True):
    """Steps that follow each other in which it was in the same state."""

    state: str
    """As in ``Span``, or ``skipped``: it was running and got nothing."""
    first_step: int
    steps: int


class Life(msgspec.Struct, kw_only=True):
    """The answer of ``schedtrace request``."""

    schema_version: int = LIFE_SCHEMA_VERSION
    path: str
    label: str
    engine_rank: int
    request_id: str
    trial: int | None
    prompt_tokens: int | None
    max_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    """Prompt tokens found in a cache at its first scheduling."""
    num_preemptions: int
    """By the scheduler, as recorded in this trace; as ``analyze`` counts them."""
    num_cache_resets: int
    """How often a reset of the prefix cache preempted it, apart from these."""
    status: str | None
    """``RequestStatus`` name without ``FINISHED_``; None: it did not leave while the trace was recorded."""
    e2e_ms: float | None
    """From its arrival to its last output, or until it was aborted: the sum of ``spans``. None: it did not
    end."""
    ttft_ms: float | None
    """From its arrival to its first output."""
    spans: list[Span]
    waits: list[Wait]
    events: list[LifeEvent]
    outputs: int
    """Steps whose output had a token of it."""
    mean_gap_ms: float | None
    """Between these outputs."""
    gaps: list[Gap]
    """The longest of them, at most ``MOST_GAPS``."""
    states: list[StateRun]
    """Step by step, from the first one that it waited for or was scheduled in to the last."""


MOST_GAPS = 5
