"""The zstd frames of a part, as far as they are whole."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zstandard import ZstdDecompressor, ZstdError

if TYPE_CHECKING:
    from zstandard import ZstdDecompressionObj  # of its stubs

MAGIC = b"\x28\xb5\x2f\xfd"
"""A frame begins with it (RFC 8878)."""
PIECE = 2**12
"""Given to the decompressor at once: what comes of it fits memory, whatever the file says (128 MiB)."""


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
