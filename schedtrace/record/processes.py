"""Facts about processes and threads from Linux: parents, states and processor times."""

import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from schedtrace.model.trace import Cpu
from schedtrace.model.trace_facts import Role, ThreadTime


class ProcessState(NamedTuple):
    """State of a process at one moment (``proc_pid_stat(5)``)."""

    state: str
    """State as a letter: ``R`` runs, ``S`` sleeps, ``T`` is stopped, ``Z`` has ended."""
    parent: int
    """Process id of the parent."""


def process_state(pid: int) -> ProcessState:
    """Return the state of a process.

    Raises:
        OSError: If the process has ended.
    """
    state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ProcessState(state, int(parent))


def age_s(pid: int) -> float | None:
    """Return the seconds since a process started; None if it has ended."""
    with suppress(OSError):
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    return None


def process_id(text: str) -> int | None:
    """Return the process id that a text states; None if the text is not a process id."""
    return int(text) if re.fullmatch("[0-9]{1,10}", text) else None


def pids_within(pid: int) -> list[int]:
    """Return the ids of one process in its PID namespaces, the outermost first."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return [int(number) for number in line.split()[1:]]
    return []


def above(pid: int) -> list[int]:
    """Return the ancestors of a process, the nearest first."""
    parents: list[int] = []
    while pid > 1:
        try:
            pid = process_state(pid).parent
        except OSError:
            break
        parents.append(pid)
    return parents


def children(pid: int) -> list[int]:
    """Return the processes that any thread of this process has started."""
    child_ids: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended
                child_ids += map(int, (task / "children").read_text().split())
    return sorted(child_ids)


def front_end_ended(addresses: Collection[str]) -> int | None:
    """Return the process id of the front end that started this process if the front end has ended.

    Return None if it runs, if another process took over, or if the answer is unknown (a front end on another
    machine).

    Args:
        addresses: ZeroMQ addresses that front ends bind and from which this process takes requests.
    """
    parent = multiprocessing.parent_process()
    paths = [address.removeprefix("ipc://") for address in addresses if address.startswith("ipc:///")]
    if parent is None or parent.pid is None or os.getppid() == parent.pid or len(paths) < len(addresses):
        return None
    with suppress(OSError):
        bound = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
        return None if not paths or bound & set(paths) else parent.pid
    return None


EVERY_US = 1_000_000
IDLE_EVERY_US = 5_000_000
"""Microseconds between lines of an idle engine; ``watch`` treats a trace that is silent for longer as dead.
"""


class CpuTimes:
    """Times for which the engine's threads ran, or were ready to run but had to wait for a processor.

    ``/proc/<pid>/task/<tid>/schedstat`` counts, for each thread, nanoseconds that it ran and nanoseconds that
    it was ready and had to wait. The threads are the engine's, the main threads of its workers, and the front
    end's main thread. Create this object on the engine's thread and call it on the writer's.
    """

    def __init__(self) -> None:
        self._engine = threading.get_native_id()
        self._next_us = self._idle_us = 0
        self._steps = -1
        self._worked = False

    def line(self, now_us: int, steps: int) -> list[Cpu]:
        """Return a line if a second has passed since the last one (five seconds if the engine is idle).

        Args:
            now_us: Time on the trace's clock.
            steps: Number of steps that the engine has made.
        """
        if now_us < self._next_us or (steps == self._steps and not self._worked and now_us < self._idle_us):
            return []
        self._next_us, self._idle_us = now_us + EVERY_US, now_us + IDLE_EVERY_US
        self._worked, self._steps = steps != self._steps, steps
        pid = os.getpid()
        threads: list[tuple[Role, int, int]] = [("engine", pid, self._engine)]
        threads += [("worker", child, child) for child in children(pid)]
        if multiprocessing.parent_process() is not None:
            threads.append(("front_end", os.getppid(), os.getppid()))
        times = [read for thread in threads if (read := _read(*thread)) is not None]
        return [Cpu(at_us=now_us, threads=times)] if times else []


def _read(role: Role, pid: int, tid: int) -> ThreadTime | None:
    """Return the times of a thread; None if it has ended, or Linux does not count them."""
    try:
        ran, waited, _ = Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()
        return ThreadTime(role, pid, tid, int(ran) // 1000, int(waited) // 1000)
    except (OSError, ValueError):
        return None


class ThreadState(NamedTuple):
    """State of a thread at one moment; times are nanoseconds since it began."""

    state: str
    """State as a letter, as in ``ProcessState``; ``R``: it runs or waits for a processor."""
    ran_ns: int
    waited_ns: int
    """Time in which the thread was ready and waited for a processor; each wait is counted when it ends."""
    runs: int
    """Number of times that the thread was given a processor."""


STOPPED = ("T", "t")
Threads = dict[tuple[int, int], ThreadState]
"""States of threads, by process id and thread id."""


def thread_states(threads: Iterable[tuple[int, int]]) -> Threads:
    """Return the states of those threads that still exist and that Linux reports."""
    states: Threads = {}
    for pid, tid in threads:
        with suppress(OSError, ValueError):
            task = f"/proc/{pid}/task/{tid}"
            state = _text(f"{task}/stat").rpartition(")")[2].split(maxsplit=1)[0]
            states[pid, tid] = ThreadState(state, *map(int, _text(f"{task}/schedstat").split()))
    return states


def own_wait_s() -> float:
    """Return the seconds for which this thread has waited for a processor since it began; 0.0 if unknown."""
    try:
        return int(_text("/proc/thread-self/schedstat").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _text(path: str) -> str:
    """Return the text of a small file, five times as fast as ``Path.read_text``."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 4096).decode(errors="replace")
    finally:
        os.close(file)


