"""Step times as a trace recorded them, for a replay that must reproduce it."""

from schedtrace.step_times.batch import Batch
from schedtrace.step_times.fitted import Fitted
from schedtrace.step_times.observed import observed
from schedtrace.timeline.timeline import Timeline


class Recorded:
    """Durations of a trace's steps, in their order; past its end, or where it lacks one, fitted ones.

    Each call is about one step: ``schedule_us`` about the next one, ``device_us`` about the one scheduled
    last, ``update_us`` about the oldest whose update was recorded and not asked for, ``gap_us`` about the
    time before the step that is scheduled next. So one object serves one replay.

    Args:
        timeline: The recorded trace, or one trial of it.
        fitted: For all that it lacks.
    """

    def __init__(self, timeline: Timeline, fitted: Fitted) -> None:
        rows = observed(timeline)
        works = rows["total_requests"] > 0
        # From when a batch could begin to its output: so an asynchronous replay has each in time, too.
        self._device = [us if work else None for us, work in zip(rows["busy_us"], works, strict=True)]
        self._schedule = rows["schedule_us"].to_list()
        self._gap = rows["gap_us"].to_list()
        self._wake = rows["wake_us"].to_list()
        self._update = rows["update_us"].drop_nulls().to_list()
        self._fitted = fitted
        self._scheduled = self._updated = 0
        self.extrapolated = 0
        """Steps scheduled after the recorded ones were used up."""

    @property
    def description(self) -> str:
        """One sentence."""
        return f"The {len(self._schedule)} recorded steps, one by one; then: {self._fitted.description}"

    def schedule_us(self, batch: Batch) -> float:
        """``schedule()`` of the next step."""
        recorded = _at(self._schedule, self._scheduled)
        self.extrapolated += self._scheduled >= len(self._schedule)
        self._scheduled += 1
        return self._fitted.schedule_us(batch) if recorded is None else recorded

    def device_us(self, batch: Batch) -> float:
        """Execution of the step scheduled last."""
        recorded = _at(self._device, self._scheduled - 1) if batch.tokens else 0.0
        return self._fitted.device_us(batch) if recorded is None else recorded

    def update_us(self, batch: Batch) -> float:
        """``update_from_output()`` of the oldest step without."""
        recorded = _at(self._update, self._updated)
        self._updated += 1
        return self._fitted.update_us(batch) if recorded is None else recorded

    def gap_us(self, arrivals: int) -> float:
        """From an update to the ``schedule()`` that comes next."""
        recorded = _at(self._gap, self._scheduled)
        return self._fitted.gap_us(arrivals) if recorded is None else recorded

    def wake_us(self) -> float:
        """Before the step that comes next."""
        recorded = _at(self._wake, self._scheduled)
        return self._fitted.wake_us() if recorded is None else recorded

    def gathering_us(self) -> float | None:
        """Of ranks in lock-step."""
        return self._fitted.gathering_us()


def _at(times: list[float | None], place: int) -> float | None:
    return times[place] if 0 <= place < len(times) else None
