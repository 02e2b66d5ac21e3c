"""Parts of a trace: what stands in their zstd frames as far as these are whole, and which are needed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from zstandard import ZstdDecompressor, ZstdError

from schedtrace.model.safe_files import opened
from schedtrace.model.trace_names import files_of

if TYPE_CHECKING:
    from zstandard import ZstdDecompressionObj  # of its stubs

MAGIC = b"\x28\xb5\x2f\xfd"
"""A frame begins with it (RFC 8878)."""
PIECE = 2**12
"""Given to the decompressor at once: what comes of it fits memory, whatever the file says (128 MiB)."""
HEAD_LINES = 2
"""With which every part but the first begins: its header, and who was there."""
LONGEST_HEAD = 2**25
"""Bytes, decompressed: 100,000 requests that are there take 24 MB."""
BLOCK = 2**16
"""Compressed bytes that are read at once."""


@dataclass
class Frames:
    """Blocks of a compressed file, given as they come, to what stands in its frames."""

    cut: bool = False
    """The last frame has no end."""
    broken: int = 0
    """Frames that were left; a newline stands in the place of the rest of each."""

    def __post_init__(self) -> None:
        self._frame: ZstdDecompressionObj | None = None
        self._searching = False

    def blocks(self, compressed: Iterable[bytes], least_bytes: int) -> Iterator[bytes]:
        """Decompressed blocks, of at least so many bytes but for the last."""
        found, size = [], 0
        for block in compressed:
            for content in self.content(block):
                found.append(content)
                size += len(content)
                if size >= least_bytes:
                    yield b"".join(found)
                    found, size = [], 0
        if found:
            yield b"".join(found)
        self.cut = self._frame is not None

    def content(self, block: bytes) -> Iterator[bytes]:
        """What a block adds."""
        at = 0
        while at < len(block):
            if self._searching:
                at = block.find(MAGIC, at)
                if at < 0:
                    return
                self._searching = False
            is_first = self._frame is None
            frame = self._frame or ZstdDecompressor().decompressobj()
            piece = block[at : at + PIECE]
            try:
                content = frame.decompress(piece)
            except ZstdError:
                self.broken += 1
                self._frame, self._searching = None, True
                at += is_first
                content = b"\n"
            else:
                self._frame = None if frame.eof else frame
                at += len(piece) - len(frame.unused_data)
            if content:
                yield content


class _Begin(msgspec.Struct):
    at_us: int


def files_for(path: Path, last_us: int | None) -> list[Path]:
    """The files of a trace that hold what happened so many microseconds before its end; None: all.

    The trace ends after its last part begins, so what is that long before this begin is enough. A part whose
    begin is unknown, such as one that is being begun, is read with those beside it.
    """
    files = files_of(path)
    if last_us is None or len(files) == 1:
        return files
    latest = None
    for at in reversed(range(len(files))):
        began = _began_us(files[at])
        if began is None:
            continue
        latest = began if latest is None else latest
        if began <= latest - last_us:
            return files[at:]
    return files


def _began_us(part: Path) -> int | None:
    """By the second line of its head; None of the first part, which has none, and of what cannot be read."""
    try:
        _, line = _head(part)
        return msgspec.json.decode(line, type=_Begin).at_us
    except (OSError, ValueError, RecursionError):
        return None


def _head(part: Path) -> list[bytes]:
    """The first two lines of a part, as far as they are whole."""
    blocks, size, newlines = [], 0, 0
    with opened(part) as file:
        for block in Frames().blocks(iter(partial(file.read, BLOCK), b""), 1):
            blocks.append(block)
            size += len(block)
            newlines += block.count(b"\n")
            if newlines >= HEAD_LINES or size >= LONGEST_HEAD:
                break
    return b"".join(blocks).split(b"\n")[:-1][:HEAD_LINES]
