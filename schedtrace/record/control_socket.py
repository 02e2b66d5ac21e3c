"""A Unix socket on which a process of an engine is asked things by its own user, a line of JSON each.

The thread that listens sleeps until somebody connects: nothing is on the path of a step, and no setting is
needed. Who asks is checked by the kernel's word (``SO_PEERCRED``, ``unix(7)``), beside the folder's mode.
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
from loguru import logger

from schedtrace.model import live
from schedtrace.model.live import AnyAnswer, AnyAsk, AskStacks, AskTimes, Refused, Stacks
from schedtrace.record.processes import process

STACKS_S = 1.0
"""For a worker to say where its threads are."""
_STATES = {
    "T": " (stopped by a signal)",
    "t": " (stopped by a debugger)",
    "Z": " (has died)",
    "D": " (within the kernel)",
}
LONGEST_ASK = 2**16
"""Bytes."""
MOST_S = 5.0
"""For who connects to say what is asked, and to take the answer."""
_CREDENTIALS = struct.Struct("3i")
_decode = msgspec.json.Decoder(AnyAsk).decode

Answering = Callable[[AnyAsk], AnyAnswer]


class ControlSocket:
    """This process's; forked children do not have it.

    Args:
        answer: Called on the socket's thread, one question after the other; what it raises is a refusal.

    Raises:
        OSError: there can be no socket.
    """

    def __init__(self, answer: Answering) -> None:
        self._answer = answer
        self.path = live.own_folder() / f"{os.getpid()}.sock"
        self._pid = os.getpid()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()  # of a process of this number that was killed
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(os.fspath(self.path))
        self.path.chmod(0o600)
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._listen, name="schedtrace-socket", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which close() would not
        self._socket.close()
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            try:
                with connection:
                    connection.settimeout(MOST_S)
                    self._serve(connection)
            except Exception as error:  # of who asked: gone, slow, or no schedtrace
                logger.debug("schedtrace: a question was not answered: {!r}", error)

    def _serve(self, connection: socket.socket) -> None:
        line = _line(connection)  # in any case: a connection closed before that would lose the answer
        if (user := peer_of(connection)) not in {os.geteuid(), 0}:
            answer: AnyAnswer = Refused(why=f"user {user} may not ask a process of user {os.geteuid()}")
        else:
            answer = self._answer_to(line)
        connection.sendall(msgspec.json.encode(answer) + b"\n")

    def _answer_to(self, line: bytes) -> AnyAnswer:
        try:
            return self._answer(_decode(line))
        except msgspec.MsgspecError as error:
            return Refused(why=f"this schedtrace does not understand the question ({error})")
        except Exception as error:
            return Refused(why=str(error) or repr(error))


def peer_of(connection: socket.socket) -> int:
    """The user who connected, as the kernel knows."""
    size = _CREDENTIALS.size
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)


def _line(connection: socket.socket) -> bytes:
    """What stands before the first newline.

    Raises:
        ValueError: nothing does.
    """
    read = b""
    while b"\n" not in read and len(read) < LONGEST_ASK:
        block = connection.recv(LONGEST_ASK)
        if not block:
            break
        read += block
    line, found, _ = read.partition(b"\n")
    if not found:
        msg = "no whole line was sent"
        raise ValueError(msg)
    return line


def time_in_workers(*, on: bool) -> None:
    """Have the workers that this process has started note when they execute, or do so no more.

    One that does not answer goes without: its steps lack ``execute_us``.
    """
    for path in _of_workers():
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            ask(path, AskTimes(on=on), MOST_S)


def stacks_of_workers() -> list[str]:
    """The stacks of the workers that this process has started; of one that does not answer, its state."""
    return [line for path in _of_workers() for line in _stacks(path)]


def _stacks(path: Path) -> list[str]:
    pid = int(path.stem)
    try:
        answer = ask(path, AskStacks(), STACKS_S)
    except (OSError, msgspec.MsgspecError) as error:
        state = _STATES.get(process(pid).state, "")
        return [f"worker with pid {pid}{state} does not answer: {error}"]
    return [f"worker with pid {pid}:", *answer.text.splitlines()] if isinstance(answer, Stacks) else []


def _of_workers() -> list[Path]:
    """The sockets of those that this process has started."""
    mine, found = os.getpid(), []
    for path in sorted(live.folder_of(os.geteuid()).glob("*.sock")):
        with contextlib.suppress(OSError, ValueError):
            if process(int(path.stem)).parent == mine:
                found.append(path)
    return found


def ask(path: Path, question: AnyAsk, timeout_s: float) -> AnyAnswer:
    """Ask the process that listens there.

    Raises:
        OSError: nobody listens, or no answer comes in time.
        msgspec.MsgspecError: the answer is not understood: another version of schedtrace listens.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(os.fspath(path))
        connection.sendall(msgspec.json.encode(question) + b"\n")
        line = b""
        while not line.endswith(b"\n") and (block := connection.recv(2**20)):
            line += block
    answer: AnyAnswer = msgspec.json.decode(line, type=AnyAnswer)
    return answer
