"""Columns of integers and of texts, packed into one string that the page embeds and its script unpacks.

Each number is written as its zigzag code (0, -1, 1, -2, ... become 0, 1, 2, 3, ...) with 7 bits per byte, the
lowest first; the high bit means that more bytes follow (as in protobuf's ``sint64``). Texts are UTF-8 between
NUL characters. All bytes are deflated and written as base64.
"""

import base64
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    import numpy as np

UNKNOWN = -1
"""Value that stands for null, because every recorded figure is at least 0."""
LEVEL = 6
BITS, MORE = 7, 128
SEPARATOR = "\0"


@dataclass
class Packed:
    """Columns under their names, in the order in which they were added."""

    directory: list[tuple[str, int, str]] = field(default_factory=list)
    """Name of each column; its number of values or, for texts, of bytes; and its encoding: ``values``,
    ``differences`` (of each value from the one before) or ``texts``."""
    _bytes: list[bytes] = field(default_factory=list)

    def add(self, name: str, values: pl.Series, *, differences: bool = True) -> None:
        """Add integers; null becomes ``UNKNOWN``.

        Args:
            name: Name in the page.
            values: Integers or booleans.
            differences: Whether to write differences, which are shorter if neighbours are similar.
        """
        numbers = values.cast(pl.Int64).fill_null(UNKNOWN)
        if differences:
            numbers = numbers - numbers.shift(1, fill_value=0)
        self.directory.append((name, len(numbers), "differences" if differences else "values"))
        self._bytes.append(_varints(numbers.to_numpy()))

    def add_texts(self, name: str, texts: Iterable[str]) -> None:
        """Add texts, which must not contain a NUL character."""
        written = SEPARATOR.join(texts).encode()
        self.directory.append((name, len(written), "texts"))
        self._bytes.append(written)

    def packed_text(self) -> str:
        """Return all columns as raw deflate in base64."""
        deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = deflate.compress(b"".join(self._bytes)) + deflate.flush()
        return base64.b64encode(packed).decode()


def _varints(numbers: "np.ndarray") -> bytes:
    import numpy as np  # noqa: PLC0415  # the command line must answer before it is loaded

    codes = ((numbers << 1) ^ (numbers >> 63)).astype(np.uint64)
    lengths = np.ones(len(codes), np.int64)
    for bits in range(BITS, 64, BITS):
        lengths += codes >= np.uint64(1) << np.uint64(bits)
    written = np.zeros(int(lengths.sum()), np.uint8)
    starts = np.cumsum(lengths) - lengths
    for place in range(int(lengths.max(initial=0))):
        long = lengths > place
        seven = (codes[long] >> np.uint64(BITS * place)) & np.uint64(MORE - 1)
        written[starts[long] + place] = seven + np.where(lengths[long] > place + 1, MORE, 0).astype(np.uint64)
    return written.tobytes()
