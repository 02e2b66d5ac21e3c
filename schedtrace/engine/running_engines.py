"""Discovery of engines on this machine, and queries over the sockets on which they listen.

``probe_engines`` judges their health, for a person or an orchestrator that restarts dead and stalled engines.
"""

import os
import time
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from schedtrace.engine.unprepared import any_engine, make_listen, nobody_listens
from schedtrace.errors import EngineError, InputError, UsageError, engine_error
from schedtrace.model import live
from schedtrace.model.live import (
    AnyAnswer,
    AnyAsk,
    AskQueue,
    AskStatus,
    EngineQueue,
    EngineQueues,
    Health,
    QueueNow,
    Refused,
    Status,
)
from schedtrace.model.printable import shortened
from schedtrace.record.live.control_socket import AnswerError, Connection, Peer, ask_process
from schedtrace.record.processes import (
    ProcessorWaits,
    above,
    pids_within,
    process_id,
    process_state,
    thread_states,
    threads_of,
)

STATUS_S = 2.0
"""Time limit in seconds for an answer that needs nothing from the engine's own thread."""
ACT_S = 60.0
"""Time limit in seconds for an answer that waits for the end of a step."""
MOST_SOCKETS = 256
"""Maximum number of a user's processes that are queried; each engine and each worker has a socket."""
MOST_NOTES = 20
MOST_AT_ONCE = 64
LONGEST_WHY = 1500
"""Maximum number of characters quoted from a refusal, which may contain paths."""
_T = TypeVar("_T", bound=AnyAnswer)


class NoAnswerError(EngineError):
    """Error: an engine did not confirm a request, so whether it carries out the request is unknown."""


@dataclass(frozen=True)
class RunningEngine:
    """Engine process that listens on a socket."""

    socket: Path
    status: Status
    here: int
    """Process id in this PID namespace; 0 if the process is not visible in it."""

    @property
    def display_name(self) -> str:
        """Name of the engine for users."""
        return f"engine {self.status.rank} (pid {self.status.pid}{_where(self.status.pid, self.here)})"

    @property
    def server(self) -> int:
        """Id of the process that started the engine (``server_of``)."""
        return server_of(self.here) if self.here else self.status.pid

    def answer_to(self, question: AnyAsk, expected: type[_T], timeout_s: float | None = None) -> _T:
        """Send a question and return the answer.

        Args:
            question: Question to send.
            expected: Kind of the answer.
            timeout_s: Time limit for the whole answer (default: ``ACT_S``).

        Raises:
            EngineError: If the engine refuses.
            NoAnswerError: If the engine does not answer, or its reply is not an answer to the question.
        """
        timeout_s = ACT_S if timeout_s is None else timeout_s
        try:
            answer = ask_process(self.socket, question, expected, timeout_s)
        except TimeoutError as error:
            msg = f"{self.display_name} has not answered for {timeout_s:g} s"
            raise NoAnswerError(msg) from error
        except (ConnectionRefusedError, FileNotFoundError) as error:
            msg = f"{self.display_name} does not answer: no process listens there any more"
            raise NoAnswerError(msg) from error
        except (OSError, AnswerError) as error:
            msg = f"{self.display_name} does not answer: {error}"
            raise NoAnswerError(msg) from error
        if isinstance(answer, Refused):
            msg = f"{self.display_name}: {shortened(answer.why, LONGEST_WHY)}"
            raise EngineError(msg)
        return answer


class Listening(NamedTuple):
    """Engines that listen, and engines that do not answer."""

    engines: list[RunningEngine]
    silent: dict[int, str]
    """Process ids of engines that do not answer, each with a description of what the engine does."""
    notes: list[str] = []  # noqa: RUF012  # never changed
    """Notes for the user on sockets that were left out, with the reasons."""
    silent_here: dict[int, int] = {}  # noqa: RUF012  # never changed
    """Process ids of engines that do not answer, each with its process id in this PID namespace."""

    def with_pids(self, pids: Container[int]) -> "Listening":
        """Return the engines with these process ids."""
        silent = {pid: what for pid, what in self.silent.items() if pid in pids}
        engines = [engine for engine in self.engines if engine.status.pid in pids]
        return Listening(engines, silent, silent_here=self.silent_here)


