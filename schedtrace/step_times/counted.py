"""Step times that count how many steps lie outside what they were fitted to."""

from typing import Any

from schedtrace.step_times.batch import Batch
from schedtrace.step_times.fitted import Fitted


class Counted:
    """A fit, asked through this, counts (``StepTimes``).

    Args:
        fitted: Answers.
        noise: Factors for the device's time of one step after the other; empty: all steps take as much longer
            than fitted as all recorded ones did together, since outliers are part of a device's time.
        economies: False: more tokens than any recorded step had gain nothing by being together.
    """

    def __init__(self, fitted: Fitted, noise: list[float] | None = None, *, economies: bool = True) -> None:
        self._fitted, self._noise = fitted, noise or [1 + fitted.fit.error.total_frac]
        self._device_us = fitted.device_us if economies else fitted.without_economies_us
        self.steps = self.outside = self.larger = 0
        """Steps asked for; those outside what was recorded; those with more tokens than any recorded step."""

    @property
    def outside_frac(self) -> float:
        """Share of the steps asked for."""
        return self.outside / self.steps if self.steps else 0.0

    def device_us(self, batch: Batch) -> float:
        """Execution in the worker."""
        factor = self._noise[self.steps % len(self._noise)]
        self.steps += 1
        self.outside += self._fitted.outside(batch)
        self.larger += batch.batch_tokens > self._fitted.most_tokens
        return factor * self._device_us(batch)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the fit's."""
        return getattr(self._fitted, name)
