"""Files of a trace: one plain file, or parts that consist of zstd frames.

A frame contains about one second of the trace. The oldest parts are deleted when bounds are exceeded.
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
from schedtrace.record.run_folders import create_trace_file

Begins = Literal["due", "truncated", "removed", "replaced"]
"""Reason why a new file begins: the previous file is full, or was truncated, removed or replaced."""


NO_FILE = -1
"""Value that replaces a closed descriptor, whose number may already belong to another file."""


class TraceOutput(Protocol):
    """Destination of a trace's lines."""

    @property
    def path(self) -> Path:
        """Path of the trace."""

    def new_file_reason(self) -> Begins | None:
        """Return why a new file begins before the next lines; None if none begins.

        A new file must be readable on its own.

        Raises:
            OSError: If a new file is needed and cannot be created.
        """

    def write(self, lines: bytes) -> None:
        """Write whole lines.

        Raises:
            OSError: If these or earlier lines cannot be written.
        """

    def close(self) -> None:
        """Write the remaining lines and close.

        Raises:
            OSError: If the lines cannot be written.
        """

    def discard(self) -> None:
        """Close a trace that could not begin, and remove its file.

        Raises:
            OSError: If the file cannot be removed.
        """


class NoTrace:
    """Destination of lines that are not kept, because only metrics are made from them."""

    path = Path(os.devnull)

    def new_file_reason(self) -> Begins | None:
        """Return None, because nothing can be lost."""
        return None

    def write(self, lines: bytes) -> None:
        """Drop the lines of a trace that nobody keeps."""

    def close(self) -> None:
        """Do nothing, because there is no file."""

    def discard(self) -> None:
        """Do nothing, because there is no file."""


class AppendedFile:
    """File to which whole lines or frames are appended."""

    _file = NO_FILE
    _size = 0
    """Size that the file must have at least, in bytes, unless other programs changed it."""

    def append(self, frame: bytes) -> None:
        """Write a whole frame; if a full disk cuts it off, truncate the file to its previous end.

        Raises:
            OSError: If the frame cannot be written.
        """
        data = memoryview(frame)
        start = os.lseek(self._file, 0, os.SEEK_END)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, start)
            raise
        self._size += len(frame)


class PlainFile(AppendedFile):
    """Trace in one file without bounds.

    Args:
        run_dir: Run folder.
        rank: Data-parallel rank of the engine.

    Raises:
        OSError: If the folder or the file cannot be created.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.path, self._file = create_trace_file(run_dir, plain_name(rank))
        self._links = os.fstat(self._file).st_nlink

    def new_file_reason(self) -> Begins | None:
        """Return why the file must begin anew: it was truncated, removed, or replaced with an empty file.

        Writing continues in a file that was moved.
        """
        ours, there = os.fstat(self._file), None
        with contextlib.suppress(OSError):  # there is no file at the path, or it may not be read
            there = self.path.lstat()
        removed = ours.st_nlink < self._links
        is_empty = there is not None and stat.S_ISREG(there.st_mode) and not there.st_size
        if there is not None and is_empty and not os.path.samestat(ours, there):
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
        """Close the current file, and open the file that now has the trace's name."""
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | flags, FILE_MODE)
        os.close(self._file)
        self._file, self._links, self._size = file, os.fstat(file).st_nlink, 0

    def write(self, lines: bytes) -> None:
        """Append lines to the file."""
        self.append(lines)

    def close(self) -> None:
        """Close the file, to which everything has already been written."""
        file, self._file = self._file, NO_FILE
        os.close(file)

    def discard(self) -> None:
        """Remove the file, which contains nothing of value."""
        self.close()
        self.path.unlink()


class PartFiles(AppendedFile):
    """Parts of a trace in a run folder; the folder may be moved while they are written.

    Args:
        run_dir: Run folder.
        rank: Data-parallel rank of the engine.

    Raises:
        OSError: If the folder or the first part cannot be created.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._rank = rank
        first, self._file = create_trace_file(run_dir, part_name(rank, 0))
        self._folder = os.open(first.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.path = first.with_name(part_name(rank))

    def begin(self, number: int) -> None:
        """Switch from the current part to the part with this number."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        file = os.open(part_name(self._rank, number), flags, FILE_MODE, dir_fd=self._folder)
        os.close(self._file)
        self._file, self._size = file, 0

    def lost(self) -> Begins | None:
        """Return how the current part was lost: removed or truncated; None if it is intact."""
        ours = os.fstat(self._file)
        if not ours.st_nlink:
            return "removed"
        return "truncated" if stat.S_ISREG(ours.st_mode) and ours.st_size < self._size else None

    def remove(self, number: int) -> None:
        """Remove a part; if that fails, or the part is already gone, do nothing."""
        with contextlib.suppress(OSError):
            os.unlink(part_name(self._rank, number), dir_fd=self._folder)

    def close(self) -> None:
        """Close the files, to which everything has already been written."""
        files, self._file, self._folder = (self._file, self._folder), NO_FILE, NO_FILE
        for file in files:
            os.close(file)