class _Found(NamedTuple):
    """Result of querying one socket; all fields are None if there is nothing of interest."""

    engine: RunningEngine | None = None
    silent: tuple[int, str, int] | None = None
    """Process id in the socket's name, a description of what the process does instead of answering, and its
    id in this PID namespace."""
    note: str | None = None


def _where(pid: int, here: int) -> str:
    return "" if pid == here else " in another container"


def listening_engines() -> Listening:
    """Query all engines of this user (for root, of all users) at once; remove sockets of dead processes."""
    paths, notes = _sockets()
    outcomes: list[_Found] = []
    if paths:
        with ThreadPoolExecutor(min(len(paths), MOST_AT_ONCE)) as pool:
            outcomes = list(pool.map(_found, paths))
    engines = [outcome.engine for outcome in outcomes if outcome.engine is not None]
    silent = sorted(outcome.silent for outcome in outcomes if outcome.silent is not None)
    notes += [outcome.note for outcome in outcomes if outcome.note is not None]
    if len(notes) > MOST_NOTES:
        notes[MOST_NOTES:] = [f"{len(notes) - MOST_NOTES:,} more are left out for such reasons"]
    return Listening(
        sorted(engines, key=lambda engine: engine.status.pid),
        {pid: what for pid, what, _ in silent},
        notes,
        {pid: here for pid, _, here in silent},
    )


def _found(path: Path) -> _Found:
    """Ask the process of one socket for its status; remove the socket of a dead process."""
    pid = int(path.stem)
    peer: Peer | None = None
    answer: Status | Refused | Exception
    try:
        with Connection(path, STATUS_S) as connection:
            peer = connection.peer
            answer = connection.ask(AskStatus(), Status)
    except (OSError, AnswerError) as error:
        answer = error
    if peer is not None and (stranger := _stranger(path, peer)) is not None:
        return _Found(note=stranger)
    refused = isinstance(answer, ConnectionRefusedError)
    is_its_own = refused or (peer is not None and peer.pid == pid)
    if is_its_own and not _is_alive(pid):  # a child that it forked may hold the socket
        with suppress(OSError):
            path.unlink()
        return _Found()
    if isinstance(answer, Status) and peer is not None:
        if answer.pid != pid:
            return _Found(note=f"{path} is left out: its process says that it is process {answer.pid}")
        return _Found(RunningEngine(path, answer, peer.pid) if answer.role == "engine" else None)
    here = pid if peer is None else peer.pid
    if refused or not path.exists() or _is_worker(path, here):
        return _Found()
    fault = f"has not answered for {STATUS_S:g} s"
    if not isinstance(answer, TimeoutError):
        why = answer.why if isinstance(answer, Refused) else str(answer)
        fault = f"does not answer: {shortened(why, LONGEST_WHY)}"
    return _Found(silent=(pid, f"engine process {pid}{_where(pid, here)} {fault}", here))


def _stranger(path: Path, peer: Peer) -> str | None:
    """Return a note if the listening process is not the one in the socket's name; None if it is.

    A process in another PID namespace has a different id there, and may have no id here.
    """
    pid, user = int(path.stem), int(path.parent.name.rpartition("-")[2])
    if peer.user != user:
        return f"{path} is left out: user {peer.user} listens there, not user {user}"
    if peer.pid in {0, pid} or pid in pids_within(peer.pid):
        return None
    return f"{path} is left out: process {peer.pid} listens there, not process {pid}"


def running_engines() -> list[RunningEngine]:
    """Return the engines that answer."""
    return listening_engines().engines


def reached(target: str | None) -> list[RunningEngine]:
    """Return the engines of ``chosen``, after making unprepared engines listen if Python can do so.

    Raises:
        UsageError: As for ``chosen``.
        InputError: As for ``chosen``, or if an engine could not be reached.
    """
    _prepare(target)
    return chosen(target)


def _prepare(target: str | None) -> None:
    if target is not None or not any(listening_engines()[:2]):
        make_listen(target)


