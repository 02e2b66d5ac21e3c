"""Two ways in which requests reach vLLM's engine, used as in vLLM itself."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from schedtrace.engine.prompts import PromptRequest
from schedtrace.model.manifest import TrialResult
from schedtrace.workloads.random_load import arrivals_s

Progress = Callable[[int], None]
"""Callback with the number of finished requests of the trial."""

SHUTDOWN_S = 10.0


class FrontEnd(ABC):
    """Front end that runs trials on one engine."""

    _engine: Any
    """vLLM's front end."""

    def client(self) -> Any:
        """Return vLLM's client of the engine core."""
        return self._engine.engine_core

    def tokenizer(self) -> Any:
        """Return vLLM's tokenizer; None if it runs without one."""
        to_0_11 = not hasattr(self._engine, "input_processor")
        return (self._engine.processor if to_0_11 else self._engine.input_processor).tokenizer

    @abstractmethod
    def run_trial(self, trial: int, requests: list[PromptRequest], progress: Progress) -> TrialResult:
        """Pass on all requests and wait until they are finished."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False if blocks are still in use."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the engine and its processes."""


def _sampling(request: PromptRequest, *, detokenize: bool) -> Any:
    """Return the sampling parameters of vLLM's throughput benchmark."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=request.output_len,
        detokenize=detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _shut_down(engine: Any) -> None:
    """Give the engine core time to end in order; releases before 0.14 accept no timeout."""
    try:
        engine.shutdown(timeout=SHUTDOWN_S)
    except TypeError:
        engine.shutdown()


class _Tally:
    """Counter of the finished requests of one trial."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.finished = 0
        self.input_tokens = 0
        self.output_tokens = 0

    def add(self, output: Any) -> None:
        self.finished += 1
        self.input_tokens += len(output.prompt_token_ids or ())
        self.output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self._progress(self.finished)

    def result(self, trial: int, elapsed_s: float) -> TrialResult:
        return TrialResult(
            trial=trial,
            elapsed_s=elapsed_s,
            num_requests=self.finished,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
        )


class OfflineFrontEnd(FrontEnd):
    """``LLMEngine``, driven as by ``LLM.generate``: first all requests, then the outputs.

    Args:
        config: vLLM's resolved configuration.
        prequeue: Whether to pass on all requests while scheduling is paused, as in ``vllm bench throughput
            --prequeue-requests``.
    """

    def __init__(self, config: Any, *, prequeue: bool) -> None:
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        self._prequeue = prequeue
        self._engine = LLMEngine.from_vllm_config(
            config, usage_context=UsageContext.LLM_CLASS, disable_log_stats=True
        )

    def run_trial(self, trial: int, requests: list[PromptRequest], progress: Progress) -> TrialResult:
        engine, tally = self._engine, _Tally(progress)
        detokenize = self.tokenizer() is not None
        parameters = [_sampling(request, detokenize=detokenize) for request in requests]
        if self._prequeue:
            engine.sleep(level=0, mode="abort")
        start = time.perf_counter()
        try:
            for at, (request, sampling) in enumerate(zip(requests, parameters, strict=True)):
                engine.add_request(f"t{trial}-{at}", request.prompt, sampling, priority=request.priority)
        finally:
            if self._prequeue:
                engine.wake_up(tags=["scheduling"])
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tally.add(output)
        return tally.result(trial, time.perf_counter() - start)

    def reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())

    def shutdown(self) -> None:
        _shut_down(self._engine.engine_core)


class OnlineFrontEnd(FrontEnd):
    """``AsyncLLM``, used as by ``vllm serve``: requests come individually, at a rate.

    Args:
        config: vLLM's resolved configuration.
        request_rate: Requests per second, for requests without their own time; None for all at once.
        burstiness: Shape of the gamma distribution of the gaps; 1 is a Poisson process, as in
            ``vllm bench serve``.
        seed: Seed of the gaps.
    """

    def __init__(self, config: Any, *, request_rate: float | None, burstiness: float, seed: int) -> None:
        self._rate, self._burstiness, self._seed = request_rate, burstiness, seed
        self._loop = asyncio.new_event_loop()
        self._engine = self._loop.run_until_complete(self._start(config))

    @staticmethod
    async def _start(config: Any) -> Any:
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_vllm_config(
            config, usage_context=UsageContext.OPENAI_API_SERVER, disable_log_stats=True
        )

    def run_trial(self, trial: int, requests: list[PromptRequest], progress: Progress) -> TrialResult:
        return self._loop.run_until_complete(self._run(trial, requests, progress))

    async def _run(self, trial: int, requests: list[PromptRequest], progress: Progress) -> TrialResult:
        tally = _Tally(progress)
        detokenize = self.tokenizer() is not None

        async def one(at: int, request: PromptRequest) -> None:
            sampling = _sampling(request, detokenize=detokenize)
            async for output in self._engine.generate(
                request.prompt,
                sampling,
                f"t{trial}-{at}",
                priority=request.priority,
                data_parallel_rank=request.data_parallel_rank,
            ):
                if output.finished:
                    tally.add(output)

        start = time.perf_counter()
        tasks: list[asyncio.Task[None]] = []

        async def after_answer(
            at: int, request: PromptRequest, answer: asyncio.Task[None], due_s: float
        ) -> None:
            await answer
            await asyncio.sleep(max(request.delay_s, start + due_s - time.perf_counter()))
            await one(at, request)

        for at, (request, due_s) in enumerate(zip(requests, self._due(requests), strict=True)):
            if request.after is not None:
                tasks.append(asyncio.create_task(after_answer(at, request, tasks[request.after], due_s)))
                continue
            await asyncio.sleep(max(0.0, start + due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(one(at, request)))
        await asyncio.gather(*tasks)
        return tally.result(trial, time.perf_counter() - start)

    def _due(self, requests: list[PromptRequest]) -> list[float]:
        """Return the seconds after the start at which each request is handed over at the earliest."""
        drawn = arrivals_s(self._rate, burstiness=self._burstiness, seed=self._seed)
        return [
            request.at_s if request.at_s is not None else 0.0 if request.after is not None else next(drawn)
            for request in requests
        ]

    def reset_prefix_cache(self) -> bool:
        return bool(self._loop.run_until_complete(self._engine.reset_prefix_cache()))

    def shutdown(self) -> None:
        async def shut_down_engine() -> None:
            _shut_down(self._engine)

        self._loop.run_until_complete(shut_down_engine())
