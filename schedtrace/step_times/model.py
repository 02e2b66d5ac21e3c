"""What every model of step times answers."""

from typing import Protocol

from schedtrace.step_times.batch import Batch


class StepTimes(Protocol):
    """How long the parts of a step take, in microseconds; an engine adds them up or overlaps them."""

    @property
    def description(self) -> str:
        """One sentence: which model, and from where."""

    def device_us(self, batch: Batch) -> float:
        """Execution in the worker, sampling included."""

    def schedule_us(self, batch: Batch) -> float:
        """``schedule()``."""

    def update_us(self, batch: Batch) -> float:
        """``update_from_output()``."""

    def gap_us(self, arrivals: int) -> float:
        """The host's time from an update to the next ``schedule()``, with so many arrivals let in."""

    def wake_us(self) -> float:
        """From when a request is in the input queue of an idle engine until the engine takes it in."""

    def gathering_us(self) -> float | None:
        """What it adds to a loop that ranks in lock-step gather a number each; None: not known."""
