"""How long the device of a simulation takes for a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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


def batch_of(output: Any, requests: Mapping[str, Any]) -> Batch:
    """What a step computes, read right after its ``schedule()``.

    Args:
        output: Its ``SchedulerOutput``.
        requests: vLLM's ``Request`` of each id.
    """
    tokens = dict(output.num_scheduled_tokens)
    prefill = decode = context = 0
    for request_id, scheduled in tokens.items():
        request = requests[request_id]
        before = request.num_computed_tokens - scheduled
        drafted = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        context += before
        if scheduled == 1 + drafted and before >= request.num_prompt_tokens:
            decode += scheduled
        else:
            prefill += scheduled
    return Batch(tokens, prefill, decode, context)
