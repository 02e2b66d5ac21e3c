"""Classification and checks of a trace's lines; broken lines are dropped and their numbers are noted."""

import hashlib
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from errno import ENOENT
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from schedtrace.errors import InputError
from schedtrace.model.delta import Delta
from schedtrace.model.manifest import is_in_parts
from schedtrace.model.safe_files import opened
from schedtrace.model.trace import SCHEMA_VERSION, Cpu, End, Events, Header, Notice, Output, Step
from schedtrace.read.decompress import TOO_LARGE, ZstdFrames
from schedtrace.read.part_files import Joint, last_of, named_files, parts_of
from schedtrace.read.problems import Problems

Progress = Callable[[int, int], None]
"""Callback with the number of bytes done and the total number of bytes."""


@dataclass(frozen=True)
class ReadOptions:
    """Options that affect how long reading takes but, except for ``last_us``, not what it returns."""

    cache: bool = True
    """Whether a large trace's Parquet files may be kept in the user's cache for later commands."""
    progress: Progress | None = None
    memory_bytes: int = 32 * 2**20
    """Size of a trace in bytes above which Parquet files are used; a parsed trace needs up to ten times its
    size in memory."""
    last_us: int | None = None
    """Microseconds that must be read at the end of a trace in parts; None for the whole trace."""
    chunk_bytes: int = 8 * 2**20
    """Bytes of a trace parsed at once."""


READ = ReadOptions()
"""Default options."""


@contextmanager
def reading(path: Path, *, missing: bool = False) -> Iterator[None]:
    """Turn errors of reading a file into InputError.

    Args:
        path: Path of the file.
        missing: Whether to let FileNotFoundError pass to the caller.

    Raises:
        InputError: If the file cannot be read.
        FileNotFoundError: If the file does not exist and ``missing`` is set.
    """
    try:
        yield
    except OSError as error:
        if missing and isinstance(error, FileNotFoundError):
            raise
        raise InputError(_unreadable(path, error)) from error


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path}: cannot be read ({error.strerror})"


LONGEST_LINE = 2**27
"""Maximum bytes of a line. A step with 100,000 arrivals needs that much; a step with 8,192 scheduled requests
needs 3 MB."""


class Content(NamedTuple):
    """Size and hash of a file that was read."""

    size: int
    digest: str
    """BLAKE2b hash of the whole file."""


