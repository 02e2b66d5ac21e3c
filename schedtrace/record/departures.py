"""Requests that leave the running ones while nobody tells: neither preempted nor done.

vLLM's own schedulers do not do that. Another one may take a request out of ``running`` and leave it its KV
blocks, or drop it: then whoever ran after the last call and does not run now is looked for, call by call.
"""

from typing import Any

from schedtrace.model.trace_facts import SetAside
from schedtrace.record.cache_managers import blocks_of


class Departures:
    """The running requests of one scheduler that is not vLLM's."""

    def __init__(self) -> None:
        self._ran: dict[str, Any] = {}
        """Those that ran after the last call."""
        self._told: set[str] = set()
        """Those of them that were preempted, or are done."""

    def told(self, request_id: str) -> None:
        """A request was preempted, or is done."""
        self._told.add(request_id)

    def look(self, scheduler: Any) -> list[Any]:
        """The requests that have left the running ones since the last look, and of which nobody has told."""
        if type(scheduler.running) is not list:
            return []
        runs = {request.request_id: request for request in scheduler.running}
        left = [one for request_id, one in self._ran.items() if request_id not in runs]
        untold = [one for one in left if one.request_id not in self._told and not _is_session(one)]
        self._ran = runs
        self._told.clear()
        return untold


def set_aside(scheduler: Any, request: Any) -> SetAside:
    """The line of a request that waits although it was not preempted."""
    blocks = blocks_of(scheduler.kv_cache_manager, request.request_id)
    return SetAside(
        request_id=request.request_id,
        wanted_tokens=request.num_tokens - request.num_computed_tokens,
        blocks_held=sum(blocks) if blocks else None,
    )


def _is_session(request: Any) -> bool:
    """Whether it may wait for more input from its client, as vLLM has it since 0.15."""
    return bool(getattr(request, "resumable", False))
