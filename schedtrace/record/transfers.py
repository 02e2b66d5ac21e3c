"""KV loads from elsewhere: a request is parked, holding blocks, until its load arrives or fails."""

from typing import Any

from schedtrace.model.causes import Cause
from schedtrace.model.trace_facts import KvLoad
from schedtrace.record.cache_managers import blocks_of
from schedtrace.record.exits import SITES, Noted


class KvLoads:
    """The parked requests of one scheduler; all methods run on its thread."""

    def __init__(self, scheduler: Any) -> None:
        self.used = getattr(scheduler, "connector", None) is not None
        self._parked: set[str] = set()
        self._events: list[KvLoad] = []

    @property
    def parked(self) -> int | None:
        """How many wait; None without a connector."""
        return len(self._parked) if self.used else None

    def begun(self, scheduler: Any, events: list[Noted], at_us: int) -> None:
        """Note the loads that a ``schedule()`` started, by its marks."""
        for noted in events:
            if Cause.KV_LOAD_STARTED in SITES[noted[0]].causes:
                self._parked.add(noted[2])
                self._note(scheduler, noted[2], "begun", at_us)

    def ended(self, scheduler: Any, arrived: Any, at_us: int) -> None:
        """Note those that vLLM is told of: ``KVConnectorOutput.finished_recving``."""
        for request_id in arrived if isinstance(arrived, set | frozenset | list | tuple) else ():
            self._parked.discard(request_id)
            self._note(
                scheduler, request_id, "failed" if _failed(scheduler, request_id) else "arrived", at_us
            )

    def leaves(self, request_id: str) -> None:
        """A request is done, whatever became of its load."""
        self._parked.discard(request_id)

    def take(self) -> list[KvLoad]:
        """Those noted since the last call."""
        taken, self._events = self._events, []
        return taken

    def _note(self, scheduler: Any, request_id: str, event: Any, at_us: int) -> None:
        blocks = blocks_of(scheduler.kv_cache_manager, request_id)
        self._events.append(KvLoad(request_id, event, at_us, blocks or None))


def _failed(scheduler: Any, request_id: str) -> bool:
    """To be computed here after all, or already ended in an error, as the policy is."""
    status = getattr(scheduler.requests.get(request_id), "status", None)
    again = getattr(scheduler, "failed_recving_kv_req_ids", ())
    return request_id in again or getattr(status, "name", None) == "FINISHED_ERROR"
