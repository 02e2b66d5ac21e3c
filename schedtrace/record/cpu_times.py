"""Whether the engine's own threads get the processors that they are ready to use (Linux).

``/proc/<pid>/task/<tid>/schedstat`` counts, for each thread, nanoseconds that it ran and nanoseconds that it
was ready and had to wait. The engine's thread, the main threads of its workers, and that of the front end.
"""

import multiprocessing
import os
import threading
from contextlib import suppress
from pathlib import Path

from schedtrace.model.trace import Cpu
from schedtrace.model.trace_facts import Role, ThreadTime

EVERY_US = 1_000_000


class CpuTimes:
    """Made on the engine's thread, asked on the writer's."""

    def __init__(self) -> None:
        self._engine = threading.get_native_id()
        self._next_us = 0

    def line(self, now_us: int) -> list[Cpu]:
        """One line if a second has gone by since the last, and there is something to say."""
        if now_us < self._next_us:
            return []
        self._next_us = now_us + EVERY_US
        times = [time for role, pid, tid in self._threads() if (time := _read(role, pid, tid)) is not None]
        return [Cpu(at_us=now_us, threads=times)] if times else []

    def _threads(self) -> list[tuple[Role, int, int]]:
        pid = os.getpid()
        threads: list[tuple[Role, int, int]] = [("engine", pid, self._engine)]
        threads += [("worker", child, child) for child in children(pid)]
        if multiprocessing.parent_process() is not None:
            threads.append(("front_end", os.getppid(), os.getppid()))
        return threads


def children(pid: int) -> list[int]:
    """Processes that any thread of this one has started."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended
                found += map(int, (task / "children").read_text().split())
    return sorted(found)


def _read(role: Role, pid: int, tid: int) -> ThreadTime | None:
    try:
        ran, waited, _ = Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()
        return ThreadTime(role, pid, tid, int(ran) // 1000, int(waited) // 1000)
    except (OSError, ValueError):
        return None
