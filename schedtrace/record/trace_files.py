"""The files that a trace is written to: one plain file, or parts of zstd frames of a second each.

Of parts, one follows the other, and the oldest go.
"""

import contextlib
import errno
import os
import stat
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from zstandard import ZstdCompressor

from schedtrace.model.manifest import part_name, plain_name
from schedtrace.model.safe_files import FILE_MODE
from schedtrace.model.trace_bounds import Bounds
from schedtrace.record.settings import create_trace_file

Begins = Literal["due", "truncated", "removed", "replaced"]
"""Reason why a file begins while it is recorded: the one before has enough, or something happened to it."""


NO_FILE = -1
"""Value that replaces a closed descriptor, whose number may belong to another file by now."""


class TraceOutput(Protocol):
    """Place for the lines of a trace."""

    @property
    def path(self) -> Path:
        """Path of the trace."""

    def new_file_reason(self) -> Begins | None:
        """Return, before lines are written, whether a file begins now, which has to be readable alone.

        Raises:
            OSError: If one has to, and cannot.
        """

    def write(self, lines: bytes) -> None:
        """Write whole lines.

        Raises:
            OSError: they, or lines before, cannot be written.
        """

    def close(self) -> None:
        """Write the remaining lines and close.

        Raises:
            OSError: If it cannot be written.
        """

    def discard(self) -> None:
        """Close a trace that could not begin, and leave no file of it.

        Raises:
            OSError: If it cannot be removed.
        """


