"""Bytes of a growing trace, in one file or in consecutive parts."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from schedtrace.errors import InputError
from schedtrace.model.safe_files import descriptor
from schedtrace.model.trace_names import files_of, is_in_parts
from schedtrace.read.lines import LONGEST_LINE, Joint, reading
from schedtrace.read.living import LiveRequests, skim
from schedtrace.read.part_files import TOO_LARGE, ZstdFrames, decode_head, head_of, parts_of

BLOCK = 2**20
PART_BLOCK = 2**16
"""Compressed bytes of a part that are read at once."""
GAP = b'{"type":"gap"}'
"""Line that is yielded where parts are missing; no recorder writes it."""


class LostError(InputError):
    """Error: the file was removed, replaced or cut, so reading cannot continue."""


class Growing(ABC):
    """Reader of the new lines of a trace.

    Args:
        path: The file, or all parts.
        keep_us: What is older than so many microseconds before the last step may be left out.

    Raises:
        InputError: If it cannot be opened.
    """

    _file: int
    """Descriptor of the file being read."""
    notes: Sequence[str] = ()
    """Sentence for each file that is not part of this trace, or only up to a point."""

    @abstractmethod
    def begin(self, lives: LiveRequests) -> tuple[bytes, list[str]] | None:
        """Return the header's line and the notices in skipped lines; None if the header is not complete yet.

        Args:
            lives: Gets who came and went in what is too old.
        """

    @abstractmethod
    def lines(self) -> Iterator[list[bytes]]:
        """Yield the lines that are new, up to the last newline.

        Raises:
            LostError: If the file was removed, replaced or cut.
            OSError: If it cannot be read.
        """

    @abstractmethod
    def modified_s(self) -> float:
        """Return the Unix time of the last write."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class GrowingFile(Growing):
    """Reader of a single growing file."""

    def __init__(self, path: Path, keep_us: int) -> None:
        self._path, self._keep_us, self._at = path, keep_us, 0
        with reading(path):
            self._file = descriptor(path)

    def begin(self, lives: LiveRequests) -> tuple[bytes, list[str]] | None:
        """Skim the lines that are too old."""
        size = self._checked_size()
        head, newline, _ = os.pread(self._file, BLOCK, 0).partition(b"\n")
        if not newline:
            return None
        self._at, notices = skim(self._file, len(head) + 1, size, self._keep_us, lives)
        return head, notices

    def lines(self) -> Iterator[list[bytes]]:
        """Read up to the last newline: the recorder removes an incomplete line that a full disk left."""
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
        """Return the Unix time of the last write to the file that currently has this name."""
        return self._path.stat().st_mtime


class GrowingParts(Growing):
    """Reader of parts, beginning with the part that was written ``keep_us`` ago."""

    def __init__(self, path: Path, keep_us: int) -> None:
        self._path = path
        parts = parts_of(path)
        self.notes: list[str] = parts.left_out
        self._listed = set(files_of(path))
        ended = [at for at, (before, _) in enumerate(pairwise(parts.files)) if _age_s(before) * 1e6 > keep_us]
        first = ended[-1] + 1 if ended else 0
        self._later = parts.files[first + 1 :]
        """Parts after this one that have been listed so far."""
        self._joint = Joint(parts)
        self._begin_part((parts.files or [path])[first])
        self._ready: list[bytes] = []

    def _begin_part(self, part: Path) -> None:
        """Switch from the current part to this one.

        Raises:
            InputError: If it cannot be opened; the other one is not left.
            FileNotFoundError: If it went meanwhile.
        """
        with reading(part, missing=True):
            file = descriptor(part)
        if hasattr(self, "_part"):
            os.close(self._file)
        self._file, self._part, self._at, self._begun, self._frames = file, part, 0, b"", ZstdFrames()
        self._joint.begin(part)

    def begin(self, lives: LiveRequests) -> tuple[bytes, list[str]] | None:
        """Read the header; every part begins with the requests present."""
        del lives
        for lines in self._part_lines():
            head, *self._ready = lines
            return head, []
        return None

    def lines(self) -> Iterator[list[bytes]]:
        """Yield the lines of this part and of the following ones; several small parts are joined."""
        gathered, self._ready = self._ready, []
        size = sum(map(len, gathered))
        for lines in self._read():
            gathered += lines
            size += sum(map(len, lines)) + len(lines)
            if size >= BLOCK:
                yield gathered
                gathered, size = [], 0
        if gathered:
            yield gathered
        if not os.fstat(self._file).st_nlink and not files_of(self._path):
            msg = f"{self._path}: removed while it was followed"
            raise LostError(msg)

    def _read(self) -> Iterator[list[bytes]]:
        while True:
            self._list()
            yield from self._part_lines()  # after the look: a part with a later one is complete
            if not self._later:
                return
            self._joint.end(self._part, lacks=not self._is_whole())
            while self._later:
                try:
                    self._begin_part(self._later[0])
                except FileNotFoundError:  # it went meanwhile
                    self._later.pop(0)
                else:
                    self._later.pop(0)
                    break

    def _list(self) -> None:
        """Look for further parts once all known parts have been read."""
        if self._later or not (new := [part for part in files_of(self._path) if part not in self._listed]):
            return
        self._listed.update(new)
        parts = parts_of(self._path)
        self._later = [part for part in parts.files if part in new]
        self.notes += [note for note in parts.left_out if note not in self.notes]

    def _is_whole(self) -> bool:
        """Return whether all of the part has been read, as far as this can be seen."""
        frames = self._frames
        frames.cut = frames.cut or bool(self._begun)
        damaged = frames.broken or frames.cut or frames.oversized or frames.is_open
        return 0 < self._at <= os.fstat(self._file).st_size and not damaged

    def _part_lines(self) -> Iterator[list[bytes]]:
        """Yield lines that were added to this part; ``GAP`` stands for a header that continues nothing."""
        while block := os.pread(self._file, PART_BLOCK, self._at):
            self._at += len(block)
            *lines, self._begun = (self._begun + b"".join(self._frames.content(block))).split(b"\n")
            if len(self._begun) > LONGEST_LINE:
                self._begun = self._begun[:1]
            note = f"{self._part.name}: {TOO_LARGE}"
            if self._frames.oversized and note not in self.notes:
                self.notes.append(note)
            if lines:
                lines = self._joint.take(lines)
                if self._joint.kept_head:
                    lines[0] = GAP
                yield lines

    def modified_s(self) -> float:
        """Return the Unix time of the last write to the part being read."""
        return os.fstat(self._file).st_mtime


def _age_s(part: Path) -> float:
    """Return the seconds since the last write."""
    with suppress(OSError):
        return time.time() - part.stat().st_mtime
    return 0.0


def first_trace_line(path: Path) -> tuple[bytes, bool]:
    """Return the first line of a trace, as far as it is there, and whether it is whole.

    Raises:
        OSError: If it cannot be read.
    """
    parts = files_of(path)
    file = descriptor(parts[-1] if parts else path)
    try:
        head = os.pread(file, BLOCK, 0)
    finally:
        os.close(file)
    if is_in_parts(path):
        lines = head_of(parts[-1], 1)
        is_broken = bool(lines) and decode_head(lines[0]) is None
        header = parts_of(path).header if is_broken else b""
        return header or b"".join(lines), bool(lines)
    line, whole, _ = head.partition(b"\n")
    return line, bool(whole) or len(line) >= BLOCK
