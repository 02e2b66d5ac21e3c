"""Facts about processes and threads from Linux: parents, states and processor times."""

import multiprocessing
import os
import re
import threading
import time
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
    """Return the process id that a text states; None if the text is no process id."""
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


EVERY_US = 1_000_000
IDLE_EVERY_US = 5_000_000
"""Microseconds between lines of an idle engine; for ``watch``, a trace that is silent longer is dead."""


class CpuTimes:
    """Times in which the engine's own threads ran, or were ready and had to wait for a processor.

    ``/proc/<pid>/task/<tid>/schedstat`` counts, for each thread, nanoseconds that it ran and nanoseconds that
    it was ready and had to wait. These are the engine's thread, the main threads of its workers, and that of
    the front end. Create this object on the engine's thread and call it on the writer's.
    """

    def __init__(self) -> None:
        self._engine = threading.get_native_id()
        self._next_us = self._idle_us = 0
        self._steps = -1
        self._worked = False

    def line(self, now_us: int, steps: int) -> list[Cpu]:
        """Return a line if a second has passed since the last line; five seconds if the engine is idle.

        Args:
            now_us: Time on the trace's clock.
            steps: Number of steps that the engine has made.
        """
        if now_us < self._next_us or (steps == self._steps and not self._worked and now_us < self._idle_us):
            return []
        self._next_us, self._idle_us = now_us + EVERY_US, now_us + IDLE_EVERY_US
        self._worked, self._steps = steps != self._steps, steps
        times = [time for role, pid, tid in self._threads() if (time := _read(role, pid, tid)) is not None]
        return [Cpu(at_us=now_us, threads=times)] if times else []

    def _threads(self) -> list[tuple[Role, int, int]]:
        pid = os.getpid()
        threads: list[tuple[Role, int, int]] = [("engine", pid, self._engine)]
        threads += [("worker", child, child) for child in children(pid)]
        if multiprocessing.parent_process() is not None:
            threads.append(("front_end", os.getppid(), os.getppid()))
        return threads


def _read(role: Role, pid: int, tid: int) -> ThreadTime | None:
    try:
        ran, waited, _ = Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()
        return ThreadTime(role, pid, tid, int(ran) // 1000, int(waited) // 1000)
    except (OSError, ValueError):
        return None
