"""The bytes of a trace that grows: of one file, or of parts that follow each other."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from schedtrace.errors import InputError
from schedtrace.model.safe_files import descriptor
from schedtrace.model.trace_names import files_of, is_in_parts, part_number
from schedtrace.read.lines import LONGEST_LINE, reading
from schedtrace.read.living import Lives, skim
from schedtrace.read.part_files import HEAD_LINES, Frames

BLOCK = 2**20
GAP = b'{"type":"gap"}'
"""Given as a line where parts are missing: none that a recorder writes."""


class LostError(InputError):
    """The file was removed, replaced or cut: nothing can be read on."""


class Growing(ABC):
    """What is new in a trace.

    Args:
        path: The file, or all parts.
        keep_us: What is older than so many microseconds before the last step may be left out.

    Raises:
        InputError: it cannot be opened.
    """

    _file: int
    """Descriptor of what is read."""

    @abstractmethod
    def begin(self, lives: Lives) -> tuple[bytes, list[str]] | None:
        """The header's line, and notices of what is too old to be read; None: it is not whole yet.

        Args:
            lives: Gets who came and went in what is too old.
        """

    @abstractmethod
    def lines(self) -> Iterator[list[bytes]]:
        """Lines that were not given yet, up to the last newline.

        Raises:
            LostError: the file was removed, replaced or cut.
            OSError: it cannot be read.
        """

    @abstractmethod
    def modified_s(self) -> float:
        """When something was written last, Unix time."""

    def close(self) -> None:
        """Let the file go."""
        os.close(self._file)


class GrowingFile(Growing):
    """One file."""

    def __init__(self, path: Path, keep_us: int) -> None:
        self._path, self._keep_us, self._at = path, keep_us, 0
        with reading(path):
            self._file = descriptor(path)

    def begin(self, lives: Lives) -> tuple[bytes, list[str]] | None:
        """Skim what is too old."""
        size = self._checked_size()
        head, found, _ = os.pread(self._file, BLOCK, 0).partition(b"\n")
        if not found:
            return None
        self._at, notices = skim(self._file, len(head) + 1, size, self._keep_us, lives)
        return head, notices

    def lines(self) -> Iterator[list[bytes]]:
        """Up to the last newline: the recorder takes back what a full disk cut off of a line."""
        size, begun = self._checked_size(), b""
        while left := size - self._at - len(begun):
            block = os.pread(self._file, min(BLOCK, left), self._at + len(begun))
            if not block:
                return
            *lines, begun = (begun + block).split(b"\n")
            self._at += sum(map(len, lines)) + len(lines)
            if len(begun) > LONGEST_LINE:  # dropped in pieces, each of which is a broken line
                self._at += len(begun)
                lines, begun = [*lines, begun[:1]], b""
            if lines:
                yield lines

    def _checked_size(self) -> int:
        ours = os.fstat(self._file)
        try:
            now = self._path.stat()
        except FileNotFoundError:
            msg = f"{self._path}: removed while it was followed"
            raise LostError(msg) from None
        if (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino):
            msg = f"{self._path}: replaced by another file while it was followed"
            raise LostError(msg)
        if ours.st_size < self._at:
            msg = f"{self._path}: cut while it was followed"
            raise LostError(msg)
        return ours.st_size

    def modified_s(self) -> float:
        """Of the file that has the name now."""
        return self._path.stat().st_mtime


class GrowingParts(Growing):
    """Parts, read from the one in which ``keep_us`` before now stands."""

    def __init__(self, path: Path, keep_us: int) -> None:
        self._path = path
        parts = files_of(path)
        ended = [part for before, part in pairwise(parts) if _age_s(before) * 1e6 > keep_us]
        self._open((ended or parts or [path])[-1 if ended else 0])
        self._skip = 0
        self._ready: list[bytes] = []

    def _open(self, part: Path) -> None:
        with reading(part):
            self._file = descriptor(part)
        self._part, self._at, self._begun, self._frames = part, 0, b"", Frames()

    def begin(self, lives: Lives) -> tuple[bytes, list[str]] | None:
        """A part says itself who is there when it begins."""
        del lives
        for lines in self._of_part():
            self._ready += lines
        return (self._ready.pop(0), []) if self._ready else None

    def lines(self) -> Iterator[list[bytes]]:
        """Lines of this part and of those that follow it."""
        ready, self._ready = self._ready, []
        if ready:
            yield ready
        while True:
            later = [part for part in files_of(self._path) if part_number(part) > part_number(self._part)]
            yield from self._of_part()  # after the look: a part with a later one is complete
            if not later:
                break
            follows = part_number(later[0]) == part_number(self._part) + 1 and self._is_whole()
            os.close(self._file)
            try:
                self._open(later[0])
            except InputError:  # it went meanwhile
                self._open(files_of(self._path)[-1])
                follows = False
            self._skip = HEAD_LINES if follows else 1
            if not follows:
                yield [GAP]
        if not os.fstat(self._file).st_nlink and not files_of(self._path):
            msg = f"{self._path}: removed while it was followed"
            raise LostError(msg)

    def _is_whole(self) -> bool:
        """Whether all of the part was read, as far as can be seen."""
        return 0 < self._at <= os.fstat(self._file).st_size and not self._frames.broken

    def _of_part(self) -> Iterator[list[bytes]]:
        while block := os.pread(self._file, BLOCK, self._at):
            self._at += len(block)
            *lines, self._begun = (self._begun + b"".join(self._frames.content(block))).split(b"\n")
            if len(self._begun) > LONGEST_LINE:
                self._begun = self._begun[:1]
            skipped, lines = len(lines[: self._skip]), lines[self._skip :]
            self._skip -= skipped
            if lines:
                yield lines

    def modified_s(self) -> float:
        """Of the part that is read."""
        return os.fstat(self._file).st_mtime


def _age_s(part: Path) -> float:
    """Since when nothing is written to it."""
    with suppress(OSError):
        return time.time() - part.stat().st_mtime
    return 0.0


def first_line(path: Path) -> tuple[bytes, bool]:
    """The first line of a trace, as far as it is there, and whether it is whole.

    Raises:
        OSError: it cannot be read.
    """
    parts = files_of(path)
    file = descriptor(parts[-1] if parts else path)
    try:
        head = os.pread(file, BLOCK, 0)
        if is_in_parts(path):
            head = b"".join(Frames().content(head))
    finally:
        os.close(file)
    line, whole, _ = head.partition(b"\n")
    return line, bool(whole) or len(line) >= BLOCK
