"""A model runner without a model: which tokens a step returns, and how much it computes."""

from collections.abc import Callable, Iterator
from typing import Any

from schedtrace.simulate import releases
from schedtrace.step_times.batch import Batch

TOKEN, STOP_TOKEN = 7, 8
STOP_AT = "stop_at"
"""Key in ``SamplingParams.extra_args``: the output token, from 1, at which a request stops by itself."""

NOTHING = Batch({}, 0, 0, 0)


class ModelRunner:
    """Knows of every request how many tokens it has, those sampled but not yet returned included.

    It reads ``SchedulerOutput`` only, as vLLM's do, so it serves a driver and an executor alike.

    Args:
        drafts: Tokens that a speculative method proposes per step and request.
        accepted: How many of a request's drafts are right, from its id and their number.
    """

    def __init__(
        self, drafts: int = 0, accepted: Callable[[str, int], int] = lambda _, drafts: drafts
    ) -> None:
        self.drafts, self.accepted = drafts, accepted
        self._known: dict[str, int] = {}
        self._prompt: dict[str, int] = {}
        self._stop_at: dict[str, int] = {}
        self._executed: tuple[Any, tuple[Batch, dict[str, list[int]]]] = (None, (NOTHING, {}))

    def execute(self, output: Any) -> tuple[Batch, dict[str, list[int]]]:
        """What a ``SchedulerOutput`` computes, and each request's tokens: none before its prompt is done.

        Asked again for the one it was asked for last, it says the same.
        """
        if self._executed[0] is not output:
            self._executed = (output, self._execute(output))
        return self._executed[1]

    def batch_of(self, output: Any) -> Batch:
        """What a ``SchedulerOutput`` computes."""
        return self.execute(output)[0]

    def _execute(self, output: Any) -> tuple[Batch, dict[str, list[int]]]:
        sampled: dict[str, list[int]] = {}
        tokens, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        known, prompts = self._known, self._prompt
        decoding = context = decode_context = decode_tokens = 0
        attention = 0.0
        for request_id, computed in self._learn(output):
            scheduled, drafted = tokens[request_id], len(drafts.get(request_id, ()))
            context += computed
            if scheduled == 1 + drafted and computed >= prompts[request_id]:
                decoding += 1
                decode_tokens += scheduled
                decode_context += computed
            else:
                attention += scheduled * (computed + scheduled / 2)
            complete = computed + scheduled - drafted >= known[request_id]
            sampled[request_id] = self._tokens(request_id, drafted) if complete else []
        batch = Batch(
            tokens=tokens,
            prefill_tokens=output.total_num_scheduled_tokens - decode_tokens,
            decode_tokens=decode_tokens,
            context_tokens=context,
            prefill_requests=len(tokens) - decoding,
            decode_requests=decoding,
            decode_context_tokens=decode_context,
            prefill_attention=attention,
        )
        return batch, sampled

    def proposed(self, sampled: dict[str, list[int]]) -> dict[str, list[int]]:
        """The drafts for the next step of those that decode."""
        if not self.drafts:
            return {}
        return {request_id: [TOKEN] * self.drafts for request_id, tokens in sampled.items() if tokens}

    def _learn(self, output: Any) -> Iterator[tuple[str, int]]:
        """Take in who is gone, new or resumed; gives how many tokens each had computed."""
        for request_id in output.finished_req_ids:
            for of_requests in (self._known, self._prompt, self._stop_at):
                of_requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._prompt[new.req_id] = releases.num_prompt_tokens(new)
            self._known[new.req_id] = releases.num_known_tokens(new)
            stop_at = ((new.sampling_params and new.sampling_params.extra_args) or {}).get(STOP_AT)
            if stop_at:
                self._stop_at[new.req_id] = stop_at
            yield new.req_id, new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, generated in releases.resumed_outputs(cached):
            self._known[request_id] = self._prompt[request_id] + generated
        yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)

    def _tokens(self, request_id: str, drafted: int) -> list[int]:
        place = self._known[request_id] + 1 - self._prompt[request_id]
        stops = place == self._stop_at.get(request_id)
        tokens = [TOKEN] * (1 + (self.accepted(request_id, drafted) if drafted and not stops else 0))
        if stops:
            tokens = [STOP_TOKEN]
        self._known[request_id] += len(tokens)
        return tokens
