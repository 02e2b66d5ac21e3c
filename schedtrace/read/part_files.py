"""Parts of a trace: what stands in their zstd frames as far as these are whole, and which are needed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
HEAD = 2**22
"""Bytes in which the head of a part stands: 20,000 requests that are there take 1 MB."""


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


class _Told(msgspec.Struct):
    at_us: int


def files_for(path: Path, last_us: int | None) -> list[Path]:
    """The files of a trace that hold what happened so many microseconds before its end; None: all.

    The last part ends after it begins, so what is that long before its begin is enough.
    """
    files = files_of(path)
    if last_us is None or len(files) == 1:
        return files
    last_us = _began_us(files[-1]) - last_us
    first = next((at for at in reversed(range(len(files))) if _began_us(files[at]) <= last_us), 0)
    return files[first:]


def _began_us(part: Path) -> int:
    """By the second line of its head; 0 of the first part, which has none, and of what cannot be read."""
    try:
        with opened(part) as file:
            head = next(Frames().blocks([file.read(HEAD)], 1), b"")
        return msgspec.json.decode(head.split(b"\n")[1], type=_Told).at_us
    except (OSError, IndexError, msgspec.MsgspecError):
        return 0
