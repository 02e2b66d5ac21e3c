"""Text of users' files, whatever their packaging: gzip or zstd, standard input, containers' log formats.

Memory stays bounded: blocks are read one after the other, and a line longer than ``LONGEST_LINE`` is cut.
"""

import re
import tempfile
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import polars as pl

from schedtrace.errors import InputError
from schedtrace.read.decompress import opened_text
from schedtrace.read.lines import UNREADABLE, reading

LONGEST_LINE = 16 * 2**20
"""Maximum bytes of a line; longer lines are cut off. A record of 1,024 requests takes about 90 KB."""
MOST_PIPED = 2**36
"""Maximum bytes of standard input, which is copied to a temporary file so that it can be read more than once.
"""
_BLOCK = 2**21
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Pattern of terminals' escape sequences: colours, erased lines (``grep --color``), titles."""
_CRI = re.compile(
    rb"(?:> )?\d{4}-\d\d-\d\dT[\d:.]{8,18}(?:Z|[+-]\d\d:\d\d) (?P<stream>stdout|stderr) (?P<tag>[FP]) "
)
"""Pattern of the prefix of containerd and CRI-O, which split lines of more than 16 KiB; ``P`` means that the
next line continues this one."""
_WRAPPED = re.compile(rb"^(?:" + _CRI.pattern + rb'|\{"log":)', re.MULTILINE)
_CRI_PARTIAL = (b" stdout P ", b" stderr P ")
_DOCKER_SPLIT = 16 * 2**10
"""Number of bytes at which docker splits a message."""
_DOCKER_END = b'\\n","stream":'
"""Text that follows docker's message at the end of a line that is not split."""
_DENSE = 3
"""Maximum ratio of all lines to those with the frequent marker in a block that ``LatestLines`` takes."""
_MOST_FILES = 64
"""Maximum number of files whose search results are kept."""
_HEAD = 2**16
"""Number of bytes at the beginning of a block from which a container runtime's format is recognized."""
_MESSAGE_KEYS = ("log", "message", "msg", "MESSAGE", "textPayload", "body", "text")
"""Keys under which JSON log lines keep their text: docker, structured loggers, journald, Google Cloud."""


def spooled(stream: BinaryIO, folder: Path) -> Path:
    """Copy a stream that can be read only once to a file in a folder; return the file.

    Raises:
        InputError: If the stream is larger than ``MOST_PIPED`` or cannot be read or written.
    """
    size = 0
    with reading(Path("-")), tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        while block := stream.read(_BLOCK):
            size += len(block)
            if size > MOST_PIPED:
                msg = f"-: standard input is larger than {MOST_PIPED:,} bytes"
                raise InputError(msg)
            file.write(block)
    return Path(file.name)


