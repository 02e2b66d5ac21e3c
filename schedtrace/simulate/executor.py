"""An executor without a model: vLLM's engine runs as it is, and its batches take what step times say.

``EngineCore`` hands it every ``SchedulerOutput``; it returns made-up tokens when the batch would be done, on
whichever clock it is given. vLLM takes it through ``distributed_executor_backend``.
"""

from concurrent.futures import Future
from typing import Any, Protocol

from vllm.v1 import outputs
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from schedtrace.record.worker_hooks import EXECUTION, machine
from schedtrace.simulate import releases
from schedtrace.simulate.model_runner import ModelRunner
from schedtrace.step_times.batch import Batch
from schedtrace.step_times.model import StepTimes

DUMMY = Batch({"dummy": 1}, 0, 1, 0, decode_requests=1)
"""What a data-parallel rank computes that has nothing to do: one token."""


class Clock(Protocol):
    """What an executor reads and waits by."""

    @property
    def now_us(self) -> float:
        """Microseconds since some start."""
        ...

    def until(self, us: float) -> None:
        """Wait for a moment; return at once if it is over."""
        ...


class SimulatedExecutor(Executor):  # type: ignore[misc]  # vLLM is untyped here
    """One device, or a pipeline of them, that computes nothing.

    Args:
        vllm_config: vLLM's.
        clock: Virtual, or a machine's.
        times: How long a batch takes; each stage of a pipeline takes an equal part of it.
        model_runner: Makes up the tokens.
    """

    supports_pp = True
    uses_ray = False

    def __init__(
        self, vllm_config: Any, *, clock: Clock, times: StepTimes, model_runner: ModelRunner
    ) -> None:
        self._clock, self._times, self._model_runner = clock, times, model_runner
        self._stages = [0.0] * vllm_config.parallel_config.pipeline_parallel_size
        """When each stage of the pipeline will be free."""
        self._last: Future[Any] = Future()
        self._proposed: dict[str, list[int]] = {}
        super().__init__(vllm_config)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Two batches may be in flight."""
        return True

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:  # vLLM's
        """Begin a batch; its tokens are there once the last stage is done with it."""
        began = ready = self._clock.now_us  # before tokens are made up, which would take a device no time
        batch, sampled = self._model_runner.execute(scheduler_output)
        if not sampled:
            self._last = _At(self._clock, ready, EMPTY_MODEL_RUNNER_OUTPUT)
            return self._last if non_block else self._last.result()
        each_us = self._times.device_us(batch) / len(self._stages)
        for stage, free in enumerate(self._stages):
            begins = max(ready, free)
            began = begins if stage == 0 else began
            ready = self._stages[stage] = begins + each_us
        self._proposed = self._model_runner.proposed(sampled)
        output = releases.model_output(sampled, self._proposed if self._model_runner.drafts else None)
        setattr(output, EXECUTION, (machine(), round(1000 * began), round(1000 * ready)))
        self._last = _At(self._clock, ready, output)
        return self._last if non_block else self._last.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:  # noqa: ARG002
        """The tokens of the batch begun last (vLLM 0.12 and newer ask for them apart)."""
        return self._last if non_block else self._last.result()

    def take_draft_token_ids(self) -> Any:
        """What is proposed for the next step, vLLM's ``DraftTokenIds``; 0.10.0 has none and does not ask."""
        if not self._proposed:
            return None
        return outputs.DraftTokenIds(list(self._proposed), list(self._proposed.values()))

    def execute_dummy_batch(self) -> None:
        """A batch of one token, as a data-parallel rank with nothing to do runs it."""
        self._clock.until(self._clock.now_us + self._times.device_us(DUMMY))

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> list[Any]:
        """What workers would answer; ``None`` for orders, which nobody has to carry out."""
        return [("generate",)] if method == "get_supported_tasks" else [None]

    def check_health(self) -> None:
        """It is well."""

    def shutdown(self) -> None:
        """Nothing runs."""

    def _init_executor(self) -> None:
        """No worker is started."""


class _At(Future[Any]):
    """An output that is there at a moment of a clock."""

    def __init__(self, clock: Clock, ready_us: float, output: Any) -> None:
        super().__init__()
        self._clock, self._ready_us, self._output = clock, ready_us, output

    def done(self) -> bool:
        return self._clock.now_us >= self._ready_us

    def result(self, timeout: float | None = None) -> Any:  # noqa: ARG002  # vLLM gives none
        self._clock.until(self._ready_us)
        return self._output
