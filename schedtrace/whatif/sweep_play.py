"""Replay of a configuration in a process that may do several: what a pool's workers call."""

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import polars as pl
from loguru import logger

from schedtrace.diagnose.latencies import with_latencies
from schedtrace.diagnose.throughput import covered_seconds
from schedtrace.engine.vllm_config import import_vllm
from schedtrace.errors import MissingExtraError, UsageError
from schedtrace.model.printable import capped
from schedtrace.model.what_if import ReplayOutcome
from schedtrace.read.trace import Trace
from schedtrace.whatif.replays import ModelledEngine, Work, fitted_length, replay
from schedtrace.workloads.workload import Workload

DIGITS = 3
"""Digits of milliseconds: a trace's clock counts microseconds."""


def base_settings(work: Work, names: Sequence[str]) -> dict[str, Any]:
    """Return what settings are before any change.

    Raises:
        UsageError: a name that is no argument of vLLM, or that a replay cannot change.
    """
    from schedtrace.simulate.engine_options import require_known  # noqa: PLC0415  # imports vLLM

    for name in names:
        if name not in work.engine.OWN:
            require_known(name)
    return work.engine.base(names)


def outcome_of(work: Work, key: str, changes: Mapping[str, Any]) -> ReplayOutcome:
    """Replay the loads under a changed configuration; one that vLLM refuses has an outcome that says why.

    Raises:
        OSError: the trace cannot be written.
    """
    outcome = ReplayOutcome(key=key, changes=dict(changes), requests=sum(map(len, work.measured)))
    with tempfile.TemporaryDirectory(prefix="schedtrace-sweep-") as folder:
        try:
            if isinstance(work.engine, ModelledEngine):
                options, _ = work.engine.configured(changes)
                outcome.fitted_max_model_len = fitted_length(work.engine.shape, changes, options)
            replayed = replay(work, changes, Path(folder) / "run")
            outcome.steps, outcome.too_long = replayed.played.steps, len(replayed.played.refused)
            outcome.kv_blocks, outcome.preemptions = replayed.kv_blocks, replayed.preemption_count
            if replayed.counted is not None:
                outcome.extrapolated_steps = replayed.counted.outside
            _measure(outcome, replayed.run.traces, work.measured)
        except (OSError, MemoryError):
            raise  # of this machine, not of the configuration
        except UsageError as error:
            outcome.refused = str(error)
        except Exception as error:  # noqa: BLE001  # vLLM's own assertions: a row, like what it refuses by name
            outcome.refused = f"vLLM fails: {type(error).__name__}: {error}".splitlines()[0]
    return outcome


def _measure(outcome: ReplayOutcome, traces: Sequence[Trace], loads: Sequence[Workload]) -> None:
    """Fill in what the traces of a replay show; they have one clock."""
    arrivals, finishes = (
        pl.concat(frames, how="diagonal_relaxed")
        for frames in ([trace.arrivals for trace in traces], [trace.finishes for trace in traces])
    )
    load_of = {capped(request.request_id): number for number, load in enumerate(loads) for request in load}
    numbers = pl.DataFrame({"request_id": load_of.keys(), "load": load_of.values()})
    first_arrivals = arrivals.join(numbers, on="request_id").group_by("load").agg(pl.col("arrived_us").min())
    done = (
        with_latencies(finishes)
        .filter("done")
        .join(numbers, on="request_id", maintain_order="left")
        .with_columns((pl.col("ttft_us", "tpot_us", "e2e_us") / 1e3).round(DIGITS))
    )
    ended = done.group_by("load").agg(pl.col("last_token_us").max()).join(first_arrivals, on="load")
    outcome.duration_s = ended.select((pl.col("last_token_us") - pl.col("arrived_us")).sum()).item() / 1e6
    if any(load.of_server for load in loads):
        outcome.counted_s = covered_seconds(done.select(begin_us="arrived_us", end_us="last_token_us"))
    outcome.output_tokens = int(done["output_tokens"].sum())
    outcome.ttft_ms, outcome.tpot_ms, outcome.e2e_ms = (
        done[name].to_list() for name in ("ttft_us", "tpot_us", "e2e_us")
    )


_T = TypeVar("_T")
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class Pool(Protocol):
    """Does calls ``function(work, *arguments)`` in other processes."""

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Submit a call to the pool."""

    def close(self) -> None:
        """End the processes, whatever they do."""


class LocalPool:
    """Processes of this machine, each of which imports vLLM once.

    Args:
        work: Sent to each process once.
        jobs: Processes.
    """

    def __init__(self, work: Work, jobs: int) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="schedtrace-sweep-")
        before = set(multiprocessing.active_children())
        self._executor = ProcessPoolExecutor(
            jobs,
            multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(work, self._scratch.name),
        )
        with _children_ignore_interrupts():  # a process is started with each of the first calls
            for _ in range(jobs):
                self._executor.submit(import_vllm)
        self._processes = set(multiprocessing.active_children()) - before

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Submit a call to the pool."""
        return self._executor.submit(_call, function, *arguments)

    def close(self) -> None:
        """End the processes, whatever they do."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        self._scratch.cleanup()  # a process that is ended leaves its traces


class RayPool:
    """Tasks of a Ray cluster: the one that ``RAY_ADDRESS`` names or that runs here, else one of our own.

    Every machine needs schedtrace and vLLM in the releases of this one; the load goes to them as data.

    Args:
        work: Put into Ray's object store once.
        jobs: Processors of a cluster of our own.

    Raises:
        MissingExtraError: Ray is not installed.
    """

    def __init__(self, work: Work, jobs: int) -> None:
        try:
            import ray  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise MissingExtraError(what="--on ray", extra="ray") from error
        self._ray = ray
        options = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": {"env_vars": QUIET}}
        try:
            ray.init(address="auto", **options)
        except ConnectionError:
            ray.init(num_cpus=jobs, include_dashboard=False, **options)
        self._work = ray.put(work)
        self._call = ray.remote(num_cpus=1)(_remote)

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Submit a call to the pool."""
        return self._call.remote(function, self._work, *arguments).future()  # type: ignore[no-any-return]  # Ray is untyped

    def close(self) -> None:
        """Leave the cluster, which ends what it still does for us."""
        self._ray.shutdown()


_work: list[Work] = []
"""Work of this process, if it is a worker of a ``LocalPool``."""


def _begin(work: Work, scratch: str) -> None:
    """Prepare a new process: no line of vLLM's may get between those of the command."""
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    tempfile.tempdir = scratch
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    _make_quiet()
    _work[:] = [work]


def _end_with_the_command() -> None:
    """Exit when the command exits.

    A killed command cannot end its worker processes, and their queue does not tell them that it was killed.
    """
    command = multiprocessing.parent_process()
    assert command is not None  # noqa: S101  # a process of a pool has one
    command.join()
    os._exit(1)


def _make_quiet() -> None:
    """Keep a replay's recording to itself, whatever settings the user records with."""
    os.environ.update(QUIET)
    for name in [name for name in os.environ if name.startswith("SCHEDTRACE")]:
        del os.environ[name]
    logger.remove()
    logger.add(_warn, level="WARNING", format="schedtrace: {message}")


def _warn(line: str) -> None:
    os.write(2, line.encode())


def _call(function: Callable[..., _T], *arguments: Any) -> _T:
    return function(_work[0], *arguments)


def _remote(function: Callable[..., _T], work: Work, *arguments: Any) -> _T:
    _make_quiet()
    return function(work, *arguments)


@contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    """Make new processes ignore Ctrl-C: a terminal sends it to all, and only the command shall answer it."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, so nothing to protect
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
