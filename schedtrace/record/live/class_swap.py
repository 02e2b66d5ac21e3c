"""Exchange of a scheduler's class for the traced class, and back, each between two steps.

Another thread does the slow work beforehand: the marked copy of ``schedule()``, the header, the file. The
engine's thread only copies the requests present and assigns the class. After the swap back, nothing of
schedtrace is left on the scheduler or its engine.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from schedtrace.model.live import Attached
from schedtrace.model.printable import error_text
from schedtrace.record.disguise import RECORDERS, plain_class, set_class
from schedtrace.record.engine_hooks import unwrap_engine, wrap_engine
from schedtrace.record.live.between_steps import BetweenSteps
from schedtrace.record.live.control_socket import time_in_workers
from schedtrace.record.live.queue_copy import copy_queues
from schedtrace.record.settings import Settings
from schedtrace.record.traced import is_traced, prepared_recorder, traced_class
from schedtrace.record.vllms_own import put_on
from schedtrace.record.worker_hooks import unwrap_worker, wrap_worker

MOST_WAITED_S = 30.0
"""Maximum seconds to wait for the end of a step; a long prefill may take several on a slow device."""

AGAIN_S = 3.0
"""Seconds until the next attempt to end a recording that the engine did not release."""

_SWAPS: "set[ClassSwap]" = set()
"""Swaps of this process that have not been undone; a process may have several engines."""


class RefusedError(Exception):
    """Error: a client's request cannot be met, for the reason in the text."""


class ClassSwap:
    """Temporary swap of one engine's scheduler class: call ``begin``, ``undo`` and ``close`` in this order.

    Args:
        engine: vLLM's ``EngineCore``.
        between_steps: Access to the engine's thread.
        chosen: Settings of the recording.

    Raises:
        RefusedError: If the scheduler cannot be recorded.
    """

    def __init__(self, engine: Any, between_steps: BetweenSteps, chosen: Settings) -> None:
        self._engine, self._between_steps = engine, between_steps
        scheduler = engine.scheduler
        plain: Any = type(scheduler)  # hashable, as every class
        self._plain = plain
        try:
            _SWAPS.add(self)
            _require_class_method(scheduler)
            self._traced = traced_class(plain)
            wrap_engine()
            wrap_worker()
            time_in_workers(on=True)
            self.recorder = prepared_recorder(scheduler, self._traced, chosen, attached=True)
        except Exception as error:
            self._unwrap()
            msg = f"it cannot be recorded: {error_text(error)}"
            raise RefusedError(msg) from error

    def begin(self, timeout_s: float) -> Attached:
        """Assign the traced class to the scheduler between two steps.

        Raises:
            RefusedError: If the class could not be assigned; the swap is then closed.
        """
        scheduler, plain, recorder = self._engine.scheduler, self._plain, self.recorder
        held_us, present = 0.0, 0

        def begin() -> None:
            nonlocal held_us, present
            began_ns = time.perf_counter_ns()
            in_flight = bool(getattr(self._engine, "batch_queue", None))
            copied = copy_queues(scheduler, in_flight=in_flight)
            present = len(copied.running) + recorder.count_waiting(scheduler)
            recorder.note_present(copied)
            if type(scheduler) is not plain:
                msg = f"its scheduler is a {type(scheduler).__name__} now, and was a {plain.__name__}"
                raise RefusedError(msg)
            try:
                RECORDERS.store(scheduler, recorder)
                set_class(scheduler, self._traced)  # the last that can fail
                held_us = (time.perf_counter_ns() - began_ns) / 1000
            except BaseException:
                set_class(scheduler, plain)
                raise

        try:
            self._between_steps.do(begin, timeout_s)
        except Exception as error:
            self._close()
            msg = f"it was not attached to: {error}"
            raise RefusedError(msg) from error
        return Attached(path=str(recorder.writer.path), present=present, held_us=held_us)

    def undo(self, timeout_s: float) -> float:
        """Assign the scheduler's own class between two steps; return the microseconds that this took.

        Afterwards, close the trace, and remove everything that was added to the process.

        Raises:
            RefusedError: If the engine does not reach the end of its step.
        """
        scheduler, held_us = self._engine.scheduler, 0.0

        def undo() -> None:
            nonlocal held_us
            began_ns = time.perf_counter_ns()
            self.recorder.active = False
            if type(scheduler) is self._traced:  # else it has given itself another class
                set_class(scheduler, plain_class(self._traced))
            held_us = (time.perf_counter_ns() - began_ns) / 1000

        try:
            self._between_steps.do(undo, timeout_s)
        except Exception as error:
            msg = f"it was not detached: {error}"
            raise RefusedError(msg) from error
        self._close()
        return held_us

    def _close(self) -> None:
        """Close the trace, and remove everything that was added to the process."""
        scheduler = self._engine.scheduler
        self.recorder.close()
        if not is_traced(type(scheduler)):
            RECORDERS.drop(scheduler)
            self._unwrap()

    def _unwrap(self) -> None:
        """Remove the hooks unless another engine of this process needs them."""
        _SWAPS.discard(self)
        if not _SWAPS:
            unwrap_engine(self._engine)
            unwrap_worker()
            time_in_workers(on=False)


def _require_class_method(scheduler: Any) -> None:
    """Raise TypeError if calls of ``schedule()`` do not reach the scheduler's class."""
    if put_on(scheduler, "schedule") is not None and "schedule" in vars(scheduler):
        msg = "schedule() is set on the object, not on its class: set SCHEDTRACE_DIR when the server starts"
        raise TypeError(msg)


class Alarm:
    """Timer that ends a recording, and tries again later if the engine does not release the recording.

    Args:
        lock: Lock to hold while ``end`` runs.
        end: Function to call when the time is over, unless the alarm has been set again or cancelled.
    """

    def __init__(self, lock: threading.Lock, end: Callable[[], object]) -> None:
        self._lock, self._end = lock, end
        self.timer: threading.Timer | None = None

    def set(self, seconds: float) -> None:
        """End the recording after this many seconds."""
        self.timer = threading.Timer(seconds, self._run)
        self.timer.daemon = True
        self.timer.start()

    def cancel(self) -> None:
        """Cancel the alarm."""
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()

    def _run(self) -> None:
        with self._lock:  # who asks meanwhile waits for what there is to say
            if self.timer is not threading.current_thread():
                return  # another has ended the recording, and may have begun one
            try:
                self._end()
            except RefusedError:
                self.set(AGAIN_S)
