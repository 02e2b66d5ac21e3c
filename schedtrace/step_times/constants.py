"""Step times from constants: by the step, the request and the token."""

from dataclasses import dataclass

from schedtrace.step_times.batch import Batch


@dataclass(frozen=True)
class HostTimes:
    """The engine's own work, in microseconds: constant, and more by the request.

    The defaults of ``schedule()`` and ``update_from_output()`` are the lines through 16 and 256 running
    requests of ``docs/overhead.md`` (131 and 1,880 us, 56 and 843 us: one processor, steady decode). Those
    of the gap are an assumption.
    """

    schedule_base_us: float = 14.4
    schedule_per_request_us: float = 7.29
    update_base_us: float = 3.5
    update_per_request_us: float = 3.28
    gap_base_us: float = 100.0
    gap_per_arrival_us: float = 50.0
    wake_us: float = 0.0
    """Of an idle engine; no assumption is made."""
    gathering_us: float | None = None
    """Of ranks in lock-step; not known."""

    def schedule_us(self, batch: Batch) -> float:
        """``schedule()``."""
        return self.schedule_base_us + self.schedule_per_request_us * batch.requests

    def update_us(self, batch: Batch) -> float:
        """``update_from_output()``."""
        return self.update_base_us + self.update_per_request_us * batch.requests

    def gap_us(self, arrivals: int) -> float:
        """From an update to the next ``schedule()``."""
        return self.gap_base_us + self.gap_per_arrival_us * arrivals


class OnHost:
    """The host's part of a model of step times (``StepTimes``): that of its ``host``."""

    host: HostTimes

    def schedule_us(self, batch: Batch) -> float:
        """``schedule()``."""
        return self.host.schedule_us(batch)

    def update_us(self, batch: Batch) -> float:
        """``update_from_output()``."""
        return self.host.update_us(batch)

    def gap_us(self, arrivals: int) -> float:
        """From an update to the next ``schedule()``."""
        return self.host.gap_us(arrivals)

    def wake_us(self) -> float:
        """From the input queue into an idle engine."""
        return self.host.wake_us

    def gathering_us(self) -> float | None:
        """Of ranks in lock-step."""
        return self.host.gathering_us


NO_HOST_TIME = HostTimes(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Constants(OnHost):
    """Steps take a constant time and more by the token; all in microseconds. The host takes none."""

    base_us: float = 1000.0
    per_prefill_token_us: float = 10.0
    per_decode_token_us: float = 50.0
    per_context_token_us: float = 0.0
    host: HostTimes = NO_HOST_TIME

    @property
    def description(self) -> str:
        """One sentence."""
        return (
            f"Constants: {self.base_us:g} us a step, {self.per_prefill_token_us:g} us a prefill token, "
            f"{self.per_decode_token_us:g} us a decode token, "
            f"{self.per_context_token_us:g} us a context token."
        )

    def device_us(self, batch: Batch) -> float:
        """Execution in the worker."""
        return (
            self.base_us
            + self.per_prefill_token_us * batch.prefill_tokens
            + self.per_decode_token_us * batch.decode_tokens
            + self.per_context_token_us * batch.context_tokens
        )
