"""Whether an engine gets on, told from outside its thread by a few attributes that each step changes.

A look takes what stands there at that moment: a figure may be of one step and the next of another, which does
not matter, since only differences between looks count. No lock is taken and no method of vLLM's called.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from schedtrace.record import queues

RESTARTS = 3
"""Preemptions of one request without an output token in between, from which it goes round in a circle."""
FORGOTTEN_S = 60.0
"""A preempted request that neither ran nor was next for so long is no longer watched."""


@dataclass
class Circle:
    """A preempted request that has had no output token since."""

    output_tokens: int
    preemptions: int
    """When it was first seen so."""
    since_s: float
    seen_s: float
    restarts: int = 0
    """Preemptions since then."""


_computed = attrgetter("request_id", "num_computed_tokens")


class Movement:
    """Of one scheduler, look by look; times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        """Computed tokens of who ran at the last look."""
        self._ran: list[Any] = []
        """Who ran then, while somebody may go round in a circle: the requests tell whether they ended."""
        self.circles: dict[str, Circle] = {}

    def look(self, scheduler: Any, now_s: float) -> bool:
        """Whether a step has made progress since the last look: tokens of who runs, or an admission.

        Preempting and starting again is progress here; ``circling`` tells those who gain nothing by it.
        """
        running = list(scheduler.running)
        seen = dict(map(_computed, running))
        moved = any(self._seen.get(one) != tokens for one, tokens in seen.items())  # mostly the first has
        self._seen = seen
        if any(map(_ended_by_itself, self._ran)):
            self.circles.clear()
        again = self._watch([one for one in (*running, queues.head(scheduler)) if _preemptions(one)], now_s)
        self._ran = running if self.circles else []
        return moved or again

    def circling(self, now_s: float, for_s: float) -> tuple[str, Circle] | None:
        """The request that was preempted most often for so long, without a token and with nobody's end."""
        found = [
            (one.restarts, request_id)
            for request_id, one in self.circles.items()
            if one.restarts >= RESTARTS and one.seen_s - one.since_s >= for_s and now_s - one.seen_s < for_s
        ]
        if not found:
            return None
        request_id = max(found)[1]
        return request_id, self.circles[request_id]

    def _watch(self, preempted: Iterable[Any], now_s: float) -> bool:
        """Whether one of them was preempted once more."""
        again = False
        for request in preempted:
            preemptions = _preemptions(request)
            request_id, tokens = request.request_id, request.num_output_tokens
            circle = self.circles.get(request_id)
            if circle is None or tokens > circle.output_tokens:
                self.circles[request_id] = Circle(tokens, preemptions, now_s, now_s)
                continue
            if preemptions - circle.preemptions > circle.restarts:
                circle.seen_s, circle.restarts, again = now_s, preemptions - circle.preemptions, True
        for request_id in [
            one for one, circle in self.circles.items() if now_s - circle.seen_s > FORGOTTEN_S
        ]:
            del self.circles[request_id]
        return again


def has_work(engine: Any, waiting: int) -> bool:
    """Whether somebody waits for this engine's next step, or for its thread to take what was sent.

    Sessions that wait for their clients' next part do not.

    Args:
        engine: vLLM's ``EngineCore``.
        waiting: Requests in the waiting queues.
    """
    scheduler = engine.scheduler
    inputs = getattr(engine, "input_queue", None)
    sessions = getattr(scheduler, "num_waiting_for_streaming_input", 0)
    return bool(scheduler.running) or waiting > sessions or (inputs is not None and not inputs.empty())


def _preemptions(request: Any) -> int:
    """Counted since vLLM 0.11.2."""
    return getattr(request, "num_preemptions", 0)


def _ended_by_itself(request: Any) -> bool:
    name = str(getattr(request.status, "name", ""))
    return name.startswith("FINISHED") and name != "FINISHED_ABORTED"