class PlainFile:
    """Trace in one file without bounds.

    Args:
        run_dir: The run folder.
        rank: Of the engine.

    Raises:
        OSError: If the folder or the file cannot be made.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.path, self._file = create_trace_file(run_dir, plain_name(rank))
        self._links = os.fstat(self._file).st_nlink
        self._size = 0
        """Least size of the file in bytes, unless other programs changed it."""

    def new_file_reason(self) -> Begins | None:
        """Return whether it was truncated, or lost with nobody's lines in its place, and begins anew.

        A file that was moved is written on where it is now.
        """
        ours, there = os.fstat(self._file), _status(self.path)
        removed = ours.st_nlink < self._links
        if there is not None and not os.path.samestat(ours, there) and _is_empty(there):
            self._open()
            return "replaced"
        if removed and there is None and self.path.parent.is_dir():
            self._open(os.O_CREAT | os.O_EXCL)
            return "removed"
        if removed:
            raise FileNotFoundError(errno.ENOENT, "the file was removed while it was written", str(self.path))
        if stat.S_ISREG(ours.st_mode) and ours.st_size < self._size:
            os.ftruncate(self._file, 0)
            self._size = 0
            return "truncated"
        return None

    def _open(self, flags: int = 0) -> None:
        """Leave the file that was opened for the one that now has its name."""
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | flags, FILE_MODE)
        os.close(self._file)
        self._file, self._links, self._size = file, os.fstat(file).st_nlink, 0

    def write(self, lines: bytes) -> None:
        """Append lines."""
        append(self._file, lines)
        self._size += len(lines)

    def close(self) -> None:
        """Close the file, in which all is written already."""
        file, self._file = self._file, NO_FILE
        os.close(file)

    def discard(self) -> None:
        """Remove the file, which has nothing of worth."""
        self.close()
        self.path.unlink()


class PartFiles:
    """The parts of a trace in a run folder, which may be moved meanwhile.

    Args:
        run_dir: The run folder.
        rank: Of the engine.

    Raises:
        OSError: If the folder or the first part cannot be made.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._rank = rank
        first, self._file = create_trace_file(run_dir, part_name(rank, 0))
        self._folder = os.open(first.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.path = first.with_name(part_name(rank))
        self._size = 0

    def begin(self, number: int) -> None:
        """Leave the part that is written for the one of this number."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        file = os.open(part_name(self._rank, number), flags, FILE_MODE, dir_fd=self._folder)
        os.close(self._file)
        self._file, self._size = file, 0

    def append(self, frame: bytes) -> None:
        """Write a whole frame, or nothing of it."""
        append(self._file, frame)
        self._size += len(frame)

    def lost(self) -> Begins | None:
        """Return whether the current part was removed or truncated; None if it is intact."""
        ours = os.fstat(self._file)
        if not ours.st_nlink:
            return "removed"
        return "truncated" if stat.S_ISREG(ours.st_mode) and ours.st_size < self._size else None

    def remove(self, number: int) -> None:
        """Remove a part; one that is gone already, or cannot be removed, stays out of account."""
        with contextlib.suppress(OSError):
            os.unlink(part_name(self._rank, number), dir_fd=self._folder)

    def close(self) -> None:
        """Close the files, in which all is written already."""
        files, self._file, self._folder = (self._file, self._folder), NO_FILE, NO_FILE
        for file in files:
            os.close(file)


def append(file: int, content: bytes) -> None:
    """Write the whole frame; if a full disk cuts it off, truncate the file to its previous end.

    Raises:
        OSError: If it cannot be written.
    """
    data = memoryview(content)
    start = os.lseek(file, 0, os.SEEK_END)
    try:
        while data:
            data = data[os.write(file, data) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, start)
        raise


def _status(path: Path) -> os.stat_result | None:
    """Return the status of the file at the path; None if there is none, or it may not be read."""
    try:
        return path.lstat()
    except OSError:
        return None


def _is_empty(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and not status.st_size


FRAME_S = 0.8
"""The writer looks every 0.2 s, so a frame holds a second at most: what a killed process loses."""
FRAME_BYTES = 4 * 2**20
"""Bytes of a frame before compression."""
SMALL = 2**18
"""Bytes of a part that is read in no time."""
MOST_HEAD = 2
"""A part has so many times the bytes of its head at least, or parts would be little else where many wait."""
LEVEL = 1
"""Higher levels take longer and save no tenth."""


class Store(Protocol):
    """Place for parts."""

    @property
    def path(self) -> Path:
        """Path of the trace."""

    def begin(self, number: int) -> None:
        """Begin this part: the next frames belong to it.

        Raises:
            OSError: If it cannot be made.
        """

    def append(self, frame: bytes) -> None:
        """Append a frame to the part that was begun last.

        Raises:
            OSError: If it cannot be written; nothing of it is.
        """

    def lost(self) -> Begins | None:
        """Return whether the current part was removed or truncated; None if it is intact."""

    def remove(self, number: int) -> None:
        """Remove a part."""

    def close(self) -> None:
        """Close the store: there are no more parts."""


@dataclass
class _Part:
    number: int
    began_s: float
    size: int = 0
    head: int = 0
    """Bytes of its first frame, which lists the requests present."""


class PartedTrace:
    """Lines to frames, and frames to parts within their bounds.

    Args:
        store: Where they go; part 0 is begun.
        bounds: How much is kept.
    """

    def __init__(self, store: Store, bounds: Bounds) -> None:
        self._store, self.bounds = store, bounds
        self.path = store.path
        self.frame = ZstdCompressor(LEVEL, write_checksum=True).compress
        self._parts = deque([_Part(0, time.monotonic())])
        self._lines: list[bytes] = []
        self._waiting, self._since_s = 0, 0.0
        """Bytes of these lines, and since when the first of them waits."""

    def new_file_reason(self) -> Begins | None:
        """Return whether a part begins now, for the one before has enough or was lost."""
        now, part = time.monotonic(), self._parts[-1]
        lost = self._store.lost()
        if lost is not None:  # lines that continue what is lost go with it
            self._lines, self._waiting = [], 0
        elif self._lines and now - self._since_s >= FRAME_S:
            self.end_frame()
        if lost is None and not self._has_enough(part, now):
            self._remove_old(now)
            return None
        self.end_frame()
        self._store.begin(part.number + 1)
        self._parts.append(_Part(part.number + 1, now))
        self._remove_old(now)
        return lost or "due"

    def _has_enough(self, part: _Part, now: float) -> bool:
        """Return whether the part may end: an idle engine ends no nearly empty part before its time."""
        if part.size == part.head and not self._lines:
            return False
        old = now - part.began_s >= self.bounds.part_s
        enough = max(self.bounds.part_bytes, MOST_HEAD * part.head)
        return part.size >= enough or (old and (self.bounds.max_s is not None or part.size >= SMALL))

    def write(self, lines: bytes) -> None:
        """Put them into the frame that is gathered."""
        if not self._lines:
            self._since_s = time.monotonic()
        self._lines.append(lines)
        self._waiting += len(lines)
        if self._waiting >= FRAME_BYTES or not self._parts[-1].size:  # a head is a frame of its own
            self.end_frame()

    def end_frame(self) -> None:
        """End the frame.

        Raises:
            OSError: If it cannot be written.
        """
        lines, self._lines, self._waiting = self._lines, [], 0
        if lines:
            frame = self.frame(b"".join(lines))
            self._store.append(frame)
            part = self._parts[-1]
            part.size += len(frame)
            part.head = part.head or len(frame)
            self._remove_old(time.monotonic())

    def close(self) -> None:
        """End the last frame."""
        try:
            self.end_frame()
        finally:
            self._store.close()

    def discard(self) -> None:
        """Remove the only part, which has nothing of worth."""
        self._store.remove(0)
        self._store.close()

    def _remove_old(self, now: float) -> None:
        """Remove the oldest parts if the rest covers the time to keep, or if all are too large together."""
        most, kept_s = self.bounds.max_bytes, self.bounds.max_s
        while len(self._parts) > 1:
            too_large = most is not None and sum(part.size for part in self._parts) > most
            too_old = kept_s is not None and now - self._parts[1].began_s > kept_s
            if not too_large and not too_old:
                return
            self._store.remove(self._parts.popleft().number)
