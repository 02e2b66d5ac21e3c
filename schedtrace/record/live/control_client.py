"""Questions to a process over its socket, with one deadline and one maximum size for the whole answer.

The listening process is not trusted: its process id and user come from the kernel, and its answer must be of
the requested kind.
"""

import os
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from schedtrace.model.live import MOST_ENTRIES, AnyAnswer, AnyAsk, QueueNow, Refused, Stacks, within_bounds
from schedtrace.model.printable import shortened

LONGEST_ANSWER = 2**20
"""Maximum bytes of an answer; other bounds are in ``_LONGEST``."""
_LONGEST: dict[type, int] = {QueueNow: 2**25, Stacks: 2**22}
LONGEST_NAME = 1000
"""Maximum characters kept of a text in an answer; other bounds are in ``_LONGEST_TEXT``."""
_LONGEST_TEXT = {"path": 4096, "recording": 4096, "why": 4096, "stall": 4096, "text": _LONGEST[Stacks]}
LARGEST = 10**18
"""Largest number in an answer."""
BLOCK = 2**16
RETRY_S = 0.02
"""Seconds before another attempt if a process already listens to as many clients as it can."""
CREDENTIALS = struct.Struct("3i")
_T = TypeVar("_T", bound=AnyAnswer)


class AnswerError(Exception):
    """Error: the reply of a process does not answer the question; the text says what the process did."""


class Peer(NamedTuple):
    """Process at the other end of a socket, as the kernel reports it."""

    pid: int
    """Process id as seen from here; 0 if it is in a PID namespace that cannot be seen from here."""
    user: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the process that connected, or that listens (``SO_PEERCRED``, ``unix(7)``)."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, user, _ = CREDENTIALS.unpack(packed)
    return Peer(int(pid), int(user))


class Connection:
    """Connection for one question.

    Args:
        path: Socket of the process.
        timeout_s: Seconds from now for connecting, asking and receiving the whole answer.

    Raises:
        OSError: If no process listens, or none accepts in time.
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
        """Send a question and return the answer; cut texts and lists of the answer that are too long.

        Args:
            question: Question to send.
            expected: Kind of the answer, unless it is a refusal.

        Raises:
            OSError: If no whole answer comes in time.
            AnswerError: If the reply does not answer the question.
        """
        self._socket.settimeout(self._left_s())
        self._socket.sendall(msgspec.json.encode(question) + b"\n")
        return decoded(self._line(_LONGEST.get(expected, LONGEST_ANSWER)), expected)

    def _connect(self, path: str) -> None:
        while True:
            self._socket.settimeout(self._left_s())
            try:
                self._socket.connect(path)
            except BlockingIOError:  # as many wait as may
                time.sleep(min(RETRY_S, self._left_s()))
            else:
                return

    def _line(self, most: int) -> bytes:
        line = bytearray()
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
        return bytes(line)

    def _left_s(self) -> float:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            msg = "timed out"
            raise TimeoutError(msg)
        return left_s


def ask_process(path: Path, question: AnyAsk, expected: type[_T], timeout_s: float) -> _T | Refused:
    """Ask the process that listens at this path.

    Raises:
        OSError: If no process listens, or no complete answer arrives in time.
        AnswerError: If the reply does not answer the question.
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
