"""Unix socket on which a process of an engine answers questions of its own user, one line of JSON each.

A question has one deadline and one maximum size for the whole answer (``Connection``). The listening process
is not trusted: its process id and user come from the kernel, and its answer must be of the requested kind.
The listening thread sleeps until a client connects, and has another thread answer, so nothing is added to
the path of a step, and no setting is needed. The folder's mode protects the socket; in addition, the client's
user is checked, as the kernel reports it (``SO_PEERCRED``, ``unix(7)``).
"""

import contextlib
import errno
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from weakref import WeakSet

import msgspec

from schedtrace.model import live
from schedtrace.model.live import (
    MOST_ENTRIES,
    AnyAnswer,
    AnyAsk,
    AskStacks,
    AskStatus,
    AskTimes,
    Done,
    QueueNow,
    Refused,
    Stacks,
    within_bounds,
)
from schedtrace.model.printable import json_of, shortened
from schedtrace.record.log import logger
from schedtrace.record.processes import process_state

LONGEST_ANSWER = 2**20
"""Maximum bytes of an answer; other bounds are in ``_LONGEST``."""
_LONGEST: dict[type, int] = {QueueNow: 2**25, Stacks: 2**22}
LONGEST_NAME = 1000
"""Maximum number of characters kept of a text in an answer; other bounds are in ``_LONGEST_TEXT``."""
_LONGEST_TEXT = {"path": 4096, "recording": 4096, "why": 4096, "stall": 4096, "text": _LONGEST[Stacks]}
LARGEST = 10**18
"""Largest absolute value of a number in an answer."""
BLOCK = 2**16
RETRY_S = 0.02
"""Seconds until the next attempt if a process already serves as many clients as it can."""
CREDENTIALS = struct.Struct("3i")
_T = TypeVar("_T", bound=AnyAnswer)


class AnswerError(Exception):
    """Error: a process's reply is not an answer to the question; the text states what the process did."""


class Peer(NamedTuple):
    """Process at the other end of a socket, as the kernel reports it."""

    pid: int
    """Process id in this PID namespace; 0 if the process is not visible in it."""
    user: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the process at the other end of a connection (``SO_PEERCRED``, ``unix(7)``)."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, user, _ = CREDENTIALS.unpack(packed)
    return Peer(int(pid), int(user))