def chosen(target: str | None) -> list[RunningEngine]:
    """Return the engines that the user's target selects.

    Raises:
        EngineError: If an engine does not answer.
        UsageError: As for ``find_engines``.
        InputError: As for ``find_engines``.
    """
    listening = find_engines(target)
    if listening.silent:
        raise engine_error(list(listening.silent.values()))
    return listening.engines


def find_engines(target: str | None) -> Listening:
    """Return the engines that the user's target selects, and those among them that do not answer.

    Args:
        target: ``all``, the process id of an engine or of a process above it, such as ``vllm serve``; None
            for the only server.

    Raises:
        UsageError: If the target is not a process id, or is None although there are several servers.
        InputError: If there is no such engine.
    """
    all_engines = listening_engines()
    engines, silent, notes, _ = all_engines
    pids = sorted([*(engine.status.pid for engine in engines), *silent])
    if target == "all" or target is None:
        if not pids:
            raise InputError("; ".join([nobody_listens(None), *notes]))
        if target is None and len({*(engine.server for engine in engines), *map(server_of, silent)}) > 1:
            msg = f"several engines run here (pids {', '.join(map(str, pids))}): name one, or all"
            raise UsageError(msg)
        return all_engines
    pid = process_id(target)
    if pid is None:
        msg = f"{target}: expected a process id, or all"
        raise UsageError(msg)
    here = {engine.status.pid: engine.here for engine in engines}
    below = {
        engine_pid
        for engine_pid in pids
        if pid == engine_pid or pid in (at := here.get(engine_pid, engine_pid), *above(at))
    }
    if below:
        return all_engines.with_pids(below)
    if not Path(f"/proc/{pid}").exists():
        msg = f"{pid}: no such process"
        raise InputError(msg)
    if any_engine(target):
        raise InputError("; ".join([nobody_listens(target), *notes]))
    msg = f"{pid}: neither an engine of vLLM, nor above one that listens"
    raise InputError("; ".join([msg, *notes]))


def live_queues(target: str | None) -> tuple[EngineQueues, list[str]]:
    """Return the waiting and running requests of the selected engines, and errors about the silent engines.

    Raises:
        InputError: As for ``reached``.
        UsageError: As for ``reached``.
    """
    _prepare(target)
    return queues_of(find_engines(target))


def queues_of(targets: Listening, *, glance: bool = True) -> tuple[EngineQueues, list[str]]:
    """Return the engines' waiting and running requests, by rank, and errors about the silent engines.

    Engines with an unexpected answer also count as silent.

    Args:
        targets: The engines.
        glance: Whether to record an engine briefly, to find the causes, if it is not being recorded.
    """
    queues, errors = [], list(targets.silent.values())
    for engine in targets.engines:
        try:
            queue = engine.answer_to(AskQueue(glance=glance), QueueNow).queue
        except EngineError as error:
            errors.append(str(error))
            continue
        if queue.pid == engine.status.pid:
            queues.append(queue)
        else:
            errors.append(f"{engine.display_name} answers for process {queue.pid}")
    return EngineQueues(engines=sorted(queues, key=lambda queue_now: queue_now.rank)), errors


def follow_queues(target: str | None, every_s: float) -> Iterator[EngineQueue]:
    """Yield the queue of each selected engine, repeatedly.

    This function starts no recording, so causes are known only for engines that are being recorded or whose
    metrics are on.

    Args:
        target: Target as for ``find_engines``.
        every_s: Seconds between two answers of an engine.

    Raises:
        EngineError: If an engine no longer answers.
        InputError: As for ``reached``.
        UsageError: As for ``reached``.
    """
    _prepare(target)
    targets = find_engines(target)
    while True:
        begin_s = time.monotonic()
        queues, errors = queues_of(targets, glance=False)
        yield from queues.engines
        if errors:
            raise engine_error(errors)
        time.sleep(max(0.0, begin_s + every_s - time.monotonic()))


def server_of(pid: int) -> int:
    """Return the id of the process that started the engine and all other ranks of its server."""
    return next(iter(above(pid)), pid)


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return process_state(pid).state not in {"Z", "X"}
    return False


