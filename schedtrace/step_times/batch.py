"""Batch of a step, the CUDA graph in which it runs, and the protocol for models of step times."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from schedtrace.model.trace import Header


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
        """Number of scheduled draft tokens: tokens of decodes beyond the first of each request."""
        return self.decode_tokens - self.decode_requests

    @property
    def prefill_steps(self) -> int:
        """1 if the step has prefill, 0 otherwise."""
        return int(self.prefill_tokens > 0)

    @property
    def batch_tokens(self) -> int:
        """Scheduled tokens of all requests."""
        return self.prefill_tokens + self.decode_tokens


def graph_sizes(header: Header) -> list[int]:
    """Return the sizes of an engine's CUDA graphs, in order; empty if there are none, or not recorded."""
    sizes = header.settings.get("compilation_config.cudagraph_capture_sizes")
    if header.settings.get("compilation_config.cudagraph_mode") in {None, "NONE"} or not isinstance(
        sizes, list
    ):
        return []
    return sorted(size for size in sizes if isinstance(size, int))


def graph_use(tokens: int | None, sizes: Sequence[int]) -> tuple[int | None, int | None]:
    """Return the number of tokens that pad a batch to the next captured size, and 1 for a larger batch.

    The second number is 0 if the batch is not larger than the largest captured size, or none is captured.

    Both are None if the batch's tokens are not known.
    """
    if tokens is None:
        return None, None
    place = bisect_left(sizes, tokens)
    return (sizes[place] - tokens, 0) if place < len(sizes) else (0, int(bool(sizes)))


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
