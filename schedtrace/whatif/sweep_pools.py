"""Processes that replay configurations: of this machine, or of a Ray cluster."""

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from loguru import logger

from schedtrace.errors import UsageError
from schedtrace.whatif.installed import import_vllm
from schedtrace.whatif.sweep_play import Work

_T = TypeVar("_T")
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class Pool(Protocol):
    """Does calls ``function(work, *arguments)`` in other processes."""

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Have it done."""

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
        """Have it done."""
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
        UsageError: Ray is not installed.
    """

    def __init__(self, work: Work, jobs: int) -> None:
        try:
            import ray  # noqa: PLC0415  # an extra
        except ImportError as error:
            msg = "--on ray needs Ray: pip install 'schedtrace[ray]'"
            raise UsageError(msg) from error
        self._ray = ray
        options = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": {"env_vars": QUIET}}
        try:
            ray.init(address="auto", **options)
        except ConnectionError:
            ray.init(num_cpus=jobs, include_dashboard=False, **options)
        self._work = ray.put(work)
        self._call = ray.remote(num_cpus=1)(_remote)

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Have it done."""
        return self._call.remote(function, self._work, *arguments).future()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Leave the cluster, which ends what it still does for us."""
        self._ray.shutdown()


_work: list[Work] = []
"""Of this process, if it is one of a ``LocalPool``."""


def _begin(work: Work, scratch: str) -> None:
    """In a new process: no line of vLLM's may get between those of the command."""
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    tempfile.tempdir = scratch
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    _make_quiet()
    _work[:] = [work]


def _end_with_the_command() -> None:
    """One that is killed cannot end its processes, and the queue that they wait at does not show it."""
    command = multiprocessing.parent_process()
    assert command is not None  # noqa: S101  # a process of a pool has one
    command.join()
    os._exit(1)


def _make_quiet() -> None:
    """What is recorded of a replay is nobody else's, whatever a person records meanwhile."""
    os.environ.update(QUIET)
    for name in [name for name in os.environ if name.startswith("SCHEDTRACE_")]:
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
    """Ctrl-C goes to all processes of a terminal; only the command shall answer it."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, so nothing to protect
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
