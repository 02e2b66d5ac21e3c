"""Executor without a model: vLLM's engine runs unchanged, and its batches take the modelled step times.

``EngineCore`` passes every ``SchedulerOutput`` to the executor, which returns made-up tokens once the batch
would be done according to a virtual or a real clock. vLLM loads the executor through
``distributed_executor_backend``.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from vllm.v1 import outputs
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from schedtrace.record.worker_hooks import EXECUTION, machine
from schedtrace.simulate import releases
from schedtrace.step_times.batch import Batch, StepTimes

TOKEN, STOP_TOKEN = 7, 8
STOP_AT = "stop_at"
"""Key in ``SamplingParams.extra_args`` for the number (from 1) of the output token at which a request stops.
"""

NOTHING = Batch({}, 0, 0, 0)


class ModelRunner:
    """Model runner that tracks the number of tokens of each request, including sampled tokens in flight.

    Like vLLM's own model runner, it reads only ``SchedulerOutput``, so both a driver and an executor can use
    it.

    Args:
        drafts: Number of tokens that a speculative method proposes per step and request.
        accepted: Function that maps a request's id and its number of draft tokens to the number of accepted
            ones.
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
        """Return a ``SchedulerOutput``'s batch, and each request's tokens: none until its prompt is done.

        A second call with the same output returns the same result.
        """
        if self._executed[0] is output:
            return self._executed[1]
        sampled: dict[str, list[int]] = {}
        tokens, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        known_tokens, prompts = self._known, self._prompt
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
            complete = computed + scheduled - drafted >= known_tokens[request_id]
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
        self._executed = output, (batch, sampled)
        return batch, sampled

    def proposed(self, sampled: dict[str, list[int]]) -> dict[str, list[int]]:
        """Return the draft tokens for the next step of the decoding requests."""
        if not self.drafts:
            return {}
        return {request_id: [TOKEN] * self.drafts for request_id, tokens in sampled.items() if tokens}

    def _learn(self, output: Any) -> Iterator[tuple[str, int]]:
        """Update the state of finished, new and resumed requests; return each request's computed tokens."""
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
        if len(output.num_scheduled_tokens) > len(output.scheduled_new_reqs) + len(cached.req_ids):
            # vLLM 0.10.2 and 0.11.0 do not list requests that they preempt by priority after scheduling their
            # tokens, but a worker computes them. The computed part of a prompt is unknown: taken as 0.
            listed = {*cached.req_ids, *(new.req_id for new in output.scheduled_new_reqs)}
            for request_id in output.num_scheduled_tokens:
                if request_id not in listed:
                    tokens = self._known[request_id]
                    yield request_id, tokens - 1 if tokens > self._prompt[request_id] else 0

    def _tokens(self, request_id: str, drafted: int) -> list[int]:
        place = self._known[request_id] + 1 - self._prompt[request_id]
        stops = place == self._stop_at.get(request_id)
        tokens = [TOKEN] * (1 + (self.accepted(request_id, drafted) if drafted and not stops else 0))
        if stops:
            tokens = [STOP_TOKEN]
        self._known[request_id] += len(tokens)
        return tokens


DUMMY = Batch({"dummy": 1}, 0, 1, 0, decode_requests=1)
"""Batch of a data-parallel rank that has no requests: one token."""


class EngineClock(Protocol):
    """Clock that an executor reads and waits on."""

    @property
    def now_us(self) -> float:
        """Microseconds since an arbitrary start."""
        ...

    def until(self, us: float) -> None:
        """Wait until a moment; return at once if it has passed."""
        ...


class Ran(NamedTuple):
    """Beginning and end of a batch's computation on a device, in microseconds of the executor's clock."""

    began_us: float
    ended_us: float

    def put_on_output(self, output: Any) -> None:
        """Store the times of the execution on an output, where the recorder looks for a worker's times."""
        setattr(output, EXECUTION, (machine(), round(1000 * self.began_us), round(1000 * self.ended_us)))