def unwrapped(line: bytes) -> str:
    """Return a line's text, or the message of a JSON log line, without escape sequences."""
    text = line.decode(errors="replace").rstrip("\r\n")
    if "\x1b" in text:
        text = _CONTROL.sub("", text)
    stripped = text.strip()
    if not (stripped.startswith("{") and stripped.endswith("}")):
        return text
    try:
        fields = msgspec.json.decode(stripped)
    except (msgspec.DecodeError, RecursionError):
        return text
    message = next(
        (fields[key] for key in _MESSAGE_KEYS if isinstance(fields.get(key), str) and fields[key].strip()),
        None,
    )
    if message is None:
        return text
    return _CONTROL.sub("", message).rstrip("\r\n")


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number (from 1) and the text of every line, rejoined where a container runtime split it."""
    with reading(path), opened_text(path) as file:
        joiner = _LineJoiner()
        for number, line in joiner.whole_lines(_raw_lines(file)):
            yield number, unwrapped(line)
        for number, line in joiner.rest():
            yield number, unwrapped(line)


class SearchedBlock(NamedTuple):
    """Size and markers of a block of whole lines, without its content."""

    size: int
    lines: int
    """Number of line breaks."""
    searched: frozenset[bytes]
    """Markers for which the block was searched."""
    markers: frozenset[bytes]
    """Markers that were found in the block: each line with any marker contains one of these."""


class LatestLines:
    """Collector of blocks that contain a frequent marker and no other; only the latest lines with it matter.

    Older blocks are dropped as a whole, once their lines have been counted.
    """

    def __init__(self, marker: bytes, most: int) -> None:
        self.left_out = 0
        """Number of dropped lines that contain the marker."""
        self._marker = marker
        self._most = most
        self._blocks: deque[tuple[int, bytes, int]] = deque()
        """Number of the first line, content, and number of lines with the marker, for each block."""
        self._lines = 0

    def take(self, block: bytes, number: int, breaks: int, markers: Collection[bytes]) -> bool:
        """Take a block if many lines have the marker and none has another; return whether it was taken.

        Args:
            block: Whole lines.
            number: Number of the block's first line.
            breaks: Number of line breaks in the block.
            markers: Markers in the block.
        """
        if any(marker != self._marker for marker in markers):
            return False
        lines = block.count(self._marker)
        if _DENSE * lines < breaks:
            return False
        self._blocks.append((number, block, lines))
        self._lines += lines
        while self._lines - self._blocks[0][2] >= self._most:
            _, _, dropped = self._blocks.popleft()
            self._lines -= dropped
            self.left_out += dropped
        return True

    def pop_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines with the marker in the blocks taken so far, and forget the blocks."""
        while self._blocks:
            number, block, _ = self._blocks.popleft()
            yield from _marked_in(block, number, (self._marker,))
        self._lines = 0


def marked_lines(
    path: Path, markers: tuple[bytes, ...], latest: LatestLines | None = None
) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of every line that contains a marker; other lines cost almost no time.

    Args:
        path: File to read.
        markers: Byte strings; each yielded line contains at least one of them.
        latest: Collector for a frequent marker, of whose lines only the latest are yielded; None for all.
    """
    words = [marker.decode() for marker in markers]
    joiner = _LineJoiner()
    is_wrapped = False
    number = 1
    for place, (block, summary) in enumerate(searched_blocks(path, markers)):
        is_wrapped = is_wrapped or (place == 0 and _WRAPPED.search(block[:_HEAD]) is not None)
        is_split = is_wrapped and (joiner.is_open or _has_split_lines(block))
        present = summary.markers.intersection(markers)
        first, number = number, number + summary.lines
        if latest is not None and not is_split and latest.take(block, first, summary.lines, present):
            continue
        for at, line in latest.pop_lines() if latest is not None else ():
            yield at, unwrapped(line)
        if is_split:
            lines = list(enumerate(block.removesuffix(b"\n").split(b"\n"), first))
        else:
            lines = _marked_in(block, first, present)
        for at, line in joiner.whole_lines(lines) if is_wrapped else lines:
            text = unwrapped(line)
            if not is_wrapped or any(word in text for word in words):
                yield at, text
    for at, line in latest.pop_lines() if latest is not None else ():
        yield at, unwrapped(line)
    for at, line in joiner.rest():
        text = unwrapped(line)
        if any(word in text for word in words):
            yield at, text


def searched_blocks(path: Path, markers: tuple[bytes, ...]) -> Iterator[tuple[bytes, SearchedBlock]]:
    """Yield the blocks of a file with the markers in each; results of an earlier search are reused."""
    with reading(path), opened_text(path) as file:
        status = path.stat()
        before = _searched_before(path, (status.st_ino, status.st_size, status.st_mtime_ns))
        for place, block in enumerate(whole_line_blocks(file)):
            earlier = before[place] if 0 < place < len(before) else None
            # The first is searched anew: a small file may be rewritten within one step of its times.
            if earlier is None or earlier.size != len(block) or not earlier.searched.issuperset(markers):
                before[place : place + 1] = [_searched(block, markers)]
            yield block, before[place]


@lru_cache(_MOST_FILES)
def _searched_before(
    path: Path,  # noqa: ARG001  # key of the cache
    version: tuple[int, ...],  # noqa: ARG001  # key of the cache
) -> list[SearchedBlock]:
    """Return a list of the blocks searched so far in this version of the file; callers append to it."""
    return []


def _searched(block: bytes, markers: tuple[bytes, ...]) -> SearchedBlock:
    """Search for all markers in one pass of Polars, several times as fast as one search per marker.

    A marker is missed if it overlaps another marker wherever it occurs.
    """
    import numpy as np  # noqa: PLC0415  # the command line must answer before it is loaded

    text = pl.Series([block.decode(errors="replace")])
    any_marker = "|".join(re.escape(marker.decode()) for marker in markers)
    present = {marker.encode() for marker in text.str.extract_all(any_marker)[0]}
    lines = int(np.count_nonzero(np.frombuffer(block, np.uint8) == ord("\n")))  # 4 times as fast as count()
    return SearchedBlock(len(block), lines, frozenset(markers), frozenset(present))


def whole_line_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield a file in blocks that end at line breaks; lines over ``LONGEST_LINE`` are cut."""
    while block := file.read(_BLOCK):
        block += file.readline(LONGEST_LINE)
        yield block
        is_cut = not block.endswith(b"\n")
        while is_cut and (rest := file.readline(_BLOCK)):
            is_cut = not rest.endswith(b"\n")