class Connection:
    """Connection for one question.

    Args:
        path: Socket of the process.
        timeout_s: Time limit in seconds for connecting, asking and receiving the whole answer.

    Raises:
        OSError: If no process listens, or the connection is not accepted in time.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connect(os.fspath(path))
            self.peer = peer_of(self._socket)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def ask(self, question: AnyAsk, expected: type[_T]) -> _T | Refused:
        """Send a question and return the answer, in which overlong texts and lists are cut.

        Args:
            question: Question to send.
            expected: Kind of the answer, unless it is a refusal.

        Raises:
            OSError: If no complete answer arrives in time.
            AnswerError: If the reply is not an answer to the question.
        """
        self._socket.settimeout(self._left_s())
        self._socket.sendall(msgspec.json.encode(question) + b"\n")
        line, most = bytearray(), _LONGEST.get(expected, LONGEST_ANSWER)
        while b"\n" not in line[-BLOCK:]:
            self._socket.settimeout(self._left_s())
            block = self._socket.recv(BLOCK)
            if not block:
                msg = f"it closed the connection after {len(line):,} bytes, within its answer"
                raise AnswerError(msg if line else "it closed the connection without an answer")
            line += block
            if len(line) > most:
                msg = f"its answer is longer than {most >> 20} MiB"
                raise AnswerError(msg)
        return decoded(bytes(line), expected)

    def _connect(self, path: str) -> None:
        while True:
            self._socket.settimeout(self._left_s())
            try:
                self._socket.connect(path)
            except BlockingIOError:  # as many wait as may
                time.sleep(min(RETRY_S, self._left_s()))
            else:
                return

    def _left_s(self) -> float:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            msg = "timed out"
            raise TimeoutError(msg)
        return left_s


def ask_process(path: Path, question: AnyAsk, expected: type[_T], timeout_s: float) -> _T | Refused:
    """Send a question to the process that listens at this path; return the answer.

    Raises:
        OSError: If no process listens, or no complete answer arrives in time.
        AnswerError: If the reply is not an answer to the question.
    """
    with Connection(path, timeout_s) as connection:
        return connection.ask(question, expected)


def decoded(line: bytes, expected: type[_T]) -> _T | Refused:
    """Return the answer in a line, with its lists and texts within bounds.

    Raises:
        AnswerError: If the line contains no valid answer.
    """
    kinds: Any = expected | Refused
    try:
        answer = msgspec.json.decode(line, type=kinds)
    except RecursionError:
        msg = "its answer is nested too deep"
        raise AnswerError(msg) from None
    except (msgspec.MsgspecError, ValueError) as error:
        msg = f"its answer is not understood ({shortened(str(error), 200)}): another version of schedtrace?"
        raise AnswerError(msg) from None
    if isinstance(answer, QueueNow):
        answer = QueueNow(queue=within_bounds(answer.queue))
    return _bounded(answer, LONGEST_NAME)  # type: ignore[no-any-return]  # of the kind that it was


def _bounded(value: Any, most: int) -> Any:
    """Return a copy in which texts and lists are cut to their maximum length.

    Raises:
        AnswerError: If a number is out of range.
    """
    if isinstance(value, str):
        return shortened(value, most)
    if isinstance(value, int | float) and not abs(value) <= LARGEST:
        msg = "its answer has a number that cannot be"
        raise AnswerError(msg)
    if isinstance(value, msgspec.Struct):
        fields: Iterable[tuple[str, Any]] = ((name, getattr(value, name)) for name in value.__struct_fields__)
        return type(value)(
            **{name: _bounded(field, _LONGEST_TEXT.get(name, LONGEST_NAME)) for name, field in fields}
        )
    if isinstance(value, list):
        return [_bounded(item, most) for item in value[:MOST_ENTRIES]]
    return value


STACKS_S = 1.0
"""Time limit in seconds for a worker to send its stacks."""
_STATES = {
    "T": " (stopped by a signal)",
    "t": " (stopped by a debugger)",
    "Z": " (has died)",
    "D": " (within the kernel)",
}
LONGEST_ASK = 2**16
"""Maximum bytes of a question."""
END_S = 1.0
"""Seconds to wait for the listening thread, which cannot end while ``MOST_AT_ONCE`` clients are served."""
MOST_S = 5.0
"""Time limit in seconds for a client to send its question, and again to receive the answer."""
AGAIN_S = 0.05
"""Base of the wait in seconds before listening again: doubled for each failure in a row."""
LONGEST_AGAIN_S = 5.0
MOST_AT_ONCE = 8
"""Maximum number of clients served at once; further clients wait."""
_IS_CLOSED = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}
_decode = msgspec.json.Decoder(AnyAsk).decode

Answering = Callable[[AnyAsk], AnyAnswer]


class ControlSocket:
    """Socket of this process; forked children close their copies.

    Args:
        answer: Function that answers a question, called on threads of the socket with one question at a time,
            except for ``AskStatus``. Any error that it raises becomes a refusal.

    Raises:
        OSError: If the socket cannot be created, or a process with the same id, in another container that
            shares the folder, already listens.
    """

    def __init__(self, answer: Answering) -> None:
        self._answer = answer
        self.path = live.own_folder() / f"{os.getpid()}.sock"
        self._socket, self._file = _listens_at(self.path)
        self._one_by_one = threading.Lock()
        self._free = threading.Semaphore(MOST_AT_ONCE)
        self._closed = threading.Event()
        _sockets.add(self)
        self._thread = threading.Thread(target=self._listen, name="schedtrace-socket", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._socket.fileno() < 0:  # in a forked child, or closed before
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            if _file(self.path) == self._file:
                self.path.unlink()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which close() would not
        self._thread.join(END_S)
        self._socket.close()

    def _listen(self) -> None:
        failed = 0
        while True:
            self._free.acquire()
            try:
                connection, _ = self._socket.accept()
                failed = 0
            except OSError as error:
                self._free.release()
                if error.errno in _IS_CLOSED:
                    return
                if not failed:  # no descriptors, or no memory
                    logger.warning("schedtrace: nobody can ask process {} for now: {}", os.getpid(), error)
                failed += 1
                if self._closed.wait(min(AGAIN_S * 2 ** min(failed, 10), LONGEST_AGAIN_S)):
                    return
                continue
            try:
                name = "schedtrace-answer"
                threading.Thread(target=self._hear, args=(connection,), name=name, daemon=True).start()
            except RuntimeError as error:  # no more threads
                logger.trace("schedtrace: a question was not answered: {!r}", error)
                connection.close()
                self._free.release()

    def _hear(self, connection: socket.socket) -> None:
        try:
            with connection:
                line = _line(connection)  # in any case: a connection closed before would lose the answer
                if (user := peer_of(connection).user) in {os.geteuid(), 0}:
                    answer = self._answer_to(line)
                else:
                    answer = Refused(why=f"user {user} may not ask a process of user {os.geteuid()}")
                connection.settimeout(MOST_S)
                connection.sendall(json_of(answer) + b"\n")
        except Exception as error:  # of who asked: gone, slow, or no schedtrace; loguru would show ``debug``
            logger.trace("schedtrace: a question was not answered: {!r}", error)
        finally:
            self._free.release()

    def _answer_to(self, line: bytes) -> AnyAnswer:
        try:
            question = _decode(line)
            with contextlib.nullcontext() if question == AskStatus() else self._one_by_one:
                return self._answer(question)
        except msgspec.MsgspecError as error:
            return Refused(why=f"this schedtrace does not understand the question ({error})")
        except Exception as error:
            return Refused(why=str(error) or repr(error))


_sockets: WeakSet[ControlSocket] = WeakSet()


def _disown() -> None:
    """Close the sockets in a forked child, so that clients get no answer once the parent has ended."""
    for listener in list(_sockets):
        listener._socket.close()


os.register_at_fork(after_in_child=_disown)


def _listens_at(path: Path) -> tuple[socket.socket, tuple[int, int]]:
    """Return a listening socket, moved to this path once it accepts clients, and its device and inode.

    Raises:
        OSError: If a process already listens there, or the socket cannot be created.
    """
    if _is_alive(path):
        raise OSError(errno.EADDRINUSE, "somebody listens there already", str(path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = path.with_name(f"{secrets.token_hex(4)}.new")  # no reader looks at that
    try:
        listener.bind(os.fspath(before))
        before.chmod(0o600)
        listener.listen(MOST_AT_ONCE)
        file = _file(before)
        before.replace(path)  # of a process of this number that was killed
    except OSError:
        listener.close()
        before.unlink(missing_ok=True)
        raise
    return listener, file


def _is_alive(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(MOST_S)
        try:
            connection.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except TimeoutError:  # it has much to do
            return True
    return True


def _file(path: Path) -> tuple[int, int]:
    about = path.lstat()
    return about.st_dev, about.st_ino


def _line(connection: socket.socket) -> bytes:
    """Return the text before the first newline.

    Raises:
        ValueError: If there is no newline.
        TimeoutError: If the text does not arrive within ``MOST_S``.
    """
    read, until_s = b"", time.monotonic() + MOST_S
    while b"\n" not in read and len(read) < LONGEST_ASK:
        connection.settimeout(max(until_s - time.monotonic(), 1e-3))
        block = connection.recv(LONGEST_ASK)
        if not block:
            break
        read += block
    line, newline, _ = read.partition(b"\n")
    if not newline:
        msg = "no whole line was sent"
        raise ValueError(msg)
    return line


def time_in_workers(*, on: bool) -> None:
    """Make this process's workers start or stop recording the times at which they execute batches.

    If a worker does not answer, its steps lack ``execute_us``.
    """
    for path in _worker_sockets():
        with contextlib.suppress(OSError, AnswerError):
            ask_process(path, AskTimes(on=on), Done, MOST_S)


def worker_stacks() -> dict[str, list[str]]:
    """Return the lines of each worker's stacks, by process id; if a worker sends none, a line saying why."""
    stacks: dict[str, list[str]] = {}
    for path in _worker_sockets():
        worker = f"worker with pid {path.stem}"
        try:
            answer = ask_process(path, AskStacks(), Stacks, STACKS_S)
        except (OSError, AnswerError) as error:
            state = ""
            with contextlib.suppress(OSError):  # it is gone
                state = _STATES.get(process_state(int(path.stem)).state, "")
            stacks[path.stem] = [f"{worker}{state} does not answer: {error}"]
            continue
        if isinstance(answer, Refused):
            stacks[path.stem] = [f"{worker}: {answer.why}"]
        else:
            stacks[path.stem] = [f"{worker}:", *answer.text.splitlines()]
    return stacks


def _worker_sockets() -> list[Path]:
    """Return the sockets of the workers that this process started."""
    mine, sockets = os.getpid(), []
    for path in sorted(live.socket_folder(os.geteuid()).glob("*.sock")):
        with contextlib.suppress(OSError, ValueError):
            if process_state(int(path.stem)).parent == mine:
                sockets.append(path)
    return sockets
