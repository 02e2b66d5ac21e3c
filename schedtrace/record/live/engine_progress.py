"""Progress of an engine between two checks: tokens, admissions and calls; and whether it has work.

The watchdog's thread reads a few attributes of vLLM's objects at each check, and takes no lock.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from schedtrace.record import queues
from schedtrace.record.live.stall_causes import StallCause
from schedtrace.record.queues import Queues

LOOKS_WITHOUT_CALL = 2
"""Number of consecutive checks without a new ``schedule()`` call after which calls count as stopped."""
RESTARTS = 3
"""Number of preemptions, without a new output token, after which a request counts as being in a livelock."""
FORGOTTEN_S = 60.0
"""Seconds without a new preemption or output token after which a preempted request is no longer tracked."""


class Calls:
    """Counter of ``schedule()`` calls, if this release of vLLM counts them."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Number at the latest check; None if calls are not counted."""
        self._at_progress: int | None = None
        self._looks_without = 0
        self._moved_s = 0.0

    def count_calls(self, scheduler: Any, now_s: float) -> None:
        """Compare the number of calls with that of the last check."""
        number = getattr(scheduler, "current_step", None)
        self._looks_without = 0 if number != self.number else self._looks_without + 1
        if number != self.number:
            self._moved_s = now_s
        self.number = number

    def note_progress(self) -> None:
        """Store the current call number as that of the latest progress."""
        self._at_progress = self.number

    @property
    def goes_on(self) -> bool:
        """Return whether calls of ``schedule()`` have continued since the latest progress.

        A call that hangs is counted when it begins, and recognized when two consecutive checks see no other.
        """
        return self.number != self._at_progress and self._looks_without < LOOKS_WITHOUT_CALL

    @property
    def since_progress(self) -> int | None:
        """Number of calls since the latest progress; None if not counted."""
        if self.number is None or self._at_progress is None:
            return None
        return self.number - self._at_progress

    def still_s(self, now_s: float) -> float | None:
        """Return the seconds since a check last saw a new call; None if calls are not counted."""
        return None if self.number is None else now_s - self._moved_s


@dataclass
class Circle:
    """Preempted request that has had no output token since it was first tracked here."""

    output_tokens: int
    preemptions: int
    """Number of preemptions when tracking began."""
    since_s: float
    seen_s: float
    restarts: int = 0
    """Number of preemptions since tracking began."""

    def livelock(self, request_id: str) -> StallCause:
        """Return the stall of a request that restarts again and again."""
        often = f"was preempted {self.restarts:,} times in {self.seen_s - self.since_s:.0f} s"
        ended = "without an output token, and no request has ended"
        return StallCause("livelock", f"request {request_id} {often} {ended}")


_computed = attrgetter("request_id", "num_computed_tokens")


class Movement:
    """Detector of a scheduler's progress, from a few attributes that each step changes.

    Each check reads the current values. They may belong to different steps, which does not matter, because
    only differences between checks count. No lock is taken, and no method of vLLM is called. Times are
    seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        """Computed tokens of the running requests at the last check."""
        self._ran: list[Any] = []
        """Requests that ran at the last check, kept while some may be in a livelock; their status shows
        whether they have ended."""
        self.circles: dict[str, Circle] = {}

    def has_progressed(self, scheduler: Any, now_s: float) -> bool:
        """Return whether a step has made progress since the last check: new tokens or an admission.

        A restart after a preemption counts as progress here; ``circling`` returns requests that make no
        progress by restarting.
        """
        running = list(scheduler.running)
        seen = dict(map(_computed, running))
        moved = any(self._seen.get(name) != tokens for name, tokens in seen.items())  # mostly the first has
        self._seen = seen
        ended = (str(getattr(request.status, "name", "")) for request in self._ran)
        if any(name.startswith("FINISHED") and name != "FINISHED_ABORTED" for name in ended):
            self.circles.clear()
        again = False
        for request in (*running, queues.head(scheduler)):
            # vLLM counts preemptions since 0.11.2.
            if not (preemptions := getattr(request, "num_preemptions", 0)):
                continue
            request_id, tokens = request.request_id, request.num_output_tokens
            circle = self.circles.get(request_id)
            if circle is None or tokens > circle.output_tokens:
                self.circles[request_id] = Circle(tokens, preemptions, now_s, now_s)
            elif preemptions - circle.preemptions > circle.restarts:
                circle.seen_s, circle.restarts, again = now_s, preemptions - circle.preemptions, True
        for request_id in [
            name for name, circle in self.circles.items() if now_s - circle.seen_s > FORGOTTEN_S
        ]:
            del self.circles[request_id]
        self._ran = running if self.circles else []
        return moved or again

    def circling(self, now_s: float, for_s: float) -> tuple[str, Circle] | None:
        """Return the request with the most restarts, among those that still restart after ``for_s``."""
        candidates = [
            (circle.restarts, request_id)
            for request_id, circle in self.circles.items()
            if circle.restarts >= RESTARTS
            and circle.seen_s - circle.since_s >= for_s
            and now_s - circle.seen_s < for_s
        ]
        if not candidates:
            return None
        request_id = max(candidates)[1]
        return request_id, self.circles[request_id]


def has_work(engine: Any, waiting: Queues) -> bool:
    """Return whether the engine has requests: running, waiting, or not yet read by the engine's thread.

    Sessions that wait for their clients' next part do not count. The waiting queues may be long, so they are
    checked last, and only for being empty.

    Args:
        engine: vLLM's ``EngineCore``.
        waiting: Queues of its scheduler.
    """
    scheduler = engine.scheduler
    inputs = getattr(engine, "input_queue", None)
    if scheduler.running or getattr(inputs, "queue", None):
        return True
    return waiting.any_waiting(scheduler, getattr(scheduler, "num_waiting_for_streaming_input", 0))
