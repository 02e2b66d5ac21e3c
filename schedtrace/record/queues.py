"""Questions about a scheduler's queues, over all releases of vLLM; without effect, and O(1) on a step's path.

A queue may remember that it was asked, or decide by the clock what to answer: no method of a queue is called.
What vLLM's own queues hold is read where they keep it; of any other queue nothing is known but how many
requests are neither running nor done.
"""

import sys
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from schedtrace.record.vllms_own import is_own, is_own_class, is_own_function


class Reader(NamedTuple):
    """Functions that read a queue of one class without calling its methods."""

    length: Callable[[Any], int]
    first: Callable[[Any], Any]
    """Request that is taken next; the queue is not empty."""
    entries: Callable[[Any], list[Any]]
    """Function that copies the entries of a queue."""
    in_order: Callable[[list[Any]], list[Any]]
    """The requests of these entries in the order in which they are taken; this may take its time."""


READERS: dict[type, Reader] = {}
"""Readers of the known classes; ``know_queues`` adds vLLM's."""
_NAMES = ("kv_holding_waiting", "skipped_waiting", "waiting")
"""The waiting queues, in the order in which vLLM looks at them; each release has one or two."""
_SIZED = (deque, set, frozenset, list, dict)


def know_queues() -> None:
    """Add vLLM's queue classes to the readable ones, unless their methods have been replaced."""
    module = sys.modules.get("vllm.v1.core.sched.request_queue")
    if module is None or module.FCFSRequestQueue in READERS:
        return
    methods = ("peek_request", "pop_request", "__bool__", "__len__")
    readers = {
        module.FCFSRequestQueue: Reader(deque.__len__, _deque_head, _listed_deque, list),
        module.PriorityRequestQueue: Reader(_heap_length, _heap_head, _listed_heap, _sorted_entries),
    }
    READERS.update(
        (kind, reader)
        for kind, reader in readers.items()
        if all(is_own_function(getattr(kind, name)) for name in methods)
    )


def _deque_head(queue: Any) -> Any:
    return deque.__getitem__(queue, 0)


def _listed_deque(queue: Any) -> list[Any]:
    return list(deque.__iter__(queue))


def _heap_length(queue: Any) -> int:
    return list.__len__(queue._heap)


def _heap_head(queue: Any) -> Any:
    return _request_in(list.__getitem__(queue._heap, 0))


def _listed_heap(queue: Any) -> list[Any]:
    return list.copy(queue._heap)


def _sorted_entries(entries: list[Any]) -> list[Any]:
    return [_request_in(entry) for entry in sorted(entries)]


def _request_in(entry: Any) -> Any:
    return entry[-1] if type(entry) is tuple else entry  # to vLLM 0.11: priority, arrival, request


def max_running_requests(scheduler: Any) -> int:
    """Return how many requests may run at once (``max_num_active_seqs`` counts since vLLM 0.31)."""
    return int(getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs))


def readable(scheduler: Any) -> bool:
    """Return whether all its waiting queues can be read."""
    queues = (getattr(scheduler, name, None) for name in _NAMES)
    return all(type(queue) in READERS for queue in queues if queue is not None)


def held_back(scheduler: Any) -> bool:
    """Return whether balance scheduling keeps requests out of free seats (``schedtrace.balance``) now."""
    return getattr(scheduler, "held_back_by_ranks", False) is True


class Queues:
    """Lengths of a scheduler's queues; which ones this release has is looked up once.

    Args:
        scheduler: Just built.
    """

    def __init__(self, scheduler: Any) -> None:
        know_queues()
        self._names = [name for name in _NAMES if hasattr(scheduler, name)]
        aside = ("deferred_waiting", "skipped_waiting")
        self._aside = next((name for name in aside if hasattr(scheduler, name)), None)
        self._reads_all = readable(scheduler) and is_own_class(type(scheduler))
        """All that wait are in the queues."""
        self._freed: set[str] = set()
        """Ids of requests that are done; only where the queues do not tell all."""

    def foreign(self, scheduler: Any) -> list[str]:
        """Return the classes of the queues that cannot be read."""
        kinds = (type(getattr(scheduler, name)) for name in self._names)
        return sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind not in READERS})

    def freed(self, request_id: str) -> None:
        """Note that a request is done, though vLLM may keep it while something reads its blocks."""
        if not self._reads_all:
            self._freed.add(request_id)

    def waiting_count(self, scheduler: Any) -> int:
        """Return requests in all waiting queues; ``deferred_waiting`` is a subset of them and not added.

        Where a queue cannot be read, or the scheduler is not vLLM's: all that neither run nor are done,
        wherever it keeps them.
        """
        if not self._reads_all:
            return self._neither_running_nor_done(scheduler)
        total = 0
        for name in self._names:
            queue = getattr(scheduler, name)
            reader = READERS.get(type(queue))
            if reader is None:  # somebody has put in another queue
                self._reads_all = False
                return self._neither_running_nor_done(scheduler)
            total += reader.length(queue)
        return total

    def num_waiting_seen_from_outside(self, scheduler: Any) -> int:
        """Return the number of waiting requests without knowledge of finished ones; not on a step's path.

        Where the queues do not tell all, a request may be done and kept until somebody has read its blocks.
        """
        waiting = self.waiting_count(scheduler)
        if self._reads_all:
            return waiting
        running = set(map(id, scheduler.running))
        here = list(dict.values(scheduler.requests))
        return sum(id(request) not in running and not _is_done(request) for request in here)

    def any_waiting(self, scheduler: Any, sessions: int) -> bool:
        """Return whether any request waits besides these sessions, without iterating over the waiting ones.

        Where the queues do not tell all, the latest requests are looked at until enough of them are not done.

        Args:
            scheduler: Seen from outside.
            sessions: Requests that wait for their client's next part.
        """
        if self.waiting_count(scheduler) <= sessions:
            return False
        if self._reads_all:
            return True
        not_done = sessions + len(scheduler.running)
        for request in reversed(dict.values(scheduler.requests)):
            not_done -= not _is_done(request)
            if not_done < 0:
                return True
        return False

    def num_not_ready(self, scheduler: Any) -> int:
        """Return requests that the scheduler set aside as not ready (or, since 0.31, over a cap)."""
        if self._aside is None:
            return 0
        return _length(getattr(scheduler, self._aside))

    def _neither_running_nor_done(self, scheduler: Any) -> int:
        requests = scheduler.requests
        self._freed = {request_id for request_id in self._freed if dict.__contains__(requests, request_id)}
        return dict.__len__(requests) - len(scheduler.running) - len(self._freed)