class Pipeline:
    """Stages of a device, all of which a batch passes; each stage takes an equal part of the batch's time.

    Args:
        stages: Number of stages.
    """

    def __init__(self, stages: int) -> None:
        self._free_us = [0.0] * stages

    def run(self, ready_us: float, device_us: float) -> Ran:
        """Return the times at which the device computes a batch.

        Args:
            ready_us: Time at which the batch is ready, in microseconds.
            device_us: Total time of the batch in all stages, in microseconds.
        """
        began_us = max(ready_us, self._free_us[0])
        for stage, free_us in enumerate(self._free_us):
            ready_us = max(ready_us, free_us) + device_us / len(self._free_us)
            self._free_us[stage] = ready_us
        return Ran(began_us, ready_us)


class SimulatedExecutor(Executor):  # type: ignore[misc]  # vLLM is untyped here
    """Simulated device, or pipeline of devices, that computes nothing.

    Args:
        vllm_config: Configuration of vLLM.
        clock: Virtual or real clock.
        times: Step times; each stage of a pipeline takes an equal part of a batch's time.
        model_runner: Model runner that makes up the tokens.
    """

    supports_pp = True
    uses_ray = False

    def __init__(
        self, vllm_config: Any, *, clock: EngineClock, times: StepTimes, model_runner: ModelRunner
    ) -> None:
        self._clock, self._times, self._model_runner = clock, times, model_runner
        self._pipeline = Pipeline(vllm_config.parallel_config.pipeline_parallel_size)
        self._last: Future[Any] = Future()
        self._proposed: dict[str, list[int]] = {}
        super().__init__(vllm_config)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Return True, because two batches may be in flight."""
        return True

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:  # vLLM's
        """Begin a batch; its tokens are available when the last stage is done."""
        now_us = self._clock.now_us  # before tokens are made up, which would take a device no time
        batch, sampled = self._model_runner.execute(scheduler_output)
        if sampled:
            self._proposed = self._model_runner.proposed(sampled)
            output = releases.model_output(sampled, self._proposed if self._model_runner.drafts else None)
            self._last = self._launched(now_us, batch, output)
        else:
            self._last = self._empty(now_us)
        return self._last if non_block else self._last.result()

    def _launched(self, now_us: float, batch: Batch, output: Any) -> Future[Any]:
        """Return the output of a batch that begins as soon as the device is free."""
        ran = self._pipeline.run(now_us, self._times.device_us(batch))
        ran.put_on_output(output)
        return _At(self._clock, ran.ended_us, output)

    def _empty(self, now_us: float) -> Future[Any]:
        """Return the output of a step without tokens."""
        return _At(self._clock, now_us, EMPTY_MODEL_RUNNER_OUTPUT)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:  # noqa: ARG002  # vLLM's signature
        """Return the tokens of the latest batch (vLLM 0.12 and newer request them separately)."""
        return self._last if non_block else self._last.result()

    def take_draft_token_ids(self) -> Any:
        """Return the next step's draft tokens as vLLM's ``DraftTokenIds``, which 0.10.0 does not have."""
        if not self._proposed:
            return None
        return outputs.DraftTokenIds(list(self._proposed), list(self._proposed.values()))

    def execute_dummy_batch(self) -> None:
        """Run a batch of one token, as a data-parallel rank without requests does."""
        self._clock.until(self._clock.now_us + self._times.device_us(DUMMY))

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> list[Any]:
        """Return the answers of the workers; None for commands, which have no effect here."""
        return [("generate",)] if method == "get_supported_tasks" else [None]

    def check_health(self) -> None:
        """Report that the executor is healthy."""

    def shutdown(self) -> None:
        """Do nothing, because nothing runs."""

    def _init_executor(self) -> None:
        """Start no worker."""


class _At(Future[Any]):
    """Output that becomes available at a moment of a clock."""

    def __init__(self, clock: EngineClock, ready_us: float, output: Any) -> None:
        super().__init__()
        self._clock, self._ready_us, self._output = clock, ready_us, output

    def done(self) -> bool:
        return self._clock.now_us >= self._ready_us

    def result(self, timeout: float | None = None) -> Any:  # noqa: ARG002  # vLLM gives none
        self._clock.until(self._ready_us)
        return self._output