def _is_worker(path: Path, here: int) -> bool:
    """Return whether the process is a worker of an engine that also listens.

    Args:
        path: Socket of the process.
        here: Process id as seen from here.
    """
    return any(path.with_name(f"{pid}.sock").exists() for pid in above(here)[:1])


def _sockets() -> tuple[list[Path], list[str]]:
    """Return the sockets of this user (for root, of all users), and problems with their folders."""
    user = os.geteuid()
    folders = [live.socket_folder(user)] if user else sorted(live.FOLDER.glob("schedtrace-*"))
    paths, wrong = [], []
    for folder in folders:
        owner = process_id(folder.name.rpartition("-")[2])
        if owner is None:
            continue
        if (why := live.squatted(folder, owner)) is not None:
            wrong.append(why)
            continue
        sockets: list[Path] = []
        with suppress(OSError):  # it is gone
            sockets = [
                path for path in sorted(folder.glob("*.sock")) if process_id(path.stem) and path.is_socket()
            ]
        paths += sockets[:MOST_SOCKETS]
        if (left_out := len(sockets) - MOST_SOCKETS) > 0:
            wrong.append(f"{left_out:,} more sockets in {folder} are left out: too many to ask")
    return paths, wrong


RETRY_S = 0.5
"""Seconds between two attempts to get an answer."""
STARVED_SHARE = 0.5
"""Minimum share of an engine's silence for which a wait for a processor explains the silence."""


class ProbedEngine(NamedTuple):
    """Engine with its health."""

    name: str
    health: Health
    running: int = 0
    waiting: int = 0

    @property
    def probe_line(self) -> str:
        """Line about the engine's health, for a person."""
        load = f"{self.running:,} running, {self.waiting:,} waiting"
        return f"{self.name}: {self.health.state}: {self.health.cause or load}"


def probe_engines(target: str | None, *, timeout_s: float, engines: int) -> list[ProbedEngine]:
    """Return the health of the selected engines, in the order of their process ids.

    A silent process is queried repeatedly until the time is over, because on a saturated machine the thread
    that answers may get no processor time for a while.

    Args:
        target: Target as for ``running_engines.find_engines``.
        timeout_s: Seconds within which an engine must answer.
        engines: Expected minimum number of engines; missing ones count as dead.

    Raises:
        UsageError: If the target is not a process id, or does not identify one server.
    """
    end_s = time.monotonic() + timeout_s
    silences: dict[int, _Silence] = {}
    while True:
        why = "it does not listen: its process has ended, or is still starting"
        try:
            listening = find_engines(target)
        except InputError as error:
            listening, why = Listening([], {}), str(error)
        silences = {pid: silences.get(pid) or _Silence(here) for pid, here in listening.silent_here.items()}
        for silence in silences.values():
            silence.check_threads()
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
        starved = silences[pid].starved_words if pid in silences else None
        health = Health("silent", what) if starved is None else Health("busy", f"{what}: it {starved}")
        probed[pid] = ProbedEngine(f"pid {pid}", health)
    missing = [ProbedEngine("an engine", Health("dead", why))] * (engines - len(probed))
    return [probed[pid] for pid in sorted(probed)] + missing


class _Silence:
    """Period in which an engine does not answer, and what its threads do in that period.

    Args:
        here: Process id of the engine as seen from here.
    """

    def __init__(self, here: int) -> None:
        self._waits = ProcessorWaits(lambda: thread_states(threads_of([here])))
        self._begin_s = self._looked_s = time.monotonic()

    def check_threads(self) -> None:
        """Sample the states of the engine's threads."""
        now_s = time.monotonic()
        self._waits.look(now_s, now_s - self._looked_s)
        self._looked_s = now_s

    @property
    def starved_words(self) -> str | None:
        """Phrase stating that the engine waits for a processor; None if that does not explain the silence."""
        lasted_s, waited_s = self._looked_s - self._begin_s, self._waits.waited_s
        if waited_s == 0.0 or waited_s < STARVED_SHARE * lasted_s:
            return None
        return f"waits for a processor ({waited_s:,.0f} of the last {lasted_s:,.0f} s)"
