"""What a step computes: all that a model of its time may look at."""

from collections.abc import Mapping
from dataclasses import dataclass


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
