"""Decompression of untrusted files: a trace's zstd frames, even cut off or broken, and text in gzip or zstd.

A trace's last frame may be cut off, and any frame may be broken: ``ZstdFrames`` recovers the readable part of
each. A compressed log is read up to its first broken byte.
"""

import errno
import io
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from gzip import GzipFile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from zstandard import ZstdDecompressor, ZstdError

from schedtrace.model.safe_files import opened

if TYPE_CHECKING:
    from zstandard import ZstdDecompressionObj  # of its stubs

GZIP = b"\x1f\x8b"
"""First bytes of a file in gzip."""
ZSTD = b"\x28\xb5\x2f\xfd"
"""First bytes of a zstd frame (RFC 8878)."""
PIECE = 2**8
"""Bytes given to the decompressor at a time; they expand to at most 8 MiB, whatever the file contains."""
MOST_EXPANSION = 256
"""Maximum factor by which a frame expands; for the most repetitive line that a recorder writes, it is 140."""
TOO_LARGE = (
    f"a frame expands to more than {MOST_EXPANSION} times its size, which no recorder writes; it and what "
    "follows it in its part was dropped"
)
"""Message about a part with a frame that expands too much."""
SMALL_FRAME = 2**12
"""Number of decompressed bytes up to which a frame may expand by any factor."""
_BLANK = re.compile(rb"\n\n+")
_LARGEST_WINDOW = 2**27
"""Maximum memory of a zstd decompressor, in bytes."""
_UNPACKED_BLOCK = 2**21
"""Number of decompressed bytes read at once."""


@dataclass
class ZstdFrames:
    """Decompressor of a file's zstd frames, fed block by block."""

    cut: bool = False
    """Whether the last frame is incomplete."""
    broken: int = 0
    """Number of broken frames; their unreadable rest is replaced with a newline."""
    oversized: bool = False
    """Whether a frame expanded to more than any recorder writes; the rest of that frame and everything after
    it were dropped."""

    def __post_init__(self) -> None:
        self._frame: ZstdDecompressionObj | None = None
        self._searching = False
        self._read = self._made = 0
        """Numbers of compressed and decompressed bytes of the current frame so far."""

    @property
    def in_frame(self) -> bool:
        """Return whether the current frame has not ended yet."""
        return self._frame is not None

    def blocks(self, compressed: Iterable[bytes], least_bytes: int) -> Iterator[bytes]:
        """Yield decompressed blocks of at least this many bytes; only the last may be smaller."""
        pieces, size = [], 0
        for block in compressed:
            for content in self.content(block):
                pieces.append(content)
                size += len(content)
                if size >= least_bytes:
                    yield b"".join(pieces)
                    pieces, size = [], 0
        if pieces:
            yield b"".join(pieces)
        self.cut = self.in_frame

    def content(self, block: bytes) -> Iterator[bytes]:
        """Return the content that a block adds, without blank lines, because no recorder writes any."""
        at = 0
        while at < len(block) and not self.oversized:
            if self._searching:
                at = block.find(ZSTD, at)
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
                self._read = self._made = 0
                at += is_first
                content = b"\n"
            else:
                used = len(piece) - len(frame.unused_data)
                content = self._bounded(content, used)
                self._frame = None if frame.eof or self.oversized else frame
                if self._frame is None:
                    self._read = self._made = 0
                at += used
            if content:
                yield _BLANK.sub(b"\n", content) if b"\n\n" in content else content

    def _bounded(self, content: bytes, used: int) -> bytes:
        """Return ``content``, decompressed from ``used`` bytes, or only a newline if it exceeds the bound."""
        self._read += used
        self._made += len(content)
        if self._made <= SMALL_FRAME + MOST_EXPANSION * self._read:
            return content
        self.oversized = True
        return b"\n"


class _Unpacked(io.RawIOBase):
    """Stream of decompressed bytes; it ends where the compressed file is cut off or broken."""

    def __init__(self, stream: Any, file: BinaryIO, path: Path) -> None:
        self._stream = stream
        self._file = file
        self._path = path
        self._read = 0

    def readable(self) -> bool:
        """Return True: the stream can be read."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read the bytes that one call of the decompressor returns."""
        view = memoryview(buffer)
        try:
            content = self._stream.read1(len(view))
        except (EOFError, zlib.error, ZstdError, OSError) as error:
            if self._read == 0:
                raise OSError(errno.EIO, "broken compressed data", str(self._path)) from error
            content = b""
        self._read += len(content)
        view[: len(content)] = content
        return len(content)

    def close(self) -> None:
        """Close the decompressor and the file."""
        self._stream.close()
        self._file.close()
        super().close()


def opened_text(path: Path) -> BinaryIO:
    """Open a regular file for reading; decompress it if its first bytes are those of gzip or zstd.

    Raises:
        OSError: If it cannot be read.
    """
    file = opened(path)
    begin = file.read(4)
    file.seek(0)
    if begin.startswith(GZIP):
        stream: Any = GzipFile(fileobj=file)
    elif begin == ZSTD:
        unpacking = ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        stream = unpacking.stream_reader(file, read_across_frames=True)
    else:
        return file
    return io.BufferedReader(_Unpacked(stream, file, path), _UNPACKED_BLOCK)
