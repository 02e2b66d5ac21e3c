"""Reads of a scheduler's queues in all releases of vLLM, without side effects and in constant time.

A queue may remember that it was called, or decide its answer by the clock, so no method of a queue is called.
The contents of vLLM's own queues are read from their attributes. For any other queue, only the number of
requests that are neither running nor finished is known.
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
    """Function that returns the request that is taken next from a queue, which must not be empty."""
    entries: Callable[[Any], list[Any]]
    """Function that copies the entries of a queue."""
    in_order: Callable[[list[Any]], list[Any]]
    """Function that returns the requests of a queue's entries in queue order; it may be slow."""


READERS: dict[type, Reader] = {}
"""Readers of the known queue classes; ``know_queues`` adds vLLM's."""
_NAMES = ("kv_holding_waiting", "skipped_waiting", "waiting")
"""Names of the waiting queues, in the order in which vLLM reads them; each release has one or two."""
_SIZED = (deque, set, frozenset, list, dict)


def know_queues() -> None:
    """Add vLLM's queue classes to the readable ones, unless their methods have been replaced."""
    module = sys.modules.get("vllm.v1.core.sched.request_queue")
    if module is None or module.FCFSRequestQueue in READERS:
        return
    methods = ("peek_request", "pop_request", "__bool__", "__len__")
    readers = {
        module.FCFSRequestQueue: Reader(
            length=deque.__len__,
            first=lambda queue: deque.__getitem__(queue, 0),
            entries=lambda queue: list(deque.__iter__(queue)),
            in_order=list,
        ),
        module.PriorityRequestQueue: Reader(
            length=lambda queue: list.__len__(queue._heap),
            first=lambda queue: _request_in(list.__getitem__(queue._heap, 0)),
            entries=lambda queue: list.copy(queue._heap),
            in_order=lambda entries: [_request_in(entry) for entry in sorted(entries)],
        ),
    }
    READERS.update(
        (kind, reader)
        for kind, reader in readers.items()
        if all(is_own_function(getattr(kind, name)) for name in methods)
    )


def _request_in(entry: Any) -> Any:
    return entry[-1] if type(entry) is tuple else entry  # to vLLM 0.11: priority, arrival, request


def max_running_requests(scheduler: Any) -> int:
    """Return the maximum number of running requests (``max_num_active_seqs`` applies since vLLM 0.31)."""
    return int(getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs))


def can_read_queues(scheduler: Any) -> bool:
    """Return whether all waiting queues of the scheduler can be read."""
    queues = (getattr(scheduler, name, None) for name in _NAMES)
    return all(type(queue) in READERS for queue in queues if queue is not None)


def held_back(scheduler: Any) -> bool:
    """Return whether balance scheduling (``schedtrace.balance``) now keeps requests out of free seats."""
    return getattr(scheduler, "held_back_by_ranks", False) is True


