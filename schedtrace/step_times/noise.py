"""Step times that scatter, so that nothing that predicts them can be exact."""

import random

from schedtrace.errors import UsageError
from schedtrace.step_times.batch import Batch
from schedtrace.step_times.model import StepTimes

MOST = 1.0
"""A standard deviation above that is no noise any more."""


class Noisy:
    """Another model's step times (``StepTimes``), device times multiplied by lognormal noise of mean 1.

    Each call draws anew, so the same batch asked for twice takes two different times.

    Args:
        times: The model.
        deviation: Standard deviation of the factor's logarithm: 0.03 is about 3 %.
        seed: Of the draws.

    Raises:
        UsageError: the deviation is negative or above ``MOST``.
    """

    def __init__(self, times: StepTimes, deviation: float, seed: int = 0) -> None:
        if not 0 <= deviation <= MOST:
            msg = f"noise of {deviation:g}: it is a share of a step's time, from 0 to {MOST:g}"
            raise UsageError(msg)
        self._times, self._deviation = times, deviation
        self._random = random.Random(seed)  # noqa: S311  # no secret hangs on it
        self._seed = seed

    @property
    def description(self) -> str:
        """One sentence for each of the two."""
        return (
            f"{self._times.description} Device times scatter lognormally by {self._deviation:.1%} "
            f"(seed {self._seed})."
        )

    def device_us(self, batch: Batch) -> float:
        """Execution in the worker."""
        factor = self._random.lognormvariate(-(self._deviation**2) / 2, self._deviation)
        return self._times.device_us(batch) * factor

    def schedule_us(self, batch: Batch) -> float:
        """``schedule()``; the host's times do not scatter."""
        return self._times.schedule_us(batch)

    def update_us(self, batch: Batch) -> float:
        """``update_from_output()``."""
        return self._times.update_us(batch)

    def gap_us(self, arrivals: int) -> float:
        """From an update to the next ``schedule()``."""
        return self._times.gap_us(arrivals)

    def wake_us(self) -> float:
        """From the input queue into an idle engine."""
        return self._times.wake_us()

    def gathering_us(self) -> float | None:
        """Of ranks in lock-step."""
        return self._times.gathering_us()
