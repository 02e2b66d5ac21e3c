"""Questions about a scheduler's queues, over all releases of vLLM; each is O(1)."""

from collections import deque
from typing import Any


def seats(scheduler: Any) -> int:
    """How many requests may run at once (``max_num_active_seqs`` counts since vLLM 0.31)."""
    return int(getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs))


def held_back(scheduler: Any) -> bool:
    """Whether balance scheduling keeps requests out of free seats (``schedtrace.balance``) in this call."""
    return getattr(scheduler, "held_back_by_ranks", False) is True


class Queues:
    """Lengths of a scheduler's queues; which ones this release has is looked up once.

    Args:
        scheduler: Just built.
    """

    def __init__(self, scheduler: Any) -> None:
        names = ("skipped_waiting", "kv_holding_waiting")
        self._others = [name for name in names if hasattr(scheduler, name)]
        aside = ("deferred_waiting", "skipped_waiting")
        self._aside = next((name for name in aside if hasattr(scheduler, name)), None)

    def num_waiting(self, scheduler: Any) -> int:
        """Requests in all waiting queues; ``deferred_waiting`` is a subset of them and not added."""
        total = _length(scheduler.waiting)
        for name in self._others:
            total += _length(getattr(scheduler, name))
        return total

    def num_not_ready(self, scheduler: Any) -> int:
        """Requests that the scheduler set aside because they are not ready (or, since 0.31, over a cap)."""
        return 0 if self._aside is None else len(getattr(scheduler, self._aside))


def _length(queue: Any) -> int:
    """Its length; vLLM's own FCFS queue is a ``deque`` whose ``__len__`` only takes longer."""
    if type(queue).__name__ == "FCFSRequestQueue":
        return deque.__len__(queue)
    return len(queue)


def head(scheduler: Any) -> Any:
    """The request that would be looked at next, or None; peeking is O(1) in both queue classes.

    vLLM 0.18 to 0.30 looks at those set aside first, but by priority where that is the policy.
    """
    if holding := getattr(scheduler, "kv_holding_waiting", None):
        return holding.peek_request()
    queues = (getattr(scheduler, "skipped_waiting", None), scheduler.waiting)
    heads = [queue.peek_request() for queue in queues if queue]
    if len(heads) > 1 and scheduler.policy.value == "priority":
        return min(heads)
    return heads[0] if heads else None


def pause_state(scheduler: Any) -> Any:
    """vLLM's ``PauseState``; None before 0.17, which does not pause its scheduler."""
    return getattr(scheduler, "_pause_state", None)


def pause_name(scheduler: Any) -> str:
    """``UNPAUSED``, ``PAUSED_NEW`` or ``PAUSED_ALL``."""
    return getattr(pause_state(scheduler), "name", "UNPAUSED")
