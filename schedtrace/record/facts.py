"""What a verdict needs beside the decisions: taken for the recorder at the few places where it can be seen.

Every method runs on the scheduler's thread. None may raise into vLLM: the recorder and the marks, which call
them, see to that.
"""

from collections.abc import Callable
from typing import Any

from schedtrace.model.trace import Finish
from schedtrace.record import arrival_facts, holdings
from schedtrace.record.admissions import admissions
from schedtrace.record.capture import Capture
from schedtrace.record.engine_hooks import INPUTS
from schedtrace.record.exits import Noted
from schedtrace.record.happened import Happened
from schedtrace.record.inputs import Inputs
from schedtrace.record.state_facts import State, StateReader
from schedtrace.record.transfers import KvLoads


class Facts:
    """One scheduler's.

    Args:
        scheduler: vLLM's, just built.
        since_anchor: Nanoseconds of the monotonic clock to the trace's microseconds.
    """

    def __init__(self, scheduler: Any, since_anchor: Callable[[int], int]) -> None:
        self._us = since_anchor
        self._state: State = ()
        self._reader = StateReader(scheduler)
        self._salt = arrival_facts.Salt()
        self.throttled: Any = None
        """``throttle_prefills`` of the call that runs; None where this release does not pass it."""
        self._refused: str | None = None
        self._refusals: list[holdings.Snapshot] = []
        self.inputs = Inputs(since_anchor)
        self.kv_loads = KvLoads(scheduler)
        if (manager := getattr(scheduler, "structured_output_manager", None)) is not None:
            setattr(manager, INPUTS, self.inputs)

    @property
    def prefix_keys(self) -> int | None:
        """Block hashes that the prefix cache knows now; None without prefix caching."""
        return self._reader.prefix_keys

    def engine_is(self, engine: Any) -> None:
        """The ``EngineCore`` around this scheduler; ranks in lock-step have a wave and a step counter."""
        if hasattr(engine, "current_wave") and hasattr(engine, "step_counter"):
            self._reader.engine = engine

    def arrival(self, request: Any) -> dict[str, Any]:
        """Fields of an ``Arrival``, before the request enters the queue."""
        facts = arrival_facts.asked_for(request) | self.inputs.arrival(request.request_id)
        if (found := arrival_facts.sibling(request.request_id, self._salt)) is not None:
            facts["sibling_index"], facts["parent"] = found
        return facts

    def leaves(self, finish: Finish) -> None:
        """A request is done."""
        finish.abort_us = self.inputs.abort_us(finish.request_id)
        self.kv_loads.leaves(finish.request_id)
        if finish.request_id == self._refused:
            self._refused = None

    def head_refused(self, scheduler: Any, request: Any, arguments: holdings.Arguments) -> None:
        """``allocate_slots`` has refused the head of the queue: look at the holders if it is another one."""
        if request.request_id == self._refused:
            return
        self._refused = request.request_id
        if (taken := holdings.snapshot(scheduler, request.request_id, arguments)) is not None:
            self._refusals.append(taken)

    def note(self, capture: Capture, scheduler: Any, output: Any, events: list[Noted]) -> None:
        """What the call that just ended, and the time before it, brought; mostly nothing."""
        state = self._reader.read(
            capture.running_after, capture.waiting_after, self.kv_loads.parked, self.throttled
        )
        if state != self._state:
            self._state = state
        capture.state = self._state
        new, loads = output.scheduled_new_reqs, self.kv_loads
        if not (new or self._refusals or loads.used or self.inputs.compiled):
            return
        if loads.used:
            loads.begun(scheduler, events, self._us(capture.end_ns))
        refusals, self._refusals = self._refusals, []
        capture.happened = Happened(
            admissions(scheduler, new) if new else [], refusals, loads.take(), self.inputs.grammars()
        )