@dataclass
class WholeLines:
    """Reader of a trace's whole lines: it yields chunks, each with the number (from 1) of its first line.

    A line longer than ``LONGEST_LINE`` is cut, which makes it invalid. Lines are numbered across all parts.
    The head of a part that continues the previous part is replaced by empty lines. After lost lines, the head
    is kept, because only the head lists the requests present.

    Args:
        path: Path of the trace, which is one file or several parts.
        options: Options; a chunk has about ``chunk_bytes``, and ``progress`` is called after each chunk.
    """

    path: Path
    options: ReadOptions = READ
    cut_off: bool = field(default=False, init=False)
    """Whether text follows the last newline, or the last frame of a part is incomplete."""
    left_out: bool = field(default=False, init=False)
    """Whether there are parts that were not requested."""
    broken_frames: int = field(default=0, init=False)
    """Number of frames that cannot be decompressed, in all parts."""
    dropped: list[str] = field(default_factory=list, init=False)
    """Sentence for each part, or rest of a part, that is not used."""
    begun_anew: list[tuple[int, int]] = field(default_factory=list, init=False)
    """Number of the first step after each loss of lines, and the time in microseconds at which the head after
    the loss lists the requests present."""
    contents: dict[str, Content] = field(default_factory=dict, init=False)
    """Size and hash of each file that was read to its end, by name."""
    _read: int = field(default=0, init=False)
    _total: int = field(default=0, init=False)
    """Total bytes of the file or parts."""

    def __iter__(self) -> Iterator[tuple[int, list[bytes]]]:
        """Read the file, or one part after the other."""
        number = 1
        with ThreadPoolExecutor(1) as beside:
            for lines in self._parts(beside) if is_in_parts(self.path) else self._plain(beside):
                yield number, lines
                number += len(lines)

    def _plain(self, beside: ThreadPoolExecutor) -> Iterator[list[bytes]]:
        """Yield the lines of a plain file, in chunks."""
        self._total = file_size(self.path)
        with reading(self.path):
            yield from self._whole_lines(self.path, self._blocks(self.path, beside))

    def _parts(self, beside: ThreadPoolExecutor) -> Iterator[list[bytes]]:
        """Yield the lines of each part in order; small parts are joined into larger chunks.

        Raises:
            InputError: If there is no part, or the last part cannot be read.
        """
        parts = parts_of(self.path)
        files = last_of(parts.files, self.options.last_us)
        if not files:
            raise InputError(_unreadable(self.path, FileNotFoundError(ENOENT, os.strerror(ENOENT))))
        self._total = sum(map(file_size, files))
        self.left_out = len(files) < len(parts.files)
        self.dropped = list(parts.left_out)
        joint, gathered, size = Joint(parts), list[bytes](), 0
        oversized = []
        for path in files:
            frames = ZstdFrames()
            joint.begin(path)
            blocks = frames.blocks(self._blocks(path, beside), self.options.chunk_bytes)
            try:
                for lines in self._whole_lines(path, blocks):
                    gathered += joint.joint_lines(lines)
                    size += sum(map(len, lines)) + len(lines)
                    if size >= self.options.chunk_bytes:
                        yield gathered
                        gathered, size = [], 0
            except FileNotFoundError as error:
                if path == files[-1]:
                    raise InputError(_unreadable(path, error)) from error
                continue  # the oldest parts go while they are read
            self.cut_off = self.cut_off or frames.cut
            joint.end_part(path, lacks=self.cut_off or frames.broken > 0 or frames.oversized)
            self.broken_frames += frames.broken
            oversized += [path.name] if frames.oversized else []
        if gathered:
            yield gathered
        self.begun_anew = joint.begun_anew
        if oversized:
            self.dropped.append(f"{named_files(oversized)}: {TOO_LARGE}")

    def _whole_lines(self, path: Path, blocks: Iterable[bytes]) -> Iterator[list[bytes]]:
        """Yield the whole lines of one file, in chunks.

        Raises:
            FileNotFoundError: If the file does not exist any more.
            InputError: If the file cannot be read.
        """
        begun, size = [b""], 0
        with reading(path, missing=True):
            for block in blocks:
                *lines, end = block.split(b"\n")
                if not lines:
                    begun += [end] if size < LONGEST_LINE else []
                    size += len(end)
                    continue
                lines[0] = b"".join([*begun, lines[0]])
                begun, size = [end], len(end)
                yield lines
        self.cut_off = any(begun)

    def _blocks(self, path: Path, beside: ThreadPoolExecutor) -> Iterator[bytes]:
        """Yield blocks of bytes; hash large blocks in another thread at the same time."""
        hashed = hashlib.blake2b(digest_size=16)
        size = 0
        with opened(path) as file:
            pending: Future[None] | None = None
            while block := file.read(self.options.chunk_bytes):
                if pending is not None:
                    pending.result()
                if len(block) < SMALL_BLOCK:
                    hashed.update(block)
                else:
                    pending = beside.submit(hashed.update, block)
                size += len(block)
                self._read += len(block)
                yield block
                if self.options.progress is not None:
                    self.options.progress(self._read, max(self._read, self._total))
            if pending is not None:
                pending.result()
        self.contents[path.name] = Content(size, hashed.hexdigest())


SMALL_BLOCK = 2**16
"""Number of bytes up to which hashing in the same thread is faster than in another one."""


def file_size(path: Path) -> int:
    """Return a file's size in bytes; 0 if it is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class KnownSettings(msgspec.Struct):
    """Settings with the names and types of vLLM's ``SchedulerConfig``; its other fields are not checked."""

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


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for bytes that are not valid JSON of a trace; the last is raised for deeply
nested brackets."""
HUGE_NUMBER = re.compile(rb"[:\[,]\s*-?\d{19}")
"""Pattern of integers of 19 or more digits: no count or time is so large, and Polars cannot hold them all.
"""
LARGEST = 10**18
"""Bound below which counts and times fit into Polars' integers."""
LONGEST_US = 10**15
"""Longest time since the beginning of a trace, in microseconds: 31 years."""
ANCHOR_US = msgspec.Meta(ge=0, lt=10**16)
"""Bounds of times on the machine's clocks, in microseconds; in nanoseconds, as for viewers, they fit into 64
bits."""


