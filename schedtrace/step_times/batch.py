"""What a step computes, all that a model of its time may look at, and what every such model answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes. A request is either in prefill or in decode for all of its tokens."""

    tokens: Mapping[str, int]
    """Of each request."""
    prefill_tokens: int
    """Of prompts, and of what a preemption had thrown away."""
    decode_tokens: int
    """With drafts."""
    context_tokens: int
    """Computed before, of all requests of the step."""
    prefill_requests: int = 0
    decode_requests: int = 0
    decode_context_tokens: int = 0
    """Computed before, of those that decode."""
    prefill_attention: float = 0.0
    """Pairs of tokens that prefill attends over: the sum of ``chunk * (computed + chunk / 2)``."""

    @property
    def requests(self) -> int:
        """How many requests are in it."""
        return len(self.tokens)

    @property
    def batch_tokens(self) -> int:
        """Of all requests."""
        return self.prefill_tokens + self.decode_tokens


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
