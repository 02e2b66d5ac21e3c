"""Brief recording in memory, which finds the exits of an engine that is not being recorded.

The recording has normally ended when ``exits_of_a_step`` returns. If the engine does not release the
recording in time, it becomes inactive, and its alarm ends it later.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schedtrace.model.trace import Exit
from schedtrace.model.trace_bounds import memory_bounds
from schedtrace.record.live.between_steps import BetweenSteps
from schedtrace.record.live.class_swap import AGAIN_S, MOST_WAITED_S, Alarm, ClassSwap, RefusedError
from schedtrace.record.settings import Settings, hides_ids

BRIEFLY_WAITED_S = 5.0
"""Maximum seconds to wait for the end of a step, at both ends of a brief recording."""
LENGTH_S = 0.3
"""Length of a brief recording in seconds; an engine that schedules nothing calls ``schedule()`` every
millisecond.
"""
BOUNDS = memory_bounds("60s")


class BriefRecording:
    """Brief recording of one engine.

    Args:
        engine: vLLM's ``EngineCore``.
        between_steps: Access to the engine's thread.
        lock: Lock that callers of ``exits_of_a_step`` and ``give_way`` hold.
        released: Function to call when the engine is no longer recorded.
    """

    def __init__(
        self, engine: Any, between_steps: BetweenSteps, lock: threading.Lock, released: Callable[[], None]
    ) -> None:
        self._engine, self._between_steps, self._released = engine, between_steps, released
        self.swap: ClassSwap | None = None
        """Class swap of the recording, until it is completely undone; None without a recording."""
        self.alarm = Alarm(lock, lambda: self.give_way(MOST_WAITED_S))

    def exits_of_a_step(self) -> list[Exit]:
        """Record in memory for a moment; return the exits of the latest ``schedule()`` call.

        Raises:
            RefusedError: If the engine cannot be recorded, or does not reach the end of its step.
        """
        chosen = Settings(Path(), trial_ids=False, hash_ids=hides_ids(), bounds=BOUNDS, in_memory=True)
        self.swap = swap = ClassSwap(self._engine, self._between_steps, chosen)
        try:
            swap.begin(BRIEFLY_WAITED_S)
        except RefusedError:
            self.swap = None
            raise
        time.sleep(LENGTH_S)
        try:
            self.give_way(BRIEFLY_WAITED_S)
        except RefusedError:
            swap.recorder.active = False
            self.alarm.set(AGAIN_S)
        return list(swap.recorder.writer.latest_exits)

    def give_way(self, timeout_s: float) -> None:
        """End the brief recording if there is one.

        Raises:
            RefusedError: If the engine does not reach the end of its step.
        """
        swap = self.swap
        if swap is None:
            return
        swap.undo(timeout_s)
        self.alarm.cancel()
        swap.close()
        self.swap = None
        self._released()
