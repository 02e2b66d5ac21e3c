"""What happens to requests on the engine's other threads: received, prepared, compiled, aborted.

Written by the input thread and the threads that compile grammars, read by the scheduler's: single operations
on dicts and lists, which Python makes whole.
"""

import time
from typing import Any

from schedtrace.model.trace_facts import Grammar

MOST_KEPT = 10_000
"""Of requests that were received, or aborted, and never seen by the scheduler: then all are forgotten."""


class Inputs:
    """Times of one engine's requests, in nanoseconds of the monotonic clock until they are asked for.

    Args:
        since_anchor: To the trace's microseconds.
    """

    def __init__(self, since_anchor: Any) -> None:
        self._us = since_anchor
        self._received: dict[str, tuple[int, int, int | None]] = {}
        self._aborts: dict[str, int] = {}
        self._submitted: dict[str, int] = {}
        self._grammars: list[Grammar] = []

    def prepared(self, request: Any, began_ns: int) -> None:
        """The input thread has made a ``Request`` of what a client sent."""
        rank = getattr(request, "data_parallel_rank", None)
        _keep(self._received, request.request_id, (began_ns, time.monotonic_ns(), rank))

    def abort_received(self, request_ids: Any) -> None:
        """A client gave up; the first time counts."""
        now = time.monotonic_ns()
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        elif not isinstance(request_ids, list | tuple | set):
            return  # to go through an iterator would leave nothing to vLLM
        for request_id in request_ids:
            if request_id not in self._aborts:
                _keep(self._aborts, request_id, now)

    def grammar_submitted(self, request: Any) -> None:
        """A structured request is about to be handed to a compiling thread, or compiled at once."""
        _keep(self._submitted, request.request_id, time.monotonic_ns())

    def grammar_compiled(self, request: Any, began_ns: int, *, failed: bool) -> None:
        """A thread is done with a grammar."""
        submitted = self._submitted.pop(request.request_id, None)
        self._grammars.append(
            Grammar(
                request_id=request.request_id,
                submitted_us=None if submitted is None else self._us(submitted),
                started_us=self._us(began_ns),
                compiled_us=self._us(time.monotonic_ns()),
                failed=failed,
            )
        )

    def arrival(self, request_id: str) -> dict[str, int | None]:
        """Fields of an ``Arrival``; none if it came another way."""
        if not self._received or (times := self._received.pop(request_id, None)) is None:
            return {}
        received_ns, queued_ns, rank = times
        return {
            "received_us": self._us(received_ns),
            "input_queue_us": self._us(queued_ns),
            "pinned_rank": rank,
        }

    def abort_us(self, request_id: str) -> int | None:
        """When the abort of a request that is done was received."""
        taken = self._aborts.pop(request_id, None) if self._aborts else None
        return None if taken is None else self._us(taken)

    def grammars(self) -> list[Grammar]:
        """Those compiled since the last call."""
        taken: list[Grammar] = []
        while self._grammars:
            taken.append(self._grammars.pop(0))
        return taken

    @property
    def compiled(self) -> bool:
        """Whether there are any."""
        return bool(self._grammars)


def _keep(times: dict[str, Any], request_id: str, value: Any) -> None:
    if len(times) >= MOST_KEPT:
        times.clear()
    times[request_id] = value
