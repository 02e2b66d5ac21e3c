"""Health of running engines, for a person or an orchestrator that restarts what is dead or stalled."""

import time
from typing import NamedTuple

from schedtrace.engine.running_engines import Listening, find_engines
from schedtrace.errors import InputError
from schedtrace.model.live import Health

RETRY_S = 0.5
"""Seconds between two attempts to get an answer."""


class ProbedEngine(NamedTuple):
    """An engine and its health."""

    name: str
    health: Health
    running: int = 0
    waiting: int = 0

    @property
    def line(self) -> str:
        """Line for a person."""
        load = f"{self.running:,} running, {self.waiting:,} waiting"
        return f"{self.name}: {self.health.state}: {self.health.cause or load}"


def probe_engines(target: str | None, *, timeout_s: float, engines: int) -> list[ProbedEngine]:
    """Return the health of the engines that the user means, by process id.

    A process that does not answer is asked again until the time is over: at saturation the thread that
    answers may get no processor time for a while.

    Args:
        target: Target as for ``running_engines.find_engines``.
        timeout_s: Seconds within which an engine must answer.
        engines: Number of engines that there must be; missing ones are dead.

    Raises:
        UsageError: If the target is no process id, or it is not clear which server is meant.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        listening, why = _find(target)
        complete = not listening.silent and len(listening.engines) >= engines
        if complete or time.monotonic() >= end_s:
            break
        time.sleep(min(RETRY_S, max(0.0, end_s - time.monotonic())))
    probed = {
        engine.status.pid: ProbedEngine(
            engine.display_name, engine.status.health, engine.status.running, engine.status.waiting
        )
        for engine in listening.engines
    }
    for pid, what in listening.silent.items():
        probed[pid] = ProbedEngine(f"pid {pid}", Health("silent", what))
    missing = [ProbedEngine("an engine", Health("dead", why))] * (engines - len(probed))
    return [probed[pid] for pid in sorted(probed)] + missing


def _find(target: str | None) -> tuple[Listening, str]:
    """Return the engines, and why there may be fewer than expected."""
    try:
        return find_engines(target), "it does not listen: its process has ended, or is still starting"
    except InputError as error:
        return Listening([], {}), str(error)