FRAME_S = 0.8
"""Maximum seconds in a frame; a process that is killed loses its unfinished frame."""
FRAME_BYTES = 4 * 2**20
"""Number of bytes in a frame before compression."""
SMALL = 2**18
"""Size in bytes up to which a part can be read almost at once."""
LEAST_PER_HEAD = 2
"""Minimum ratio of a part's size to that of its head; otherwise, parts would consist mostly of heads if many
requests wait."""
LEVEL = 1
"""Compression level; higher levels take longer and save less than a tenth."""


class Store(Protocol):
    """Destination of parts."""

    @property
    def path(self) -> Path:
        """Path of the trace."""

    def begin(self, number: int) -> None:
        """Begin this part, to which the next frames belong.

        Raises:
            OSError: If the part cannot be created.
        """

    def append(self, frame: bytes) -> None:
        """Append a frame to the current part.

        Raises:
            OSError: If the frame cannot be written; in that case, nothing of it remains.
        """

    def lost(self) -> Begins | None:
        """Return how the current part was lost: removed or truncated; None if it is intact."""

    def remove(self, number: int) -> None:
        """Remove a part from the store."""

    def close(self) -> None:
        """Close the store; no more parts follow."""


@dataclass
class _Part:
    number: int
    began_s: float
    size: int = 0
    head: int = 0
    """Number of bytes of the part's first frame, which lists the requests present."""


class PartedTrace:
    """Output that combines lines into frames, and frames into parts, within the bounds of a trace.

    Args:
        store: Destination of the parts; part 0 has begun.
        bounds: Bounds of the trace.
    """

    def __init__(self, store: Store, bounds: Bounds) -> None:
        self._store, self.bounds = store, bounds
        self.path = store.path
        self.frame = ZstdCompressor(LEVEL, write_checksum=True).compress
        self._parts = deque([_Part(0, time.monotonic())])
        self._lines: list[bytes] = []
        self._waiting, self._since_s = 0, 0.0
        """Bytes of the lines for the next frame, and the time since which the first of them waits."""

    def new_file_reason(self) -> Begins | None:
        """Return why a new part begins now: the previous part is full or was lost; None if it continues.

        A part ends if it is large or old enough; a part with little besides its head may stay open.
        """
        now, part = time.monotonic(), self._parts[-1]
        lost = self._store.lost()
        if lost is not None:  # lines that continue what is lost go with it
            self._lines, self._waiting = [], 0
        elif self._lines and now - self._since_s >= FRAME_S:
            self.end_frame()
        if lost is None:
            old = now - part.began_s >= self.bounds.part_s
            large = part.size >= max(self.bounds.part_bytes, LEAST_PER_HEAD * part.head)
            full = large or (old and (self.bounds.max_s is not None or part.size >= SMALL))
            if not full or (part.size == part.head and not self._lines):
                self._remove_old(now)
                return None
        self.end_frame()
        self._store.begin(part.number + 1)
        self._parts.append(_Part(part.number + 1, now))
        self._remove_old(now)
        return lost or "due"

    def write(self, lines: bytes) -> None:
        """Add lines to the current frame."""
        if not self._lines:
            self._since_s = time.monotonic()
        self._lines.append(lines)
        self._waiting += len(lines)
        if self._waiting >= FRAME_BYTES or not self._parts[-1].size:  # a head is a frame of its own
            self.end_frame()

    def end_frame(self) -> None:
        """End the frame and write it.

        Raises:
            OSError: If the frame cannot be written.
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
        """End the last frame and close the store."""
        try:
            self.end_frame()
        finally:
            self._store.close()

    def discard(self) -> None:
        """Remove the only part, which contains nothing of value."""
        self._store.remove(0)
        self._store.close()

    def _remove_old(self, now: float) -> None:
        """Remove the oldest part while the others cover the time to keep, or all together are too large."""
        most, kept_s = self.bounds.max_bytes, self.bounds.max_s
        while len(self._parts) > 1:
            too_large = most is not None and sum(part.size for part in self._parts) > most
            too_old = kept_s is not None and now - self._parts[1].began_s > kept_s
            if not too_large and not too_old:
                return
            self._store.remove(self._parts.popleft().number)
