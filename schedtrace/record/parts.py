"""A trace in parts: zstd frames of a second each, a part after the other, the oldest of which go."""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from zstandard import ZstdCompressor

from schedtrace.model.trace_bounds import Bounds
from schedtrace.record.trace_files import Begins

FRAME_S = 0.8
"""The writer looks every 0.2 s, so a frame holds a second at most: what a killed process loses."""
FRAME_BYTES = 4 * 2**20
"""Before compression."""
SMALL = 2**18
"""Bytes of a part that is read in no time."""
LEVEL = 1
"""Higher levels take longer and save no tenth."""


class Store(Protocol):
    """Where parts go."""

    @property
    def path(self) -> Path:
        """Of the trace."""

    def begin(self, number: int) -> None:
        """The next frames belong to this part.

        Raises:
            OSError: it cannot be made.
        """

    def append(self, frame: bytes) -> None:
        """A frame of the part that was begun last.

        Raises:
            OSError: it cannot be written; nothing of it is.
        """

    def lost(self) -> Begins | None:
        """What somebody did to that part; None: it is as it was written."""

    def remove(self, number: int) -> None:
        """A part goes."""

    def close(self) -> None:
        """There are no more."""


@dataclass
class _Part:
    number: int
    began_s: float
    size: int = 0
    head: int = 0
    """Bytes of its first frame, which says who is there."""


class Parts:
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

    def begins(self) -> Begins | None:
        """Whether a part begins now, for the one before has enough or was lost."""
        now, part = time.monotonic(), self._parts[-1]
        lost = self._store.lost()
        if lost is not None:  # lines that continue what is lost go with it
            self._lines, self._waiting = [], 0
        elif self._lines and now - self._since_s >= FRAME_S:
            self.flush()
        if lost is None and not self._has_enough(part, now):
            self._remove_old(now)
            return None
        self.flush()
        self._store.begin(part.number + 1)
        self._parts.append(_Part(part.number + 1, now))
        self._remove_old(now)
        return lost or "due"

    def _has_enough(self, part: _Part, now: float) -> bool:
        """An idle engine makes no parts with next to nothing in them, unless old ones have to go in time."""
        if part.size == part.head and not self._lines:
            return False
        old = now - part.began_s >= self.bounds.part_s
        return part.size >= self.bounds.part_bytes or (
            old and (self.bounds.max_s is not None or part.size >= SMALL)
        )

    def write(self, lines: bytes) -> None:
        """Put them into the frame that is gathered."""
        if not self._lines:
            self._since_s = time.monotonic()
        self._lines.append(lines)
        self._waiting += len(lines)
        if self._waiting >= FRAME_BYTES or not self._parts[-1].size:  # a head is a frame of its own
            self.flush()

    def flush(self) -> None:
        """End the frame.

        Raises:
            OSError: it cannot be written.
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
            self.flush()
        finally:
            self._store.close()

    def _remove_old(self, now: float) -> None:
        """A part goes if the others hold the time that is kept, or if all are too large."""
        most, kept_s = self.bounds.max_bytes, self.bounds.max_s
        while len(self._parts) > 1:
            too_large = most is not None and sum(part.size for part in self._parts) > most
            too_old = kept_s is not None and now - self._parts[1].began_s > kept_s
            if not too_large and not too_old:
                return
            self._store.remove(self._parts.popleft().number)
