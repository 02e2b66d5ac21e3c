"""A scheduler whose calls take time on a virtual clock."""

from collections import deque
from collections.abc import Callable
from typing import Any

from schedtrace.simulate.clock import VirtualClock
from schedtrace.step_times.batch import Batch
from schedtrace.step_times.model import StepTimes


def timed(plain: type, clock: VirtualClock, times: StepTimes, batch_of: Callable[[Any], Batch]) -> type:
    """A subclass of a scheduler class that lets time pass within ``schedule()`` and ``update_from_output()``.

    It decides nothing, and has the name of its parent: a trace's header says which class vLLM chose.

    Args:
        plain: vLLM's class.
        clock: Of the simulation.
        times: How long the calls take.
        batch_of: What a ``SchedulerOutput`` computes.
    """
    parent: Any = plain

    class Timed(parent):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._schedtrace_scheduled: deque[Batch] = deque()
            self.schedtrace_steps = self.schedtrace_updates = 0

        def _update_after_schedule(self, output: Any) -> None:
            """The last statement of ``schedule()``."""
            super()._update_after_schedule(output)
            self.schedtrace_steps += 1
            batch = batch_of(output)
            self._schedtrace_scheduled.append(batch)
            clock.advance(times.schedule_us(batch))

        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            told = super().update_from_output(*args, **kwargs)
            self.schedtrace_updates += 1
            clock.advance(times.update_us(self._schedtrace_scheduled.popleft()))
            return told

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Timed, name, getattr(plain, name))
    return Timed