def _marked_in(block: bytes, number: int, markers: Iterable[bytes]) -> list[tuple[int, bytes]]:
    """Return numbers and contents of a block's lines with a marker; the block's first line has ``number``."""
    import numpy as np  # noqa: PLC0415  # likewise

    places: dict[int, int] = {}
    for marker in markers:
        at = block.find(marker)
        while at >= 0:
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            places[block.rfind(b"\n", 0, at) + 1] = end
            at = block.find(marker, end)
    begins = sorted(places)
    breaks = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    numbers = breaks.searchsorted(begins) + number
    return [(int(place), block[begin : places[begin]]) for place, begin in zip(numbers, begins, strict=True)]


def _raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(LONGEST_LINE):
        number += 1
        yield number, line
        while not line.endswith(b"\n") and (line := file.readline(LONGEST_LINE)):
            pass


class _LineJoiner:
    """Joiner of lines that a container runtime split: CRI's partial lines, docker's messages of 16 KiB."""

    def __init__(self) -> None:
        self._begun: dict[bytes, tuple[int, bytes]] = {}
        """First line's number and the text so far of the split line in each stream."""

    @property
    def is_open(self) -> bool:
        """Whether a split line has not ended yet."""
        return bool(self._begun)

    def whole_lines(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield lines with their numbers; split lines are yielded as a whole when they end."""
        for number, line in lines:
            prefix = _CRI.match(line)
            if prefix is not None:
                stream, text, goes_on = prefix["stream"], line[prefix.end() :], prefix["tag"] == b"P"
            elif line.startswith(b'{"log":') and (message := _docker_message(line)) is not None:
                stream, text = b"docker", message
                goes_on = len(text) >= _DOCKER_SPLIT and not text.endswith(b"\n")
            else:
                yield number, line
                continue
            first, before = self._begun.pop(stream, (number, b""))
            text = before + text if before else line if prefix is not None else text
            if goes_on and len(text) < LONGEST_LINE:
                self._begun[stream] = first, text.rstrip(b"\r\n")
            else:
                yield first, text

    def rest(self) -> Iterator[tuple[int, bytes]]:
        """Yield the split lines whose end never came."""
        yield from self._begun.values()


def _has_split_lines(block: bytes) -> bool:
    """Return whether a container runtime may have split one of these lines."""
    lines = block.count(b"\n") + (not block.endswith(b"\n"))
    if b'{"log":' in block[:_HEAD] and block.count(_DOCKER_END) < lines:
        return True
    return any(tag in block for tag in _CRI_PARTIAL)


class _DockerLine(msgspec.Struct):
    log: str


def _docker_message(line: bytes) -> bytes | None:
    try:
        return msgspec.json.decode(line, type=_DockerLine).log.encode(errors="replace")
    except UNREADABLE:
        return None
