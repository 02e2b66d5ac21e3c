"""Clock for vLLM and the recorder, on which time passes only when a simulation advances it."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from schedtrace.step_times.batch import Batch, StepTimes

NEVER = float("inf")
"""Time later than any event, in microseconds."""
READERS = ("vllm.v1", "schedtrace.record")
"""Packages whose modules read the virtual clock: those of the engine core and of the recorder."""


class VirtualClock:
    """Replacement for ``time`` in the modules of ``READERS`` while the context is entered; nothing sleeps.

    All clocks of the module read 0 at the start, including the wall clock, so that traces of several
    simulations line up.
    """

    virtual = True
    """Whether the times are virtual; the recorder reads this attribute."""

    def __init__(self) -> None:
        self.now_us: float = 0.0
        self._replaced: list[Any] = []

    def __enter__(self) -> Self:
        self._replaced = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith(READERS) and getattr(module, "__dict__", {}).get("time") is time
        ]
        for module in self._replaced:
            module.time = self
        return self

    def __exit__(self, *_: object) -> None:
        for module in self._replaced:
            module.time = time
        self._replaced.clear()

    def __getattr__(self, name: str) -> Any:
        """Return attributes of ``time`` that read no clock, such as ``strftime``."""
        return getattr(time, name)

    def advance(self, us: float) -> None:
        """Advance the clock by a number of microseconds."""
        self.now_us += us

    def sleep(self, seconds: float) -> None:
        """Let time pass; for 0 seconds, only let other threads run."""
        if seconds:
            self.advance(1e6 * seconds)
        else:
            time.sleep(0)

    def until(self, us: float) -> None:
        """Let time pass up to a moment; do nothing if the moment has passed."""
        self.now_us = max(self.now_us, us)

    @contextmanager
    def at(self, us: float) -> Iterator[None]:
        """Set the clock to a moment in a context, for work that another thread would do while a step runs."""
        now, self.now_us = self.now_us, us
        try:
            yield
        finally:
            self.now_us = now

    def monotonic_ns(self) -> int:
        """Return the nanoseconds since the start."""
        return round(self.now_us * 1000)

    def monotonic(self) -> float:
        """Return the seconds since the start."""
        return self.now_us / 1e6

    time_ns = perf_counter_ns = monotonic_ns
    time = perf_counter = monotonic


SPIN_US = 100.0
"""Microseconds of a wait that are spent in a busy loop, because Linux wakes a sleeper at least 50 us late
(its timer slack)."""


class MachineClock:
    """Clock of an executor in real time (``executor.EngineClock``)."""

    @property
    def now_us(self) -> float:
        """Time in microseconds, on the clock that the recorder reads."""
        return time.monotonic_ns() / 1000

    def until(self, us: float) -> None:
        """Wait until a moment; return at once if it has passed. Other threads can run during the wait."""
        left = us - self.now_us
        if left > SPIN_US:
            time.sleep((left - SPIN_US) / 1e6)
        while self.now_us < us:
            time.sleep(0)  # gives the interpreter lock away


def timed(plain: type, clock: VirtualClock, times: StepTimes, batch_of: Callable[[Any], Batch]) -> type:
    """Return a scheduler subclass in which time passes in ``schedule()`` and ``update_from_output()``.

    The subclass makes the same decisions and keeps its parent's name, because a trace's header names the
    class that vLLM chose.

    Args:
        plain: Scheduler class of vLLM.
        clock: Clock of the simulation.
        times: Step times that contain the durations of these calls.
        batch_of: Function that returns the batch of a ``SchedulerOutput``.
    """
    parent: Any = plain

    class Timed(parent):  # type: ignore[misc]  # a class at run time
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self._schedtrace_scheduled: deque[Batch] = deque()
            self.schedtrace_steps = self.schedtrace_updates = 0

        def _update_after_schedule(self, output: Any) -> None:
            """Let the time of ``schedule()`` pass; this call is that method's last statement."""
            super()._update_after_schedule(output)
            self.schedtrace_steps += 1
            batch = batch_of(output)
            self._schedtrace_scheduled.append(batch)
            clock.advance(times.schedule_us(batch))

        def update_from_output(self, *args: object, **kwargs: object) -> Any:
            outputs = super().update_from_output(*args, **kwargs)
            self.schedtrace_updates += 1
            clock.advance(times.update_us(self._schedtrace_scheduled.popleft()))
            return outputs

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Timed, name, getattr(plain, name))
    return Timed
