"""A file as chunks of whole lines, so that no more than a chunk of it is in memory."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from schedtrace.errors import InputError
from schedtrace.model.regular import opened
from schedtrace.read.options import Progress

LONGEST_LINE = 2**27
"""Bytes: 100,000 requests that arrive in one step take as much, 8,192 that are scheduled in one 3 MB."""


@dataclass
class WholeLines:
    """The whole lines of a file in chunks: the number (from 1) of a chunk's first line, and its lines.

    What is longer than ``LONGEST_LINE`` is cut, and so is no line of a trace.

    Args:
        path: The file.
        chunk_bytes: A chunk has about so many.
        progress: Told after every chunk.
    """

    path: Path
    chunk_bytes: int
    progress: Progress | None = None
    cut_off: bool = field(default=False, init=False)
    """At the end: whether something stood behind the last newline."""
    size: int = field(default=0, init=False)
    """Bytes read."""
    digest: str = field(default="", init=False)
    """At the end: BLAKE2b of all of them."""

    def __iter__(self) -> Iterator[tuple[int, list[bytes]]]:
        """Read the file.

        Raises:
            InputError: it cannot be read.
        """
        number, begun, size = 1, [b""], 0
        for block in self._blocks():
            *lines, end = block.split(b"\n")
            if not lines:
                begun += [end] if size < LONGEST_LINE else []
                size += len(end)
                continue
            lines[0] = b"".join([*begun, lines[0]])
            begun, size = [end], len(end)
            yield number, lines
            number += len(lines)
        self.cut_off = any(begun)

    def _blocks(self) -> Iterator[bytes]:
        """Blocks of bytes, hashed beside what is done with them."""
        hashed = hashlib.blake2b(digest_size=16)
        try:
            with opened(self.path) as file, ThreadPoolExecutor(1) as beside:
                total = os.fstat(file.fileno()).st_size
                pending: Future[None] | None = None
                while block := file.read(self.chunk_bytes):
                    if pending is not None:
                        pending.result()
                    pending = beside.submit(hashed.update, block)
                    self.size += len(block)
                    yield block
                    if self.progress is not None:
                        self.progress(self.size, max(self.size, total))
        except OSError as error:
            msg = f"{self.path}: cannot be read ({error.strerror})"
            raise InputError(msg) from error
        self.digest = hashed.hexdigest()