def readable_struct(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return the struct into which a reader decodes lines: it accepts more words and fewer numbers.

    It accepts words that the format's literals do not name, because newer versions may write them, and
    refuses numbers too large for Polars.
    """
    fields: list[Any] = []
    for each in msgspec.structs.fields(struct):
        largest = LONGEST_US if each.name.endswith("_us") else LARGEST
        is_anchor = each.name.endswith("_anchor_us")
        hint = _readable(each.type, ANCHOR_US if is_anchor else msgspec.Meta(gt=-largest, lt=largest))
        if each.required:
            fields.append((each.name, hint))
        elif each.default is msgspec.NODEFAULT:
            fields.append((each.name, hint, msgspec.field(default_factory=each.default_factory)))
        else:
            fields.append((each.name, hint, each.default))
    config = struct.__struct_config__
    return msgspec.defstruct(
        struct.__name__,
        fields,
        tag_field=config.tag_field,
        tag=config.tag,
        kw_only=True,
        gc=False,
        array_like=config.array_like,
        omit_defaults=config.omit_defaults,
    )


def _readable(hint: Any, bounds: msgspec.Meta) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {types.UnionType, Union}:
        return Union[tuple(_readable(argument, bounds) for argument in arguments)]  # noqa: UP007  # made at run time
    if origin is Literal:
        return str
    if origin is list:
        return list[_readable(arguments[0], bounds)]  # type: ignore[misc]  # made at run time
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return readable_struct(hint)
    return Annotated[int, bounds] if hint is int else hint


AS_READ = {line: readable_struct(line) for line in (Header, Step, Delta, Output, Events, Cpu, Notice, End)}
"""Struct into which each kind of line is read."""
_decode = msgspec.json.Decoder(Union[tuple(AS_READ.values())]).decode  # noqa: UP007  # made at run time


def read_lines(lines: list[bytes], first: int, problems: Problems) -> dict[type[msgspec.Struct], list[Any]]:
    """Return the lines of each kind, in their order.

    Deltas count as steps. None stands for each line that a delta cannot continue: a broken line, which may
    have been a step, or a further header.

    Args:
        lines: Some lines of a trace, not its header.
        first: Number of the first line.
        problems: Object that receives the numbers of broken lines.
    """
    by_kind: dict[type[msgspec.Struct], list[Any]] = {kind: [] for kind in AS_READ.values()}
    header = AS_READ[Header]
    steps = by_kind[AS_READ[Delta]] = by_kind[AS_READ[Step]]
    for number, line in enumerate(lines, start=first):
        if not line:
            continue
        try:
            read = _decode(line)
        except UNREADABLE:
            problems.garbled_lines.append(number)
            steps.append(None)
        else:
            by_kind[type(read)].append(read)
            if type(read) is header:
                steps.append(None)
    return {kind: by_kind[as_read] for kind, as_read in AS_READ.items()}


def decode_line(line: bytes) -> Any:
    """Return a decoded line; None if it is broken."""
    try:
        return _decode(line)
    except UNREADABLE:
        return None


def read_header(path: Path, lines: list[bytes]) -> Header:
    """Decode the header, which is the first line.

    Raises:
        InputError: If the line is not a header, is broken, or has a newer schema.
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
        settings = {name: header.scheduler_config.get(name) for name in KnownSettings.__struct_fields__}
        msgspec.convert(settings, KnownSettings)  # vLLM cannot have written a setting of another type
    except UNREADABLE as error:
        msg = f"{path}:1: broken header ({error})"
        raise InputError(msg) from error
    if HUGE_NUMBER.search(lines[0]):
        msg = f"{path}:1: broken header (a number in it is too large)"
        raise InputError(msg)
    return header
