"""Text that people have, whatever it is packed in: gzip and zstd, standard input, containers' log formats.

Memory stays bounded: blocks are read one after the other, and a line longer than ``LONGEST_LINE`` is cut.
"""

import errno
import io
import re
import tempfile
import zlib
from collections.abc import Generator, Iterable, Iterator
from gzip import GzipFile
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from zstandard import ZstdDecompressor, ZstdError

from schedtrace.errors import InputError
from schedtrace.model.safe_files import opened
from schedtrace.read.lines import reading

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
LONGEST_LINE = 16 * 2**20
"""Maximum bytes of a line; longer lines are cut off. A record of 1,024 requests has about 90 KB."""
MOST_PIPED = 2**36
"""Maximum bytes of standard input, which is written to a temporary file to be read more than once."""
_BLOCK = 2**20
_LARGEST_WINDOW = 2**27
"""Maximum memory of a zstd decompressor."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Escape sequences of terminals: colours, erased lines (``grep --color``), titles."""
_CRI = re.compile(
    rb"(?:> )?\d{4}-\d\d-\d\dT[\d:.]{8,18}(?:Z|[+-]\d\d:\d\d) (?P<stream>stdout|stderr) (?P<tag>[FP]) "
)
"""Prefix of containerd and CRI-O, which split lines of more than 16 KiB: ``P`` is continued."""
_WRAPPED = re.compile(rb"^(?:" + _CRI.pattern + rb'|\{"log":)', re.MULTILINE)
_DOCKER_SPLIT = 16 * 2**10
"""Bytes at which docker splits a message."""
_HEAD = 2**16
"""Bytes in which a container runtime's format is recognized."""
_MESSAGE_KEYS = ("log", "message", "msg", "MESSAGE", "textPayload", "body", "text")
"""Keys under which JSON log lines keep their text: docker, structured loggers, journald, Google Cloud."""


class _Unpacked(io.RawIOBase):
    """Bytes from a decompressor; a stream that is cut off or broken ends where it breaks."""

    def __init__(self, stream: Any, file: BinaryIO, path: Path) -> None:
        self._stream = stream
        self._file = file
        self._path = path
        self._read = 0

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read as many bytes as one call of the decompressor gives."""
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
    """Return a regular file, open for reading, unpacked if its first bytes are those of gzip or zstd.

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
    return io.BufferedReader(_Unpacked(stream, file, path), _BLOCK)


def spooled(stream: BinaryIO, folder: Path) -> Path:
    """Write a stream that can be read only once to a file in a folder; return the file.

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
    """Return a line as text: without escape sequences and, of a JSON log line, its message only."""
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
    """Yield number (from 1) and text of every line, joined where a container runtime split it.

    Raises:
        InputError: If the file cannot be read.
    """
    with reading(path), opened_text(path) as file:
        for number, line in joined_lines(_raw_lines(file)):
            yield number, unwrapped(line)


def marked_lines(path: Path, markers: tuple[bytes, ...]) -> Iterator[tuple[int, str]]:
    """Yield number and text of every line that contains a marker; other lines cost next to nothing.

    Raises:
        InputError: If the file cannot be read.
    """
    with reading(path), opened_text(path) as file:
        is_wrapped = _WRAPPED.search(file.read(_HEAD)) is not None
    if is_wrapped:
        for number, text in text_lines(path):
            if any(marker.decode() in text for marker in markers):
                yield number, text
        return
    with reading(path), opened_text(path) as file:
        number, rest = 1, b""
        while block := file.read(_BLOCK):
            if len(rest) >= LONGEST_LINE:
                block = block[block.find(b"\n") :] if b"\n" in block else b""  # the rest of it
            data = rest + block
            end = data.rfind(b"\n") + 1
            rest = data[end:][:LONGEST_LINE]
            number = yield from _marked_in(data[:end], number, markers)
        yield from _marked_in(rest, number, markers)


def _marked_in(data: bytes, number: int, markers: Iterable[bytes]) -> Generator[tuple[int, str], None, int]:
    """Yield the marked lines of whole lines, of which the first has this number; return the next number."""
    places: dict[int, int] = {}
    for marker in markers:
        at = data.find(marker)
        while at >= 0:
            end = data.find(b"\n", at)
            end = len(data) if end < 0 else end
            places[data.rfind(b"\n", 0, at) + 1] = end
            at = data.find(marker, end)
    counted = 0
    for begin, end in sorted(places.items()):
        number += data.count(b"\n", counted, begin)
        counted = begin
        yield number, unwrapped(data[begin:end])
    return number + data.count(b"\n", counted)


def _raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(LONGEST_LINE):
        number += 1
        yield number, line
        while not line.endswith(b"\n") and (line := file.readline(LONGEST_LINE)):
            pass


def joined_lines(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Join lines that a container runtime split: CRI's partial lines, docker's messages of 16 KiB."""
    begun: dict[bytes, tuple[int, bytes]] = {}
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
        first, before = begun.pop(stream, (number, b""))
        text = before + text if before else line if prefix is not None else text
        if goes_on and len(text) < LONGEST_LINE:
            begun[stream] = first, text.rstrip(b"\r\n")
        else:
            yield first, text
    yield from begun.values()


class _DockerLine(msgspec.Struct):
    log: str


def _docker_message(line: bytes) -> bytes | None:
    try:
        return msgspec.json.decode(line, type=_DockerLine).log.encode(errors="replace")
    except (msgspec.DecodeError, RecursionError):
        return None
