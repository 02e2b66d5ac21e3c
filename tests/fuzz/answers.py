"""Sockets that answer anything, in place of engines, and every command that asks them."""

import contextlib
import io
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import msgspec

import schedtrace.present.pages.queue
import schedtrace.present.renderers.text  # noqa: F401  # now: what is imported later takes the time of a case
from schedtrace.cli.main import main
from schedtrace.engine import running_engines, running_recordings, unprepared
from schedtrace.errors import SchedtraceError
from schedtrace.model import live
from schedtrace.model.live import (
    Attached,
    Detached,
    Done,
    EngineQueue,
    QueueEntry,
    QueueNow,
    Refused,
    Snapshot,
    Stacks,
    Status,
)
from schedtrace.record.live import control_socket
from schedtrace.record.live.control_socket import Peer
from schedtrace.watch.session import WatchSession

DEADLINE_S = 0.1
"""In place of the commands' own."""
MOST_S = 20.0
MOST_OUTPUT = 4_000_000
COMMANDS = (
    ["engines"],
    ["queue"],
    ["queue", "all"],
    ["queue", "all", "--format", "json"],
    ["attach", "all", "--for", "0s"],
    ["attach"],
    ["detach", "all"],
    ["snapshot", "all"],
    ["watch"],
)
STRANGER = "says to be another"
LIES = ("sends mutants", "flips bytes")
"""About the folder of a snapshot, which is all that is printed of it."""
Sends = Callable[[socket.socket, dict[str, Any]], None]


class Case(NamedTuple):
    """What was asked, who listened and what came of it."""

    command: list[str]
    engines: dict[int, str]
    """Process id to what the process does."""
    code: int
    output: str
    seconds: float

    @property
    def wrong(self) -> str | None:
        """What must not be."""
        if "Traceback" in self.output:
            return self.output[-3000:]
        if self.seconds > MOST_S:
            return f"{self.seconds:.1f} s"
        if len(self.output) > MOST_OUTPUT:
            return f"{len(self.output):,} characters"
        if self.code not in range(5):
            return f"exit code {self.code}"
        if self.command == ["queue", "all"] and self.code == 0 and "Engine " not in self.output:
            return "exit code 0 with nothing"
        unnamed = [pid for pid in self.engines if str(pid) not in self.output and self._is_to_be_named(pid)]
        return f"not named: {unnamed}: {self.output[:2000]}" if unnamed else None

    def _is_to_be_named(self, pid: int) -> bool:
        """Whether the command is about all engines, and nothing that the process does explains this."""
        does = self.engines[pid]
        if self.command[0] == "engines":
            return True
        if self.command[1:2] != ["all"] or self.command[0] == "attach" or does.startswith(STRANGER):
            return False
        return self.command[0] != "snapshot" or not does.endswith((*LIES, STRANGER))


def case(number: int, home: Path) -> Case:
    """Run one.

    Args:
        number: Makes every choice.
        home: An empty folder of a short name.
    """
    random = Random(number)  # noqa: S311  # to be repeatable is the point
    command = random.choice(COMMANDS)
    pids = random.sample(range(2**22 + 1, 2**22 + 1000), random.choice([1, 1, 2, 3]))
    with ExitStack() as stack:
        for name, value in (("STATUS_S", DEADLINE_S), ("ACT_S", DEADLINE_S)):
            stack.enter_context(mock.patch.object(running_engines, name, value))
        stack.enter_context(mock.patch.object(running_recordings, "STATUS_S", DEADLINE_S))
        stack.enter_context(mock.patch.object(live, "FOLDER", home))
        stack.enter_context(mock.patch.object(unprepared, "_processes", return_value=[]))
        stack.enter_context(mock.patch.object(running_engines, "_is_alive", return_value=True))
        stack.enter_context(mock.patch.object(control_socket, "peer_of", _by_name))
        folder = live.own_folder()
        does = {pid: stack.enter_context(_listening(folder / f"{pid}.sock", pid, random)) for pid in pids}
        began = time.monotonic()
        code, output = _run(command, home, pids)
        return Case(command, does, code, output, time.monotonic() - began)