def threads_of(pids: Iterable[int]) -> list[tuple[int, int]]:
    """Return the threads of processes."""
    threads: list[tuple[int, int]] = []
    for pid in pids:
        with suppress(OSError):
            threads += [(pid, int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]
    return threads


class ProcessorWaits:
    """Time without progress in which threads that a step needs waited for a processor.

    A thread that waits for a processor is ready to work and does not hang. For each interval between two
    looks, the longest wait of any thread counts. No wait counts while any of the threads is stopped, because
    the step waits for that thread.

    Args:
        read: Function that returns the current states of the threads.
    """

    def __init__(self, read: Callable[[], Threads]) -> None:
        self.waited_s = 0.0
        """Seconds of counted waits since the first look."""
        self._read = read
        self._threads: Threads = {}
        self._totals_s: dict[tuple[int, int], float] = {}
        """Time that each thread has waited since it began, including a wait that has not ended."""
        self._ready_s: dict[tuple[int, int], float] = {}
        """Time of the first look at which the thread was ready, if it has not run since."""
        self._carried_s = 0.0
        """Part of a wait that exceeds the latest interval, because Linux counts a wait only when it ends."""

    def look(self, now_s: float, interval_s: float, *, counts: bool = True) -> None:
        """Read the threads, and count the longest wait of a thread since the previous look.

        Args:
            now_s: Time of a monotonic clock.
            interval_s: Time since the previous look, without time that does not count.
            counts: Whether waits of this interval count.
        """
        before, self._threads = self._threads, self._read()
        longest_s = max([self._waited(thread, before, now_s) for thread in self._threads], default=0.0)
        if not counts or any(thread.state in STOPPED for thread in self._threads.values()):
            self._carried_s = 0.0
            return
        due_s = self._carried_s + longest_s
        counted_s = min(due_s, interval_s)
        self.waited_s += counted_s
        self._carried_s = min(due_s - counted_s, interval_s)

    def _waited(self, thread: tuple[int, int], before: Threads, now_s: float) -> float:
        """Return the time that a thread has waited since the last look, as far as the kernel shows it."""
        state = self._threads[thread]
        if state.state != "R":
            self._ready_s.pop(thread, None)
        elif state != before.get(thread):
            self._ready_s[thread] = now_s
        lasting_s = now_s - self._ready_s.get(thread, now_s)
        total_s = state.waited_ns / 1e9 + lasting_s
        waited_s = total_s - self._totals_s.get(thread, total_s)
        self._totals_s[thread] = total_s
        return waited_s
