"""Batch of a step, with everything that a model of step times may use, and the protocol of such models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Batch:
    """Work of one step. A request is either in prefill or in decode for all of its tokens."""

    tokens: Mapping[str, int]
    """Scheduled tokens by request id."""
    prefill_tokens: int
    """Tokens of prompts, and tokens computed again after a preemption."""
    decode_tokens: int
    """Tokens of decodes, drafts included."""
    context_tokens: int
    """Tokens of all requests in the batch that were computed before the step."""
    prefill_requests: int = 0
    decode_requests: int = 0
    decode_context_tokens: int = 0
    """Tokens of the batch's decoding requests that were computed before the step."""
    prefill_attention: float = 0.0
    """Pairs of tokens in prefill's attention: the sum of ``chunk * (computed + chunk / 2)``."""

    @property
    def requests(self) -> int:
        """Number of requests in the batch."""
        return len(self.tokens)

    @property
    def draft_tokens(self) -> int:
        """Scheduled draft tokens: tokens of decodes beyond the first of each request."""
        return self.decode_tokens - self.decode_requests

    @property
    def prefill_steps(self) -> int:
        """1 if the step has prefill, 0 otherwise."""
        return int(self.prefill_tokens > 0)

    @property
    def batch_tokens(self) -> int:
        """Scheduled tokens of all requests."""
        return self.prefill_tokens + self.decode_tokens


class StepTimes(Protocol):
    """Times of the parts of a step, in microseconds; the engine adds or overlaps them."""

    @property
    def description(self) -> str:
        """Sentence that describes the model and its source."""

    def device_us(self, batch: Batch) -> float:
        """Return the time of execution in the worker, including sampling."""

    def schedule_us(self, batch: Batch) -> float:
        """Return the time of ``schedule()``."""

    def update_us(self, batch: Batch) -> float:
        """Return the time of ``update_from_output()``."""

    def gap_us(self, arrivals: int) -> float:
        """Return the host's time from an update to the next ``schedule()``, given the number of arrivals."""

    def wake_us(self) -> float:
        """Return the time until an idle engine takes a request from its input queue."""

    def gathering_us(self) -> float | None:
        """Return the time that gathering a number from all ranks adds to a loop; None if unknown."""
