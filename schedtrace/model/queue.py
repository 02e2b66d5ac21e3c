"""The document of ``schedtrace queue``: who waits and who runs in engines now."""

from typing import Literal

import msgspec

from schedtrace.model.trace import Exit

MOST_ENTRIES = 10_000
"""Requests of each list in an answer; more are counted."""


class QueueEntry(msgspec.Struct, kw_only=True):
    """A request between two steps."""

    request_id: str
    state: str
    """Its ``RequestStatus`` of vLLM in lower case: ``waiting``, ``preempted``, ``waiting_for_remote_kvs``."""
    age_s: float
    """Time since arrival."""
    refused_for: str | None = None
    """The cause for which the engine's latest step gave it nothing: the skip that named it, else what ended
    the waiting loop. Null: it got something, or nobody knows."""
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks: int
    """KV blocks that it holds, in all cache groups."""
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
    """Time that the engine was held up for the observation."""
    between_steps: bool
    """False: it did not come to the end of a step, and was read meanwhile: lists may be of two moments."""
    policy: str | None
    seats: int
    """Requests that may run at once."""
    token_budget: int
    blocks_usable: int | None
    """KV blocks without the null block; null where the pool is not vLLM's."""
    blocks_free: int | None
    pause: Literal["PAUSED_NEW", "PAUSED_ALL"] | None = None
    running: list[QueueEntry]
    """In the scheduler's order."""
    waiting: list[QueueEntry]
    """In the order in which they are taken; those at the end that are in no queue that can be read."""
    input_requests: int | None = None
    """Requests that the engine's process has received and its thread has not taken: they are in no list here.
    Null: not known. What is still in sockets between front end and engine cannot be seen."""
    more_running: int = 0
    """Requests that run beside those in ``running``, which holds 10,000 at most."""
    more_waiting: int = 0
    """Requests that wait behind those in ``waiting``, which holds 10,000 at most."""
    exits: list[Exit]
    """Exits of the latest step: where ``schedule()`` stopped or skipped; empty: not known."""

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self.running) + self.more_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self.waiting) + self.more_waiting


def within_bounds(queue: EngineQueue) -> EngineQueue:
    """Return a copy whose lists hold ``MOST_ENTRIES`` at most, and which counts the others."""
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
