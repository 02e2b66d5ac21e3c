"""Document of ``schedtrace queue``: the requests that wait and run in engines now."""

from typing import Literal

import msgspec

from schedtrace.model.trace import Exit

MOST_ENTRIES = 10_000
"""Requests of each list in an answer; further requests are only counted."""


class QueueEntry(msgspec.Struct, kw_only=True):
    """A request between two steps."""

    request_id: str
    state: str
    """Its ``RequestStatus`` of vLLM in lower case: ``waiting``, ``preempted``, ``waiting_for_remote_kvs``."""
    age_s: float
    """Time since its arrival."""
    refused_for: str | None = None
    """Cause for which the engine's latest step gave it nothing: the skip that named it, or else the exit that
    ended the waiting loop. Null: it got tokens, or the cause is not known.
    """
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks: int
    """KV blocks that it holds in all cache groups."""
    num_preemptions: int | None = None
    priority: int = 0
    lora: str | None = None


class EngineQueue(msgspec.Struct, kw_only=True):
    """An engine between two of its steps."""

    rank: int
    pid: int
    model: str
    unix_s: float
    """Unix time of the observation."""
    held_us: float
    """Time for which the engine was held up for the observation."""
    between_steps: bool
    """Whether the engine was between two steps; if not, it was read within a step, and lists may be from two
    moments.
    """
    policy: str | None
    seats: int
    """Requests that may run at once."""
    token_budget: int
    blocks_usable: int | None
    """KV blocks without the null block; null if the pool is not vLLM's."""
    blocks_free: int | None
    pause: Literal["PAUSED_NEW", "PAUSED_ALL"] | None = None
    running: list[QueueEntry]
    """Running requests in the scheduler's order."""
    waiting: list[QueueEntry]
    """Waiting requests in the order in which they are taken; requests at the end may be in a queue that
    cannot be read.
    """
    input_requests: int | None = None
    """Requests that the engine's process has received and its thread has not read; they are in no list here.
    Null if not known. Requests still in sockets between front end and engine cannot be seen.
    """
    more_running: int = 0
    """Running requests beyond those in ``running``, which holds at most 10,000."""
    more_waiting: int = 0
    """Waiting requests beyond those in ``waiting``, which holds at most 10,000."""
    exits: list[Exit]
    """Exits of the latest step: where ``schedule()`` stopped or skipped; empty if not known."""

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self.running) + self.more_running

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self.waiting) + self.more_waiting


def within_bounds(queue: EngineQueue) -> EngineQueue:
    """Return a copy whose lists have at most ``MOST_ENTRIES`` entries, with the others counted."""
    return msgspec.structs.replace(
        queue,
        running=queue.running[:MOST_ENTRIES],
        waiting=queue.waiting[:MOST_ENTRIES],
        more_running=queue.more_running + max(0, len(queue.running) - MOST_ENTRIES),
        more_waiting=queue.more_waiting + max(0, len(queue.waiting) - MOST_ENTRIES),
    )


class EngineQueues(msgspec.Struct, kw_only=True):
    """All engines of a server, by rank."""

    engines: list[EngineQueue]