def _is_done(request: Any) -> bool:
    return str(getattr(request.status, "name", "")).startswith("FINISHED")


def _length(queue: Any) -> int:
    """Return the length of a queue or a collection of Python's; 0 where it is not known."""
    kind = type(queue)
    if (reader := READERS.get(kind)) is not None:
        return reader.length(queue)
    return len(queue) if kind in _SIZED else 0


def head(scheduler: Any) -> Any:
    """Return the next request; None if there is none, or if only the scheduler could tell.

    vLLM 0.18 to 0.30 looks at those set aside first, but by priority where that is the policy.
    """
    heads = []
    for name in _NAMES:
        queue = getattr(scheduler, name, None)
        if queue is None:
            continue
        if (reader := READERS.get(type(queue))) is None:
            return None
        if reader.length(queue):
            heads.append(reader.first(queue))
    if len(heads) < 2 or hasattr(scheduler, "kv_holding_waiting"):  # noqa: PLR2004  # nobody to choose from
        return heads[0] if heads else None
    if not _selects_as_vllm(scheduler):
        return None
    if policy(scheduler) == "priority":
        return min(heads) if all(map(is_own, heads)) else None
    return heads[0]


Waiting = list[tuple[Callable[[list[Any]], list[Any]], list[Any]]]
"""Copies of the waiting queues: for each, the function that puts its entries in order, and the entries."""


def waiting_now(scheduler: Any) -> Waiting:
    """Return copies of the waiting queues that can be read; never on the path of a step."""
    queues = (getattr(scheduler, name, None) for name in _NAMES)
    readers = ((READERS.get(type(queue)), queue) for queue in queues)
    return [(reader.in_order, reader.entries(queue)) for reader, queue in readers if reader is not None]


def queued_requests(waiting: Waiting) -> list[Any]:
    """Return the requests in these copies, queue by queue."""
    return [request for ordered, entries in waiting for request in ordered(entries)]


def first_of(queue: Any) -> Any:
    """Return the request taken next from a queue; None if it is empty, or only the queue could tell."""
    reader = READERS.get(type(queue))
    return None if reader is None or not reader.length(queue) else reader.first(queue)


def _selects_as_vllm(scheduler: Any) -> bool:
    """Return whether it is vLLM's method that chooses between two queues; 0.18 to 0.30 have it."""
    selects = getattr(type(scheduler), "_select_waiting_queue_for_scheduling", None)
    return selects is None or is_own_function(selects)


def policy(scheduler: Any) -> str | None:
    """Return ``fcfs`` or ``priority``, where it is an enumeration as vLLM's."""
    chosen: Any = getattr(scheduler, "policy", None)
    return chosen._value_ if issubclass(type(chosen), Enum) else None


def pause_state(scheduler: Any) -> Any:
    """Return vLLM's ``PauseState``; None before 0.17, which does not pause its scheduler."""
    return getattr(scheduler, "_pause_state", None)


def pause_name(scheduler: Any) -> str:
    """Return ``UNPAUSED``, ``PAUSED_NEW`` or ``PAUSED_ALL``."""
    return getattr(pause_state(scheduler), "name", "UNPAUSED")


def num_in_input_queue(engine: Any) -> int | None:
    """Return requests that the engine's process has received and its thread has not taken; None if not known.

    Reads a copy of what the queue keeps, without its lock, which the engine's thread may wait for. What is
    still in a socket before it is not counted.
    """
    try:
        entries = list(engine.input_queue.queue)
    except (AttributeError, TypeError, RuntimeError):  # it has none, or it changed meanwhile
        return None
    kinds = [getattr(entry[0], "name", "") for entry in entries if type(entry) is tuple]
    return kinds.count("ADD")