def _by_name(connection: socket.socket) -> Peer:
    """Return the process that the socket is named after."""
    return Peer(int(Path(str(connection.getpeername())).stem), os.geteuid())


def _run(command: list[str], home: Path, pids: list[int]) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            if command == ["watch"]:
                return 0, _watched(pids)
            where = ["--output", str(home / "logs")] if command[0] in {"attach", "snapshot"} else []
            return int(main([*command, *where])), out.getvalue()
        except Exception:  # noqa: BLE001  # that is what is counted
            return 1, out.getvalue() + traceback.format_exc(limit=-4)


def _watched(pids: list[int]) -> str:
    """The queue as ``watch`` shows it."""
    session = WatchSession(SimpleNamespace())  # type: ignore[arg-type]  # nothing is read
    session.engines = {Path(str(pid)): SimpleNamespace(trace_header=SimpleNamespace(pid=pid)) for pid in pids}  # type: ignore[misc]  # stand-ins
    try:
        return session.queue(100)
    except SchedtraceError as error:
        return str(error)


@contextmanager
def _listening(path: Path, pid: int, random: Random) -> Iterator[str]:
    """A process that answers; yields what it does."""
    first, then = random.choice(list(SENDS.items())), random.choice(list(SENDS.items()))
    if random.random() < 0.6:  # else nobody gets any further than the status
        first = ("answers", SENDS["answers"])
    over = threading.Event()
    listens = socket.socket(socket.AF_UNIX)
    listens.bind(str(path))
    listens.listen()
    threads = []
    seed = random.random()

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listens.accept()
                threads.append(threading.Thread(target=talk, args=(connection,)))
                threads[-1].start()

    def talk(connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection:
            connection.settimeout(5)
            asked = msgspec.json.decode(connection.recv(2**16))["ask"]
            sends = first[1] if asked == "status" else then[1]
            sends(connection, {"ask": asked, "pid": pid, "over": over, "random": Random(seed)})  # noqa: S311  # repeatable

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"{first[0]}, then {then[0]}"
    finally:
        over.set()
        with suppress(OSError):
            listens.shutdown(socket.SHUT_RDWR)
        thread.join()
        listens.close()
        for one in threads:
            one.join()
        path.unlink(missing_ok=True)


def _answer(how: dict[str, Any]) -> Any:
    pid = how["pid"]
    match how["ask"]:
        case "status":
            versions = {"schedtrace_version": "1", "vllm_version": "0.32.0"}
            attached = True
            return Status(
                role="engine", pid=pid, engine_pid=pid, rank=0, model="tiny", attached=attached, **versions
            )
        case "attach":
            return Attached(path=f"/x/{pid}/engine-0.jsonl", present=1, held_us=1.0)
        case "detach":
            stopped = how["random"].choice([None, "its recording stopped"])
            return Detached(path=f"/x/{pid}/engine-0.jsonl", held_us=1.0, stopped=stopped)
        case "queue":
            return QueueNow(queue=_queue(pid, 3))
        case "snapshot":
            return Snapshot(path=f"/x/{pid}/engine-0.jsonl")
    return Done()


def _queue(pid: int, requests: int) -> EngineQueue:
    counts = {"age_s": 1.0, "prompt_tokens": 1, "computed_tokens": 0, "output_tokens": 0, "blocks": 0}
    entries = [QueueEntry(request_id=f"r{one}", state="waiting", **counts) for one in range(requests)]
    return EngineQueue(
        rank=0, pid=pid, model="tiny", unix_s=1.0, held_us=1.0, between_steps=True, policy="fcfs", seats=2,
        token_budget=8, blocks_usable=9, blocks_free=9, running=[], waiting=entries, exits=[],
    )  # fmt: skip


def _line(content: Any) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def _mutated(value: Any, random: Random) -> Any:
    """A document in which values have become others."""
    if isinstance(value, dict):
        return {
            key: _hostile(random) if random.random() < 0.15 else _mutated(item, random)
            for key, item in value.items()
            if random.random() > 0.03
        }
    if isinstance(value, list):
        return [_mutated(item, random) for item in value]
    return value


def _hostile(random: Random) -> Any:
    return random.choice(
        [
            *(
                None,
                True,
                -1,
                0,
                2**63 - 1,
                2**64 - 1,
                1e308,
                -1e17,
                0.5,
                "",
                [],
                {},
                [[]],
                [1],
                ["x"],
                {"x": 1},
            ),
            *("\x1b[2J\n\u202e", "x" * 100_000, "9" * 5000, "/", "../..", "a" * 5000 + "/b", "\x00", "nan"),
        ]
    )


def _bytes(data: Callable[[dict[str, Any]], bytes]) -> Sends:
    return lambda connection, how: connection.sendall(data(how))


def _slowly(connection: socket.socket, how: dict[str, Any]) -> None:
    data = _line(_answer(how))
    for at in range(len(data)):
        if how["over"].wait(0.005):
            return
        connection.sendall(data[at : at + 1])


def _trickles(connection: socket.socket, how: dict[str, Any]) -> None:
    while not how["over"].wait(0.01):
        connection.sendall(how["random"].choice([b" ", b"[", b"x"]))


def _floods(connection: socket.socket, how: dict[str, Any]) -> None:
    while not how["over"].is_set():
        connection.sendall(b'{"a":[' * 10_000)


def _hangs(_connection: socket.socket, how: dict[str, Any]) -> None:
    how["over"].wait(30)


def _half(how: dict[str, Any]) -> bytes:
    data = _line(_answer(how))
    return data[: how["random"].randrange(len(data))]


def _wrong_kind(how: dict[str, Any]) -> bytes:
    kinds = ["status", "attach", "detach", "queue", "snapshot", "times"]
    return _line(_answer({**how, "ask": how["random"].choice(kinds)}))


def _deep(how: dict[str, Any]) -> bytes:
    opening, closing = how["random"].choice([(b"[", b"]"), (b'{"a":', b"}")])
    depth = how["random"].choice([100, 1_000, 100_000])
    within = opening * depth + b"1" + closing * depth
    return how["random"].choice([within, _line(_answer(how))[:-2] + b',"x":' + within + b"}"]) + b"\n"


def _many(how: dict[str, Any]) -> bytes:
    return _queue_of(how["random"].choice([10_001, 100_000, 300_000]), how["pid"])


@lru_cache(16)
def _queue_of(number: int, pid: int) -> bytes:
    entry = msgspec.json.encode(_queue(1, 1).waiting[0])
    whole = _line(QueueNow(queue=_queue(pid, 0)))
    return whole.replace(b'"waiting":[]', b'"waiting":[' + b",".join([entry] * number) + b"]")


def _mutants(how: dict[str, Any]) -> bytes:
    return _line(_mutated(msgspec.to_builtins(_answer(how)), how["random"]))


def _flipped(how: dict[str, Any]) -> bytes:
    data = bytearray(_line(_answer(how)))
    for _ in range(how["random"].randrange(1, 5)):
        data[how["random"].randrange(len(data))] = how["random"].randrange(256)
    return bytes(data)


def _stranger(how: dict[str, Any]) -> bytes:
    return _line(_answer({**how, "pid": how["random"].choice([-1, 0, 1, 2**40])}))


SENDS: dict[str, Sends] = {
    "answers": _bytes(lambda how: _line(_answer(how))),
    "answers slowly": _slowly,
    "trickles": _trickles,
    "floods": _floods,
    "hangs": _hangs,
    "closes": _bytes(lambda _: b""),
    "sends half": _bytes(_half),
    "answers something else": _bytes(_wrong_kind),
    "nests": _bytes(_deep),
    "sends a queue of many": _bytes(_many),
    "sends mutants": _bytes(_mutants),
    "flips bytes": _bytes(_flipped),
    "says to be another": _bytes(_stranger),
    "sends a long name": _bytes(
        lambda how: _line({"answer": "status", "model": "x" * 5_000_000, "pid": how["pid"]})
    ),
    "sends numbers without end": _bytes(lambda _: b'{"answer":"status","pid":' + b"9" * 100_000 + b"}\n"),
    "refuses": _bytes(lambda _: _line(Refused(why="\x1b[2J no\n" * 1000))),
    "sends stacks": _bytes(lambda _: _line(Stacks(text="x\n" * 100_000))),
    "answers twice": _bytes(lambda how: _line(_answer(how)) * 2),
}
