"""How long the device of a simulation takes for a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """What one step computes."""

    tokens: Mapping[str, int]
    """Of each request."""
    prefill_tokens: int
    """Of prompts, and of what a preemption had thrown away."""
    decode_tokens: int
    context_tokens: int
    """Tokens that the step's requests had computed before."""
    prefill_requests: int = 0
    decode_requests: int = 0
    decode_context_tokens: int = 0
    """Those of ``context_tokens`` that belong to requests that decode."""
    prefill_attention: float = 0.0
    """Sum over the chunks of prompts: ``chunk * (computed before + chunk / 2)``."""


Device = Callable[[Batch], float]
"""From a batch to the microseconds that it takes."""


@dataclass(frozen=True)
class StepCost:
    """A device whose steps take a constant time and more by the token; all in microseconds."""

    base_us: float = 1000.0
    per_prefill_token_us: float = 10.0
    per_decode_token_us: float = 50.0
    per_context_token_us: float = 0.0

    def __call__(self, batch: Batch) -> float:
        """How long a batch takes."""
        return (
            self.base_us
            + self.per_prefill_token_us * batch.prefill_tokens
            + self.per_decode_token_us * batch.decode_tokens
            + self.per_context_token_us * batch.context_tokens
        )
