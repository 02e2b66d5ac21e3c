"""Recording that a client begins, and that the client or its alarm ends.

There are four states: no recording; an active one; one that has given up, or that the engine does not
release, and that still has to be ended; one that has ended by itself, whose result waits until the client
asks for it.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schedtrace.model.live import Attached, Detached
from schedtrace.model.trace_bounds import bounds
from schedtrace.record.live.between_steps import BetweenSteps
from schedtrace.record.live.class_swap import MOST_WAITED_S, Alarm, ClassSwap, RefusedError
from schedtrace.record.log import logger
from schedtrace.record.metrics.measuring import Meter
from schedtrace.record.settings import Settings, hashes_ids, line_format
from schedtrace.record.switches import NotUnderstoodError


def client_settings(run_dir: Path, *, hash_ids: bool, trace: str) -> Settings:
    """Return the settings for a client's recording; raise RefusedError if the server's are invalid."""
    try:
        return Settings(
            run_dir,
            trial_ids=False,
            hash_ids=hashes_ids() or hash_ids,
            lines=line_format(),
            bounds=bounds(trace),
        )
    except NotUnderstoodError as error:
        msg = f"its server was started with {error}"
        raise RefusedError(msg) from None


class ClientRecording:
    """Recording of one engine for a client.

    Args:
        engine: vLLM's ``EngineCore``.
        between_steps: Access to the engine's thread.
        lock: Lock that callers of ``begin``, ``end_for_client`` and ``end_swap`` hold.
        released: Function to call when the engine is no longer recorded.
    """

    def __init__(
        self, engine: Any, between_steps: BetweenSteps, lock: threading.Lock, released: Callable[[], None]
    ) -> None:
        self._engine, self._between_steps, self._released = engine, between_steps, released
        self.swap: ClassSwap | None = None
        """Class swap of the recording, even if the recording has given up; None without a recording."""
        self.alarm = Alarm(lock, self._end_by_itself)
        self._end_s: float | None = None
        """Monotonic time at which the recording ends by itself."""
        self.result: Detached | None = None
        """Result of a recording that ended by itself, until a client asks for it."""

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the recording ends by itself; None if it has no such limit."""
        end_s = self._end_s
        return None if end_s is None else max(0.0, end_s - time.monotonic())

    def begin(self, chosen: Settings, for_s: float | None, meter: Meter | None) -> Attached:
        """Record from the next step on.

        Args:
            chosen: Settings of the recording.
            for_s: Seconds after which the recording ends by itself.
            meter: Receiver of the recording's totals.

        Raises:
            RefusedError: If the engine cannot be recorded.
        """
        try:
            self.swap = ClassSwap(self._engine, self._between_steps, chosen)
            self.swap.recorder.writer.measuring.meter = meter
            begun = self.swap.begin(MOST_WAITED_S)
        except RefusedError:
            self.swap = None
            self._released()
            raise
        self.result = None
        if for_s is not None:
            self._end_s = time.monotonic() + for_s
            self.alarm.set(for_s)
        rank = self.swap.recorder.writer.engine_rank
        logger.info("schedtrace: attached to engine {}: {}", rank, begun.path)
        return begun

    def end_for_client(self) -> Detached | None:
        """End the recording, or return the result of one that ended by itself; None if neither exists.

        Raises:
            RefusedError: If the engine does not reach the end of its step.
        """
        ended, self.result = self.result, None
        if ended is not None or self.swap is None:
            return ended
        rank = self.swap.recorder.writer.engine_rank
        ended = self.end_swap(self.swap)
        logger.info("schedtrace: detached from engine {}: {}", rank, ended.path)
        return ended

    def end_swap(self, swap: ClassSwap) -> Detached:
        """End the recording.

        Raises:
            RefusedError: If the engine does not reach the end of its step.
        """
        held_us = swap.undo(MOST_WAITED_S)
        self.swap, self._end_s = None, None
        self.alarm.cancel()
        swap.close()
        self._released()
        writer = swap.recorder.writer
        return Detached(path=str(writer.path), held_us=held_us, stopped=writer.incomplete_reason)

    def _end_by_itself(self) -> None:
        if self.swap is not None:
            self.result = self.end_swap(self.swap)
            logger.info("schedtrace: detached by itself: {}", self.result.path)
