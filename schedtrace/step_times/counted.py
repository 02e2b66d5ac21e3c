"""Step times that count how many steps lie outside what they were fitted to."""

from typing import Any

from schedtrace.step_times.batch import Batch
from schedtrace.step_times.fitted import Fitted


class Counted:
    """A fit, asked through this, counts (``StepTimes``).

    Args:
        fitted: Answers.
        noise: Factors for the device's time of one step after the other; empty: none.
    """

    def __init__(self, fitted: Fitted, noise: list[float] | None = None) -> None:
        self._fitted, self._noise = fitted, noise or [1.0]
        self.steps = self.outside = 0

    @property
    def outside_frac(self) -> float:
        """Share of the steps asked for."""
        return self.outside / self.steps if self.steps else 0.0

    def device_us(self, batch: Batch) -> float:
        """Execution in the worker."""
        factor = self._noise[self.steps % len(self._noise)]
        self.steps += 1
        self.outside += self._fitted.outside(batch)
        return factor * self._fitted.device_us(batch)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the fit's."""
        return getattr(self._fitted, name)
