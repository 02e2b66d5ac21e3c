"""Pools of processes, on this machine or a Ray cluster, for reading fleets and for replays of sweeps.

A process that ends unexpectedly loses only the calls that it was running. ``call_outcomes`` repeats each of
these calls once, alone; if that process also ends, the call has failed. No result of a lost process is
counted.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from schedtrace.errors import MissingExtraError

_A = TypeVar("_A")
_R = TypeVar("_R")


class WorkerPool(Protocol):
    """Pool of processes that execute calls: those of ``concurrent.futures``, or tasks of Ray."""

    jobs: int
    """Maximum number of simultaneous calls."""

    def shared(self, value: Any) -> Any:
        """Return a placeholder for a value that many calls get as an argument, so that it is rarely sent."""

    def submit(self, function: Callable[..., _R], *arguments: Any) -> "Future[_R]":
        """Call the function in a process of the pool; return its future."""

    def is_loss(self, error: BaseException) -> bool:
        """Return whether an error means that a process was lost; the call itself did not raise it."""

    def restart(self) -> None:
        """Replace processes that ended."""

    def close(self) -> None:
        """End the processes, whatever they are doing."""


class Lost(Exception):  # noqa: N818  # a fact, handled like a result
    """Loss of both processes that were to execute a call."""


class CallOutcome(Generic[_A, _R]):
    """Outcome of a call.

    Args:
        argument: Argument of the call.
        value: Result of the call, the error that it raised, or ``Lost``.
        again: Whether a first process ended before it had a result.
    """

    def __init__(self, argument: _A, value: _R | BaseException, *, again: bool) -> None:
        self.argument, self.value, self.again = argument, value, again


def call_outcomes(
    pool: WorkerPool, function: Callable[[_A], _R], arguments: Sequence[_A]
) -> Iterator[CallOutcome[_A, _R]]:
    """Yield the outcome of each call exactly once, in the order in which calls end.

    Args:
        pool: Pool of processes; at most ``jobs`` calls run at once, so that a loss affects only these calls.
        function: Function that other processes can import.
        arguments: Argument of each call.
    """
    waiting, suspects = deque(arguments), deque[_A]()
    running: dict[Future[_R], _A] = {}
    while waiting or suspects or running:
        while waiting and len(running) < pool.jobs:
            argument = waiting.popleft()
            running[pool.submit(function, argument)] = argument
        if not running:  # only suspects are left: each alone
            argument = suspects.popleft()
            future = pool.submit(function, argument)
            wait([future])
            lost = _is_lost(pool, future)
            if lost:
                pool.restart()
            value = Lost() if lost else future.exception() or future.result()
            yield CallOutcome(argument, value, again=True)
            continue
        ended, _ = wait(running, return_when=FIRST_COMPLETED)
        if any(_is_lost(pool, future) for future in ended):
            pool.restart()
            ended |= {future for future in running if future.done()}  # a pool breaks as a whole
        for future in ended:
            argument = running.pop(future)
            if _is_lost(pool, future):
                suspects.append(argument)
            else:
                yield CallOutcome(argument, future.exception() or future.result(), again=False)


def _is_lost(pool: WorkerPool, future: "Future[Any]") -> bool:
    if future.cancelled():
        return True
    error = future.exception()
    return error is not None and pool.is_loss(error)


class HereOnly:
    """Pool without processes: calls are executed when they are submitted (``--jobs 1``)."""

    jobs = 1

    def shared(self, value: Any) -> Any:
        """Return the value itself, because no process needs a copy."""
        return value

    def submit(self, function: Callable[..., _R], *arguments: Any) -> "Future[_R]":
        """Call the function at once; return a finished future."""
        future: Future[_R] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001  # as an executor does
            future.set_exception(error)
        return future

    def is_loss(self, error: BaseException) -> bool:  # noqa: ARG002  # of the protocol
        """Return False, because this process exists."""
        return False

    def restart(self) -> None:
        """Do nothing, because there is no process to replace."""

    def close(self) -> None:
        """Do nothing, because there is no process to end."""


class LocalProcesses:
    """Pool of processes on this machine.

    Args:
        jobs: Number of processes.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._scratch = tempfile.TemporaryDirectory(prefix="schedtrace-workers-")
        self._executor = self._made()

    def _made(self) -> ProcessPoolExecutor:
        threads = str(max(1, (os.cpu_count() or 1) // self.jobs))
        return ProcessPoolExecutor(
            self.jobs,
            multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(threads, self._scratch.name),
        )

    def shared(self, value: Any) -> Any:
        """Return the value, which is sent with each call."""
        return value

    def submit(self, function: Callable[..., _R], *arguments: Any) -> "Future[_R]":
        """Call the function in a process of the pool; return its future."""
        with _children_ignore_interrupts():  # the first calls start processes
            try:
                return self._executor.submit(function, *arguments)
            except BrokenProcessPool:  # an idle process ended
                self.restart()
                return self._executor.submit(function, *arguments)

    def is_loss(self, error: BaseException) -> bool:
        """Return whether the error means that a process ended."""
        return isinstance(error, BrokenProcessPool)

    def restart(self) -> None:
        """Replace all processes, because the executor ends all processes of a broken pool."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._executor = self._made()

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process in list((self._executor._processes or {}).values()):  # noqa: SLF001  # no public way
            process.terminate()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._scratch.cleanup()  # a process that is ended leaves its files


@contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    """Make new processes ignore Ctrl-C: a terminal sends it to all, but only the command handles it."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, so nothing to protect
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(threads: str, scratch: str) -> None:
    """Prepare a new process.

    Polars and NumPy get their share of the processors, temporary files go to a folder that the command
    removes, and libraries' log lines are suppressed.
    """
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    for library in ("POLARS_MAX_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(library, threads)
    tempfile.tempdir = scratch
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its processes
    os.dup2(2, 1)


def _end_with_the_command() -> None:
    """Exit when the command exits.

    A killed command cannot end its processes, and their queue does not show that it was killed.
    """
    command = multiprocessing.parent_process()
    assert command is not None  # noqa: S101  # a process of a pool has one
    command.join()
    os._exit(1)


class RayTasks:
    """Ray Core tasks on the cluster of ``RAY_ADDRESS`` or of this machine, or else on a new local cluster.

    Every node needs schedtrace in this version, and has to reach the traces: a shared folder, or ``s3://``.

    Args:
        jobs: Processors of a new local cluster, and number of simultaneous calls on it.
        retries: Number of times that Ray repeats a call whose worker ended, before the call is lost.

    Raises:
        MissingExtraError: If Ray is not installed.
    """

    def __init__(self, jobs: int, *, retries: int = 0) -> None:
        try:
            import ray  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise MissingExtraError(what="--on ray", extra="ray") from error
        self._ray = ray
        options = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(address="auto", **options)
        except ConnectionError:
            ray.init(num_cpus=jobs, include_dashboard=False, **options)
        self.jobs = max(1, int(ray.cluster_resources().get("CPU", jobs)))
        self._call = ray.remote(num_cpus=1, max_retries=retries)(_call)

    def shared(self, value: Any) -> Any:
        """Put the value into Ray's object store; return a reference, so that calls need not send it."""
        return self._ray.put(value)

    def submit(self, function: Callable[..., _R], *arguments: Any) -> "Future[_R]":
        """Call the function in a Ray task; return its future."""
        return self._call.remote(function, *arguments).future()  # type: ignore[no-any-return]  # Ray is untyped

    def is_loss(self, error: BaseException) -> bool:
        """Return whether a worker, its node or its result is gone."""
        errors = self._ray.exceptions
        return isinstance(error, errors.WorkerCrashedError | errors.NodeDiedError | errors.ObjectLostError)

    def restart(self) -> None:
        """Do nothing: Ray replaces its workers."""

    def close(self) -> None:
        """Leave the cluster, which then ends the remaining tasks of this command."""
        self._ray.shutdown()


def _call(function: Callable[..., _R], *arguments: Any) -> _R:
    return function(*arguments)
