"""What Linux tells of processes: who started whom, and whether they run."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """One, at the moment (``proc_pid_stat(5)``)."""

    state: str
    """A letter: ``R`` runs, ``S`` sleeps, ``T`` is stopped, ``Z`` has ended."""
    parent: int
    """Process id of who started it."""


def process(pid: int) -> Process:
    """How a process is.

    Raises:
        OSError: it is gone.
    """
    state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Process(state, int(parent))


def above(pid: int) -> list[int]:
    """The processes above one, the nearest first."""
    found: list[int] = []
    while pid > 1:
        try:
            pid = process(pid).parent
        except OSError:
            break
        found.append(pid)
    return found


def children(pid: int) -> list[int]:
    """Processes that any thread of this one has started."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended
                found += map(int, (task / "children").read_text().split())
    return sorted(found)