class Queues:
    """Lengths of a scheduler's queues; the queues that this release has are determined once.

    Args:
        scheduler: Scheduler that was just created.
    """

    def __init__(self, scheduler: Any) -> None:
        know_queues()
        self._names = [name for name in _NAMES if hasattr(scheduler, name)]
        aside = ("deferred_waiting", "skipped_waiting")
        self._aside = next((name for name in aside if hasattr(scheduler, name)), None)
        self._reads_all = can_read_queues(scheduler) and is_own_class(type(scheduler))
        """Whether all waiting requests are in queues that can be read."""
        self._freed: set[str] = set()
        """Ids of finished requests; only needed if the queues do not contain all waiting requests."""

    def foreign(self, scheduler: Any) -> list[str]:
        """Return the names of the classes of queues that cannot be read."""
        kinds = (type(getattr(scheduler, name)) for name in self._names)
        return sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind not in READERS})

    def lengths(self, scheduler: Any) -> list[tuple[str, type, Callable[[Any], int]]]:
        """Return the name, class and reader of each queue of a scheduler whose queues can all be read."""
        kinds = [(name, type(getattr(scheduler, name))) for name in self._names]
        return [(name, kind, READERS[kind].length) for name, kind in kinds]

    def freed(self, request_id: str) -> None:
        """Record that a request is finished, although vLLM may keep it while its blocks are still read."""
        if not self._reads_all:
            self._freed.add(request_id)

    def count_waiting(self, scheduler: Any) -> int:
        """Return the number of requests in all waiting queues; ``deferred_waiting`` repeats some of them.

        If a queue cannot be read, or the scheduler is not vLLM's, count all requests that are neither running
        nor finished.
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
        """Count the waiting requests from outside the scheduler's thread; this is too slow during a step.

        If the queues do not contain all waiting requests, the count may include a finished request that is
        kept until its blocks have been read.
        """
        waiting = self.count_waiting(scheduler)
        if self._reads_all:
            return waiting
        running = set(map(id, scheduler.running))
        here = list(dict.values(scheduler.requests))
        return sum(id(request) not in running and not _is_done(request) for request in here)

    def any_waiting(self, scheduler: Any, sessions: int) -> bool:
        """Return whether any request other than these sessions waits, without iterating over all requests.

        If the queues do not contain all waiting requests, the latest requests are examined until enough
        unfinished ones are found.

        Args:
            scheduler: Scheduler, read from outside its thread.
            sessions: Number of sessions that wait for their client's next part.
        """
        if self.count_waiting(scheduler) <= sessions:
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
        """Return the number of requests that were set aside as not ready (or, since 0.31, over a cap)."""
        if self._aside is None:
            return 0
        queue = getattr(scheduler, self._aside)
        kind = type(queue)
        if (reader := READERS.get(kind)) is not None:
            return reader.length(queue)
        return len(queue) if kind in _SIZED else 0

    def _neither_running_nor_done(self, scheduler: Any) -> int:
        requests = scheduler.requests
        self._freed = {request_id for request_id in self._freed if dict.__contains__(requests, request_id)}
        return dict.__len__(requests) - len(scheduler.running) - len(self._freed)


def _is_done(request: Any) -> bool:
    return str(getattr(request.status, "name", "")).startswith("FINISHED")


def head(scheduler: Any) -> Any:
    """Return the next request; None if there is none, or only the scheduler can determine it.

    vLLM 0.18 to 0.30 takes requests that were set aside first, except under the priority policy; a method,
    which may not be vLLM's own, chooses between the two queues.
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
    selects = getattr(type(scheduler), "_select_waiting_queue_for_scheduling", None)
    if selects is not None and not is_own_function(selects):
        return None
    if policy(scheduler) == "priority":
        return min(heads) if all(map(is_own, heads)) else None
    return heads[0]


Waiting = list[tuple[Callable[[list[Any]], list[Any]], list[Any]]]
"""Copies of the waiting queues: for each queue, the function that orders its entries, and the entries."""


def waiting_now(scheduler: Any) -> Waiting:
    """Return copies of the waiting queues that can be read; this is too slow for the path of a step."""
    queues = (getattr(scheduler, name, None) for name in _NAMES)
    readers = ((READERS.get(type(queue)), queue) for queue in queues)
    return [(reader.in_order, reader.entries(queue)) for reader, queue in readers if reader is not None]


def queued_requests(waiting: Waiting) -> list[Any]:
    """Return the requests in these copies, queue by queue."""
    return [request for ordered, entries in waiting for request in ordered(entries)]


def first_of(queue: Any) -> Any:
    """Return the next request of a queue; None if it is empty, or if only the queue can determine it."""
    reader = READERS.get(type(queue))
    return None if reader is None or not reader.length(queue) else reader.first(queue)


def policy(scheduler: Any) -> str | None:
    """Return ``fcfs`` or ``priority``; None if the policy is not an enumeration member (vLLM's is)."""
    chosen: Any = getattr(scheduler, "policy", None)
    return chosen._value_ if issubclass(type(chosen), Enum) else None


def pause_state(scheduler: Any) -> Any:
    """Return vLLM's ``PauseState``; None before vLLM 0.17, which introduced it."""
    return getattr(scheduler, "_pause_state", None)


def pause_name(scheduler: Any) -> str:
    """Return ``UNPAUSED``, ``PAUSED_NEW`` or ``PAUSED_ALL``."""
    return getattr(pause_state(scheduler), "name", "UNPAUSED")


def num_in_input_queue(engine: Any) -> int | None:
    """Return the number of requests in the input queue of the engine's thread; None if unknown.

    The queue's contents are copied without its lock, because the engine's thread may need that lock. Requests
    that are still in a socket are not counted.
    """
    try:
        entries = list(engine.input_queue.queue)
    except (AttributeError, TypeError, RuntimeError):  # it has none, or it changed meanwhile
        return None
    kinds = [getattr(entry[0], "name", "") for entry in entries if type(entry) is tuple]
    return kinds.count("ADD")
