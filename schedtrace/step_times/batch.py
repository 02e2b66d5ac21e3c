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
