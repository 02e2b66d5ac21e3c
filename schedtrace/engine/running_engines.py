"""Engines that run on this machine, found by the sockets on which they listen, and asked."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from schedtrace.engine.unprepared import make_listen, nobody_listens, unprepared_engines
from schedtrace.errors import EngineError, InputError, UsageError
from schedtrace.model import live
from schedtrace.model.live import AnyAnswer, AnyAsk, AskQueue, AskStatus, QueueNow, Refused, Status
from schedtrace.model.queue import EngineQueues
from schedtrace.record.control_socket import ask
from schedtrace.record.processes import above, process

STATUS_S = 2.0
"""For an answer that needs nothing of the engine's own thread."""
ACT_S = 60.0
"""For one that waits for the end of a step."""


class NoAnswerError(EngineError):
    """An engine may do what it was asked, or not."""


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
            EngineError: it refuses.
            NoAnswerError: it does not answer.
        """
        try:
            answer = ask(self.socket, question, timeout_s)
        except TimeoutError as error:
            msg = f"{self.name} has not answered for {timeout_s:g} s"
            raise NoAnswerError(msg) from error
        except (OSError, msgspec.MsgspecError) as error:
            msg = f"{self.name} does not answer: {error}"
            raise NoAnswerError(msg) from error
        if isinstance(answer, Refused):
            msg = f"{self.name}: {answer.why}"
            raise EngineError(msg)
        return answer


class Listening(NamedTuple):
    """Engines that listen, by process id."""

    engines: list[RunningEngine]
    silent: list[int]
    """Process ids of those that do not answer."""

    def require_answers(self) -> None:
        """Raises EngineError where one does not answer."""
        if self.silent:
            raise EngineError("; ".join(map(no_answer, self.silent)))


def no_answer(pid: int) -> str:
    """What a person should know about an engine that does not answer."""
    return f"engine process {pid} has not answered for {STATUS_S:g} s"


def listening() -> Listening:
    """All of this user, and for root of all users; sockets of dead processes are removed."""
    found, silent = [], []
    for path in _sockets():
        with suppress(OSError, msgspec.MsgspecError):
            try:
                status = ask(path, AskStatus(), STATUS_S)
            except (ConnectionRefusedError, TimeoutError, BlockingIOError) as error:
                pid = int(path.stem)
                if not _is_alive(pid):  # a child that it forked may hold the socket
                    path.unlink()
                elif not isinstance(error, ConnectionRefusedError) and not _is_worker(path):
                    silent.append(pid)
                continue
            if isinstance(status, Status) and status.role == "engine":
                found.append(RunningEngine(path, status))
    return Listening(sorted(found, key=lambda one: one.status.pid), sorted(silent))


def running_engines() -> list[RunningEngine]:
    """Those that answer."""
    return listening().engines


def reached(target: str | None) -> list[RunningEngine]:
    """As ``chosen``, and those that began without schedtrace as well, where Python lets us reach into them.

    Raises:
        UsageError: as ``chosen``.
        InputError: as ``chosen``, or one could not be reached into.
    """
    if target is not None or not any(listening()):
        make_listen(target)
    return chosen(target)


def chosen(target: str | None) -> list[RunningEngine]:
    """The engines that a person means.

    Raises:
        EngineError: one of them does not answer.
        UsageError: as ``meant``.
        InputError: as ``meant``.
    """
    found = meant(target)
    found.require_answers()
    return found.engines


def meant(target: str | None) -> Listening:
    """The engines that a person means, and those of them that do not answer.

    Args:
        target: ``all``, the process id of an engine or of a process above it, such as ``vllm serve``; None:
            the only server there is.

    Raises:
        UsageError: it is no process id, or nothing was said and there are several servers.
        InputError: there is no such engine.
    """
    engines, silent = listening()
    pids = sorted([*(one.status.pid for one in engines), *silent])
    if target == "all" or target is None:
        if not pids:
            raise InputError(nobody_listens(unprepared_engines(None)))
        if target is None and len(set(map(server_of, pids))) > 1:
            msg = f"several engines run here (pids {', '.join(map(str, pids))}): name one, or all"
            raise UsageError(msg)
        return Listening(engines, silent)
    if not target.isdecimal():
        msg = f"{target}: expected a process id, or all"
        raise UsageError(msg)
    pid = int(target)
    below = {one for one in pids if pid == one or pid in above(one)}
    if below:
        return Listening(
            [one for one in engines if one.status.pid in below], [one for one in silent if one in below]
        )
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


def server_of(pid: int) -> int:
    """The process that started an engine, and with it the other ranks of one server."""
    return next(iter(above(pid)), pid)


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return process(pid).state not in {"Z", "X"}
    return False


def _is_worker(path: Path) -> bool:
    """By the engine that started it, which listens as well."""
    return path.with_name(f"{server_of(int(path.stem))}.sock").exists()


def _sockets() -> Iterator[Path]:
    user = os.geteuid()
    folders = [live.folder_of(user)] if user else sorted(live.FOLDER.glob("schedtrace-*"))
    for folder in folders:
        with suppress(OSError, ValueError):
            if live.is_private(folder, int(folder.name.rpartition("-")[2])):
                yield from sorted(path for path in folder.glob("*.sock") if path.stem.isdecimal())
