"""vLLM's own scheduler classes with a gate before their admissions, and nothing else.

``schedule()`` stays vLLM's. While the gate is closed it is called with as many seats as are taken, so its
waiting loop ends where it ends without a free seat. vLLM 0.10 to 0.33 read that number there and, in 0.10 to
0.30, where they assert that not more requests run than there are seats.
"""

import types
from collections.abc import Sequence
from functools import cache
from typing import Any


def closed(own: int, ranks: Sequence[int], max_num_seqs: int) -> bool:
    """Return whether a rank admits no request, neither a new nor a preempted one.

    No rank admits while one of them runs ``max_num_seqs - 1`` requests or more. A rank that runs none may
    always admit: so each rank with requests has one to run, and the ranks cannot wait for each other.

    Args:
        own: Number of requests that run on this rank now.
        ranks: Requests that ran on each rank, this one included, when they were gathered last. With fewer
            than two ranks, the gate is open.
        max_num_seqs: Seats of each rank.
    """
    return own > 0 and len(ranks) > 1 and max(ranks) >= max_num_seqs - 1


class _Gate:
    """Gate that ``balanced`` puts before a scheduler class."""

    held_back_by_ranks = False
    """Whether the latest ``schedule()`` had a free seat and the gate was closed; the recorder reads it."""
    _ranks: tuple[int, ...] = ()

    def observe_ranks(self, running: Sequence[int]) -> None:
        """Store how many requests run on each rank, this rank included, as gathered after a step."""
        self._ranks = tuple(running)

    def schedule(self, *args: object, **kwargs: object) -> Any:
        """Call vLLM's own ``schedule()``, without a free seat while the gate is closed."""
        scheduler: Any = self
        name = "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"
        seats: int = getattr(scheduler, name)
        own = len(scheduler.running)
        taken = own + getattr(scheduler, "num_waiting_for_streaming_input", 0)
        self.held_back_by_ranks = taken < seats and closed(own, self._ranks, seats)
        if not self.held_back_by_ranks:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]  # the base is vLLM's scheduler
        setattr(scheduler, name, own)
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]  # likewise
        finally:
            setattr(scheduler, name, seats)


@cache
def balanced(base: type) -> type:
    """Return a subclass of ``base`` that admits only while its gate is open, or ``base`` if it is one.

    Its ``observe_ranks`` has to be called with the counts of all ranks after every step, by an engine
    (``engine.py``) or a simulation. Until then, and with one rank, it decides as ``base`` does.

    Args:
        base: A class of vLLM's V1 scheduler (``Scheduler``, ``AsyncScheduler`` or a subclass).
    """
    if issubclass(base, _Gate):
        return base

    def describe_class(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = __name__
        namespace["__doc__"] = f"{base.__module__}.{base.__qualname__} behind the gate of balance scheduling."

    return types.new_class(f"Balanced{base.__name__}", (_Gate, base), exec_body=describe_class)
