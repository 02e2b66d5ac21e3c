"""Engines that run on this machine, found by the sockets on which they listen, and asked."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from schedtrace.engine.unprepared import make_listen, nobody_listens, unprepared_engines
from schedtrace.errors import EngineError, InputError, UsageError
from schedtrace.model import live
from schedtrace.model.live import AnyAnswer, AnyAsk, AskQueue, AskStatus, QueueNow, Refused, Status
from schedtrace.model.queue import EngineQueues
from schedtrace.record.control_socket import ask
from schedtrace.record.processes import above

STATUS_S = 2.0
"""For an answer that needs nothing of the engine's own thread."""
ACT_S = 60.0
"""For one that waits for the end of a step."""


@dataclass(frozen=True)
class RunningEngine:
    """A process that listens."""

    socket: Path
    status: Status

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"engine {self.status.rank} (pid {self.status.pid})"

    def ask(self, question: AnyAsk, timeout_s: float = ACT_S) -> AnyAnswer:
        """Its answer.

        Raises:
            EngineError: it refuses, or does not answer.
        """
        try:
            answer = ask(self.socket, question, timeout_s)
        except TimeoutError as error:
            msg = f"{self.name} has not answered for {timeout_s:g} s"
            raise EngineError(msg) from error
        except (OSError, msgspec.MsgspecError) as error:
            msg = f"{self.name} does not answer: {error}"
            raise EngineError(msg) from error
        if isinstance(answer, Refused):
            msg = f"{self.name}: {answer.why}"
            raise EngineError(msg)
        return answer


def running_engines() -> list[RunningEngine]:
    """All of this user, and for root of all users, by process id; sockets of dead processes are removed."""
    found = []
    for path in _sockets():
        with suppress(OSError, msgspec.MsgspecError):
            try:
                status = ask(path, AskStatus(), STATUS_S)
            except ConnectionRefusedError:  # its process was killed
                path.unlink()
                continue
            if isinstance(status, Status) and status.role == "engine":
                found.append(RunningEngine(path, status))
    return sorted(found, key=lambda one: one.status.pid)


def reached(target: str | None) -> list[RunningEngine]:
    """As ``chosen``, and those that began without schedtrace as well, where Python lets us reach into them.

    Raises:
        UsageError: as ``chosen``.
        InputError: as ``chosen``, or one could not be reached into.
    """
    if target is not None or not running_engines():
        make_listen(target)
    return chosen(target)


def chosen(target: str | None) -> list[RunningEngine]:
    """The engines that a person means.

    Args:
        target: ``all``, the process id of an engine or of a process above it, such as ``vllm serve``; None:
            the only server there is.

    Raises:
        UsageError: it is no process id, or nothing was said and there are several servers.
        InputError: there is no such engine.
    """
    engines = running_engines()
    if target == "all" or target is None:
        if not engines:
            raise InputError(nobody_listens(unprepared_engines(None)))
        if target is None and len({_server(one.status.pid) for one in engines}) > 1:
            pids = ", ".join(str(one.status.pid) for one in engines)
            msg = f"several engines run here (pids {pids}): name one, or all"
            raise UsageError(msg)
        return engines
    if not target.isdecimal():
        msg = f"{target}: expected a process id, or all"
        raise UsageError(msg)
    pid = int(target)
    found = [one for one in engines if pid == one.status.pid or pid in above(one.status.pid)]
    if found:
        return found
    if not Path(f"/proc/{pid}").exists():
        msg = f"{pid}: no such process"
        raise InputError(msg)
    waiting = unprepared_engines(target)
    msg = (
        nobody_listens(waiting)
        if waiting
        else f"{pid}: neither an engine of vLLM, nor above one that listens"
    )
    raise InputError(msg)


def live_queues(target: str | None) -> EngineQueues:
    """Who waits and who runs in the engines that a person means.

    Raises:
        EngineError: one does not answer.
        InputError: as ``reached``.
        UsageError: as ``reached``.
    """
    return queues_of(reached(target))


def queues_of(engines: Iterable[RunningEngine]) -> EngineQueues:
    """Who waits and who runs in these.

    Raises:
        EngineError: one does not answer.
    """
    answers = [engine.ask(AskQueue()) for engine in engines]
    found = [answer.queue for answer in answers if isinstance(answer, QueueNow)]
    return EngineQueues(engines=sorted(found, key=lambda one: one.rank))


def _server(pid: int) -> int:
    """The process that started an engine, and with it the other ranks of one server."""
    return next(iter(above(pid)), pid)


def _sockets() -> Iterator[Path]:
    user = os.geteuid()
    folders = [live.folder_of(user)] if user else sorted(live.FOLDER.glob("schedtrace-*"))
    for folder in folders:
        with suppress(OSError, ValueError):
            if live.is_private(folder, int(folder.name.rpartition("-")[2])):
                yield from sorted(folder.glob("*.sock"))
