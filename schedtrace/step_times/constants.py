"""Step times from constants: per step, per request and per token."""

from dataclasses import dataclass

from schedtrace.step_times.batch import Batch


@dataclass(frozen=True)
class HostTimes:
    """The engine's own work in microseconds: a constant, and a part per request.

    The defaults of ``schedule()`` and ``update_from_output()`` are straight lines through the values for 16
    and 256 running requests in ``docs/overhead.md`` (131 and 1,880 us for the first, 56 and 843 us for the
    second, on one processor in steady decode). The defaults of the gap are assumptions.
    """

    schedule_base_us: float = 14.4
    schedule_per_request_us: float = 7.29
    update_base_us: float = 3.5
    update_per_request_us: float = 3.28
    gap_base_us: float = 100.0
    gap_per_arrival_us: float = 50.0
    wake_us: float = 0.0
    """Microseconds until an idle engine takes a request from its input queue; 0 by default."""
    gathering_us: float | None = None
    """Microseconds that gathering a number from all ranks in lock-step adds to a loop; None if unknown."""

    def schedule_us(self, batch: Batch) -> float:
        """Return the time of ``schedule()``, in microseconds."""
        return self.schedule_base_us + self.schedule_per_request_us * batch.requests

    def update_us(self, batch: Batch) -> float:
        """Return the time of ``update_from_output()``, in microseconds."""
        return self.update_base_us + self.update_per_request_us * batch.requests

    def gap_us(self, arrivals: int) -> float:
        """Return the time from an update to the next ``schedule()``, in microseconds."""
        return self.gap_base_us + self.gap_per_arrival_us * arrivals


class OnHost:
    """Host's part of a model of step times (``StepTimes``), from the attribute ``host``."""

    host: HostTimes

    def schedule_us(self, batch: Batch) -> float:
        """Return the time of ``schedule()``, in microseconds."""
        return self.host.schedule_us(batch)

    def update_us(self, batch: Batch) -> float:
        """Return the time of ``update_from_output()``, in microseconds."""
        return self.host.update_us(batch)

    def gap_us(self, arrivals: int) -> float:
        """Return the time from an update to the next ``schedule()``, in microseconds."""
        return self.host.gap_us(arrivals)

    def wake_us(self) -> float:
        """Return the time until an idle engine takes a request from its input queue, in microseconds."""
        return self.host.wake_us

    def gathering_us(self) -> float | None:
        """Return the microseconds that gathering a number from all ranks adds to a loop; None if unknown."""
        return self.host.gathering_us


NO_HOST_TIME = HostTimes(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Constants(OnHost):
    """Step times of a constant plus a time per token, in microseconds; by default, the host takes none."""

    base_us: float = 1000.0
    per_prefill_token_us: float = 10.0
    per_decode_token_us: float = 50.0
    per_context_token_us: float = 0.0
    host: HostTimes = NO_HOST_TIME

    @property
    def description(self) -> str:
        """Sentence with the constants."""
        return (
            f"Constants: {self.base_us:g} us a step, {self.per_prefill_token_us:g} us a prefill token, "
            f"{self.per_decode_token_us:g} us a decode token, "
            f"{self.per_context_token_us:g} us a context token."
        )

    def device_us(self, batch: Batch) -> float:
        """Return the time of execution in the worker, in microseconds."""
        return (
            self.base_us
            + self.per_prefill_token_us * batch.prefill_tokens
            + self.per_decode_token_us * batch.decode_tokens
            + self.per_context_token_us * batch.context_tokens
        )
