"""Queues and schedulers of somebody else's that change by being asked, or do what vLLM's own do not.

Each queue counts by itself how often it is asked: one question more than ``schedule()`` puts, and it decides
otherwise from then on.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import RequestStatus


class Asked(RequestQueue):
    """First come, first served; what others decide is for subclasses."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.asked = 0
        self.peeked: Any = None
        """By whoever asked last."""

    def _choose(self) -> Any:
        return self.held[0]

    def add_request(self, request: Any) -> None:
        self.held.append(request)

    def prepend_request(self, request: Any) -> None:
        self.held.insert(0, request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Any) -> None:
        self.held.remove(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            if request in self.held:
                self.remove_request(request)

    def peek_request(self) -> Any:
        self.asked += 1
        self.peeked = self._choose()
        return self.peeked

    def pop_request(self) -> Any:
        request = self._choose()
        self.remove_request(request)
        return request

    def __bool__(self) -> bool:
        self.asked += 1
        return bool(self.held)

    def __len__(self) -> int:
        self.asked += 1
        return len(self.held)

    def __iter__(self) -> Iterator[Any]:
        self.asked += 1
        return iter(self.held)


class Pins(Asked):
    """Short prompts first; whoever was peeked at is taken next, whoever comes meanwhile."""

    pinned: Any = None

    def _choose(self) -> Any:
        if self.pinned not in self.held:
            self.pinned = min(self.held, key=lambda request: request.num_prompt_tokens)
        return self.pinned

    def pop_request(self) -> Any:
        request = super().pop_request()
        self.pinned = None
        return request


class Ages(Asked):
    """Short prompts first, but every seventh question makes it think of the oldest."""

    def _choose(self) -> Any:
        if self.asked % 7 == 0:
            return self.held[0]
        return min(self.held, key=lambda request: request.num_prompt_tokens)

    def pop_request(self) -> Any:
        request = self.peeked if self.peeked in self.held else self._choose()
        self.remove_request(request)
        return request


class Groups(Asked):
    """One group of ids after the other, from the group that the questions so far point at."""

    def _choose(self) -> Any:
        groups: dict[int, list[Any]] = {}
        for request in self.held:
            groups.setdefault(sum(request.request_id.encode()) % 3, []).append(request)
        return groups[sorted(groups)[self.asked // 5 % len(groups)]][0]

    def pop_request(self) -> Any:
        request = self.peeked if self.peeked in self.held else self._choose()
        self.remove_request(request)
        return request


class Withholds(Asked):
    """False at every third question, whoever waits in it."""

    def __bool__(self) -> bool:
        self.asked += 1
        return bool(self.held) and self.asked % 3 > 0


QUEUES = {queue.__name__: queue for queue in (Asked, Pins, Ages, Groups, Withholds)}


def with_queue(base: type, queue: type[Asked]) -> Any:
    """A subclass of ``base`` whose requests wait in such a queue."""

    class WithQueue(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.waiting = queue()

    return WithQueue


def sets_aside(base: type) -> Any:
    """Every fifth step it takes a request out of those that run, for three steps; its blocks stay."""

    class SetsAside(base):
        calls = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.aside: list[Any] = []
            self.seen: list[tuple[int, str]] = []
            """Number of the call that took it out, and who it was."""

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            if self.calls % 5 == 3:
                for request in self.aside:
                    if not request.is_finished():
                        self.kv_holding_waiting.add_request(request)
                self.aside = []
            if not self.calls % 5:
                self.aside = [one for one in self.running if one.num_computed_tokens][:1]
            for request in self.aside if not self.calls % 5 else ():
                self.running.remove(request)
                request.status = RequestStatus.PREEMPTED
                self.seen.append((self.calls, request.request_id))
            self.calls += 1
            return super().schedule(*args, **kwargs)

        def get_num_unfinished_requests(self) -> int:
            return int(super().get_num_unfinished_requests()) + len(self.aside)

    return SetsAside


def gives_back(base: type) -> Any:
    """Every seventh step it ends a running request by itself, for somebody else to compute it."""

    class GivesBack(base):
        given: tuple[str, ...] = ()
        calls = 0

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if not self.calls % 7 and self.running:
                request_id = self.running[-1].request_id
                self.given = (*self.given, request_id)
                self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            return super().schedule(*args, **kwargs)

    return GivesBack
