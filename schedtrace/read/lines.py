"""The lines of a trace, told apart and checked; broken ones are dropped, and their numbers noted."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import msgspec

from schedtrace.errors import InputError
from schedtrace.model.safe_files import opened
from schedtrace.model.trace import SCHEMA_VERSION, Cpu, Delta, End, Events, Header, Notice, Output, Step
from schedtrace.read.problems import Problems
from schedtrace.read.schema import readable

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes that there are."""


@dataclass(frozen=True)
class ReadOptions:
    """Settings that change how long reading takes, never what is read."""

    cache: bool = True
    """Whether a large trace's Parquet files may be kept in the user's cache, and used again."""
    progress: Progress | None = None
    memory_bytes: int = 32 * 2**20
    """Larger traces go by way of Parquet files; parsed, a trace needs up to ten times as much memory."""
    chunk_bytes: int = 8 * 2**20
    """So much of a trace is parsed at once."""


READ = ReadOptions()
"""The usual way."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """While a file is read.

    Raises:
        InputError: it cannot be.
    """
    try:
        yield
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror})"
        raise InputError(msg) from error


LONGEST_LINE = 2**27
"""Bytes: 100,000 requests that arrive in one step take as much, 8,192 that are scheduled in one 3 MB."""


@dataclass
class WholeLines:
    """The whole lines of a file in chunks: the number (from 1) of a chunk's first line, and its lines.

    What is longer than ``LONGEST_LINE`` is cut, and so is no line of a trace.

    Args:
        path: The file.
        options: A chunk has about ``chunk_bytes``, and ``progress`` is told after each.
    """

    path: Path
    options: ReadOptions = READ
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
        with reading(self.path), opened(self.path) as file, ThreadPoolExecutor(1) as beside:
            total = os.fstat(file.fileno()).st_size
            pending: Future[None] | None = None
            while block := file.read(self.options.chunk_bytes):
                if pending is not None:
                    pending.result()
                pending = beside.submit(hashed.update, block)
                self.size += len(block)
                yield block
                if self.options.progress is not None:
                    self.options.progress(self.size, max(self.size, total))
        self.digest = hashed.hexdigest()


class KnownSettings(msgspec.Struct):
    """Names and types are those of vLLM's ``SchedulerConfig``; every other field may be anything."""

    max_num_seqs: int | None = None
    max_num_active_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_scheduled_tokens: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    long_prefill_token_threshold: int | None = None
    enable_chunked_prefill: bool | None = None
    scheduler_reserve_full_isl: bool | None = None
    policy: str | None = None
    watermark: float | None = None
    prefill_schedule_interval: int | None = None


def check_settings(scheduler_config: dict[str, Any]) -> None:
    """Refuse settings that vLLM cannot have written.

    Raises:
        msgspec.ValidationError: a type is another one, with its place.
    """
    known = {name: scheduler_config.get(name) for name in KnownSettings.__struct_fields__}
    msgspec.convert(known, KnownSettings)


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no JSON of ours; the last for brackets nested without end."""
HUGE_NUMBER = re.compile(rb"[:\[,]\s*-?\d{19}")
"""Nothing that is counted or timed here has 19 digits; such a number would not fit Polars' integers."""
AS_READ = {line: readable(line) for line in (Header, Step, Delta, Output, Events, Cpu, Notice, End)}
"""Kind of line to the struct that it is read into."""
_decode = msgspec.json.Decoder(Union[tuple(AS_READ.values())]).decode  # noqa: UP007  # made at run time


def read_lines(lines: list[bytes], first: int, problems: Problems) -> dict[type[msgspec.Struct], list[Any]]:
    """Kind of line to the lines of that kind, in their order.

    Deltas stand among the steps. So does a None for every line that a delta cannot continue: a broken one,
    which may have been a step, and the header of another trace.

    Args:
        lines: Some lines of a trace, not its header.
        first: Number of the first one.
        problems: Gets the numbers of broken ones.
    """
    found: dict[type[msgspec.Struct], list[Any]] = {kind: [] for kind in AS_READ.values()}
    header = AS_READ[Header]
    steps = found[AS_READ[Delta]] = found[AS_READ[Step]]
    for number, line in enumerate(lines, start=first):
        if not line:
            continue
        try:
            read = _decode(line)
        except UNREADABLE:
            problems.garbled_lines.append(number)
            steps.append(None)
        else:
            found[type(read)].append(read)
            if type(read) is header:
                steps.append(None)
    return {kind: found[as_read] for kind, as_read in AS_READ.items()}


def decode_line(line: bytes) -> Any:
    """A line as read; None if it is broken."""
    try:
        return _decode(line)
    except UNREADABLE:
        return None


def read_header(path: Path, lines: list[bytes]) -> Header:
    """The first line.

    Raises:
        InputError: it is no header, broken, or of a newer schema.
    """
    try:
        raw = msgspec.json.decode(lines[0])
    except UNREADABLE:
        raw = None
    if not isinstance(raw, dict) or raw.get("type") != "header":
        msg = f"{path}:1: not a schedtrace trace, the first line is no header"
        raise InputError(msg)
    version = raw.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        msg = (
            f"{path}:1: schema version {version}, written by schedtrace {raw.get('schedtrace_version')}; "
            f"this one reads up to {SCHEMA_VERSION}: upgrade schedtrace"
        )
        raise InputError(msg)
    try:
        msgspec.json.decode(lines[0], type=AS_READ[Header])  # no number is too large
        header = msgspec.json.decode(lines[0], type=Header)
        check_settings(header.scheduler_config)
    except UNREADABLE as error:
        msg = f"{path}:1: broken header ({error})"
        raise InputError(msg) from error
    if HUGE_NUMBER.search(lines[0]):
        msg = f"{path}:1: broken header (a number in it is too large)"
        raise InputError(msg)
    return header
