"""Health of running engines, for a person or an orchestrator that restarts what is dead or stalled."""

import time
from typing import NamedTuple

from schedtrace.engine.running_engines import Listening, find_engines
from schedtrace.errors import InputError
from schedtrace.model.live import Health
from schedtrace.record.processes import ProcessorWaits, thread_states, threads_of

RETRY_S = 0.5
"""Seconds between two attempts to get an answer."""
STARVED_SHARE = 0.5
"""Share of the time without an answer from which a wait for a processor explains the silence."""


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
    silences: dict[int, _Silence] = {}
    while True:
        listening, why = _find(target)
        silences = {pid: silences.get(pid) or _Silence(here) for pid, here in listening.silent_here.items()}
        for silence in silences.values():
            silence.look()
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
        starved = silences[pid].starved if pid in silences else None
        health = Health("silent", what) if starved is None else Health("busy", f"{what}: it {starved}")
        probed[pid] = ProbedEngine(f"pid {pid}", health)
    missing = [ProbedEngine("an engine", Health("dead", why))] * (engines - len(probed))
    return [probed[pid] for pid in sorted(probed)] + missing


class _Silence:
    """Time in which an engine does not answer, and what its threads did meanwhile.

    Args:
        here: Process id of the engine as seen from here.
    """

    def __init__(self, here: int) -> None:
        self._waits = ProcessorWaits(lambda: thread_states(threads_of([here])))
        self._begin_s = self._looked_s = time.monotonic()

    def look(self) -> None:
        """Look at the engine's threads."""
        now_s = time.monotonic()
        self._waits.look(now_s, now_s - self._looked_s)
        self._looked_s = now_s

    @property
    def starved(self) -> str | None:
        """Words saying that the engine waits for a processor; None if that is not why it is silent."""
        lasted_s, waited_s = self._looked_s - self._begin_s, self._waits.waited_s
        if waited_s == 0.0 or waited_s < STARVED_SHARE * lasted_s:
            return None
        return f"waits for a processor ({waited_s:,.0f} of the last {lasted_s:,.0f} s)"


def _find(target: str | None) -> tuple[Listening, str]:
    """Return the engines, and why there may be fewer than expected."""
    try:
        return find_engines(target), "it does not listen: its process has ended, or is still starting"
    except InputError as error:
        return Listening([], {}), str(error)
