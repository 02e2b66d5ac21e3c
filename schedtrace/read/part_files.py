"""Parts of a trace: which belong together, which are needed, and whether each continues the one before."""

import re
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path

import msgspec

from schedtrace.model.manifest import files_of, is_in_parts, part_number
from schedtrace.model.safe_files import opened
from schedtrace.read.decompress import ZstdFrames

HEAD_LINES = 2
"""Number of lines in the head of every part but the first: the header and a list of the requests present."""
LONGEST_HEAD = 2**25
"""Maximum decompressed bytes of the first lines of a part; a list of 100,000 requests takes 24 MB."""
BLOCK = 2**16
"""Compressed bytes read at once."""
_NAMED = 3
"""Maximum number of files that a sentence names."""


class _Begin(msgspec.Struct):
    at_us: int


class Begins(msgspec.Struct, tag="header", frozen=True):
    """Fields of a part's header that identify its engine and its place in the trace."""

    host: str = ""
    pid: int | None = None
    engine_rank: int = 0
    wall_anchor_us: int = 0
    monotonic_anchor_us: int | None = None
    clock_id: str | None = None
    first_step: int = 0
    notices: tuple[str, ...] = ()

    @property
    def engine(self) -> "Begins":
        """Fields that identify the engine, without those that differ from part to part."""
        return msgspec.structs.replace(self, first_step=0, notices=())

    def __str__(self) -> str:
        try:
            began = f", recorded since {datetime.fromtimestamp(self.wall_anchor_us / 1e6, UTC):%F %T} UTC"
        except (ValueError, OverflowError, OSError):
            began = ""
        return f"rank {self.engine_rank}, process {self.pid} on {self.host}{began}"


def decode_head(line: bytes) -> Begins | None:
    """Return the decoded first line of a part; None if it is not a header."""
    try:
        return msgspec.json.decode(line, type=Begins)
    except (ValueError, RecursionError):
        return None


def began_us(line: bytes) -> int | None:
    """Return the time in a part's second line, which lists the requests present; None if it does not."""
    try:
        return msgspec.json.decode(line, type=_Begin).at_us
    except (ValueError, RecursionError):
        return None


@dataclass
class TraceParts:
    """The files of a trace that one engine wrote, in the order of their steps."""

    files: list[Path]
    header: bytes = b""
    """Line of the first readable header."""
    left_out: list[str] = field(default_factory=list)
    """Sentences about parts that are left out: one for each other engine, and one for copies."""
    in_order: bool = True
    """Whether the numbers in the files' names follow the order of the steps."""


def parts_of(path: Path) -> TraceParts:
    """Return the parts of a trace that belong together: those of the engine that wrote most of the files.

    A part's place is taken from its header, because files may have been renamed. A part with a broken header
    follows the previous part.
    """
    files = files_of(path)
    if not is_in_parts(path) or not files:
        return TraceParts(files)
    lines = {file: b"".join(head_of(file, 1)) for file in files}
    heads = {file: head for file, line in lines.items() if (head := decode_head(line)) is not None}
    written = Counter(head.engine for head in heads.values())
    if not written:
        return TraceParts(files)
    most, first = written.most_common(1)[0][0], 0
    parts, copies = TraceParts([]), _copies(heads)
    places: list[tuple[int, Path]] = []
    foreign: dict[Begins, list[str]] = defaultdict(list)
    copied: list[str] = []
    for file in files:
        head = heads.get(file)
        if head is not None and head.engine != most:
            foreign[head.engine].append(file.name)
        elif file in copies:
            copied.append(file.name)
        else:
            first = first if head is None else head.first_step
            places.append((first, file))
    parts.files = [file for _, file in sorted(places, key=lambda place: place[0])]
    parts.in_order = parts.files == [file for _, file in places]
    parts.header = next((lines[file] for file in parts.files if file in heads), b"")
    parts.left_out = [
        f"{named_files(names)}: written by another engine ({engine}) than the rest ({most}): left out, to be "
        "read in a folder of its own"
        for engine, names in foreign.items()
    ]
    if copied:
        parts.left_out.append(f"{named_files(copied)}: a copy of another part, left out")
    return parts


def named_files(names: list[str]) -> str:
    """Return a phrase that names these files; if there are many, the first few and the number of all."""
    if len(names) <= _NAMED:
        return ", ".join(names)
    return f"{len(names):,} parts ({', '.join(names[:_NAMED])}, ...)"


def _copies(heads: dict[Path, Begins]) -> dict[Path, Path]:
    """Return each file whose content equals that of an earlier file, with that earlier file."""
    alike: dict[tuple[int, int], list[Path]] = defaultdict(list)
    copies = {}
    with suppress(OSError):
        for file, head in heads.items():
            alike[head.first_step, file.stat().st_size].append(file)
        for files in alike.values():
            originals: dict[bytes, Path] = {}
            for file in files if len(files) > 1 else ():
                with file.open("rb") as source:  # its head was read: it is a regular file
                    original = originals.setdefault(file_digest(source, blake2b).digest(), file)
                if original != file:
                    copies[file] = original
    return copies


def files_for(path: Path, last_us: int | None) -> list[Path]:
    """Return the files that cover the last ``last_us`` microseconds of a trace; all files if it is None.

    The trace ends some time after its last part begins, so the parts from ``last_us`` before that beginning
    on are enough. A part whose beginning is unknown, such as one that is just being created, is read with its
    neighbours.
    """
    return last_of(parts_of(path).files, last_us)


def last_of(files: list[Path], last_us: int | None) -> list[Path]:
    """Select the files of a trace as ``files_for`` does."""
    if last_us is None or len(files) == 1:
        return files
    latest = None
    for at in reversed(range(len(files))):
        head = head_of(files[at], HEAD_LINES)
        began = began_us(head[1]) if len(head) == HEAD_LINES else None
        if began is None:  # the first part, or one whose second line does not list the requests present
            continue
        latest = began if latest is None else latest
        if began <= latest - last_us:
            return files[at:]
    return files


def head_of(part: Path, count: int) -> list[bytes]:
    """Return the first ``count`` complete lines of a part; an empty list if the part cannot be read."""
    blocks, size, newlines = [], 0, 0
    with suppress(OSError), opened(part) as file:
        for block in ZstdFrames().blocks(iter(partial(file.read, BLOCK), b""), 1):
            blocks.append(block)
            size += len(block)
            newlines += block.count(b"\n")
            if newlines >= count or size >= LONGEST_HEAD:
                break
    return b"".join(blocks).split(b"\n")[:-1][:count]


_STEP_LINE = re.compile(rb'\s*\{\s*"type"\s*:\s*"(?:step|delta)"\s*,\s*"step"\s*:\s*(\d{1,18})')


class Joint:
    """Joiner of parts: it drops the head of a part that continues the previous part and keeps other heads.

    Args:
        parts: All parts of the trace.
    """

    def __init__(self, parts: TraceParts) -> None:
        self.begun_anew: list[tuple[int, int]] = []
        self._parts = parts
        self.kept_head = False
        """Whether the latest ``joint_lines`` begin with a head that does not continue the previous part."""
        self._whole: int | None = None
        """Number of the previous part; None if there is none or it is incomplete."""
        self._last_step: int | None = None
        self._notices: set[str] = set()
        self._path = Path()
        self._lines = 0
        """Number of the current part's lines so far."""
        self._blank = 0
        """Number of the current part's first lines to make blank: its head, if it continues a part."""
        self._begins: Begins | None = None
        """Head that was kept, until its second line is read."""
        self._is_first = True

    def begin(self, path: Path) -> None:
        """Begin a part: the lines that follow belong to it."""
        self._path, self._lines, self._blank, self._begins = path, 0, 0, None

    def joint_lines(self, lines: list[bytes]) -> list[bytes]:
        """Return lines of the part as they appear in the trace."""
        self.kept_head = False
        if not self._lines:
            lines = self._begin(lines)
        elif self._lines == 1 and self._begins is not None:
            self._note(lines[0])
        blank = max(0, self._blank - self._lines)
        self._lines += len(lines)
        self._notices |= _notices(lines)
        for line in reversed(lines):
            if (match := _STEP_LINE.match(line)) is not None:
                self._last_step = int(match[1])
                break
        lines[:blank] = [b""] * len(lines[:blank])
        return lines

    def end_part(self, path: Path, *, lacks: bool) -> None:
        """Record whether the part is incomplete."""
        self._whole = None if lacks or not self._lines else part_number(path)

    def _begin(self, lines: list[bytes]) -> list[bytes]:
        head = decode_head(lines[0])
        if self._is_first:
            self._is_first = False
            if head is not None or not self._parts.header:
                return lines
            header = msgspec.json.decode(self._parts.header)  # of a later part
            steps = (int(match[1]) for line in lines if (match := _STEP_LINE.match(line)) is not None)
            first = next(steps, header.get("first_step", 0))
            header["first_step"] = first if part_number(self._path) else 0
            return [msgspec.json.encode(header), *lines]
        if head is not None and self._continues(head):
            self._blank = HEAD_LINES
        elif head is not None:
            self._begins, self.kept_head = head, True
            if len(lines) > 1:
                self._note(lines[1])
        return lines

    def _continues(self, head: Begins) -> bool:
        """Return whether nothing is missing between the previous part and a part with this header."""
        expected = self._whole is not None and (
            not self._parts.in_order or part_number(self._path) == self._whole + 1
        )
        says_so = set(head.notices) <= self._notices  # else it says itself that something was lost before
        return expected and says_so and self._last_step in {None, head.first_step - 1}

    def _note(self, line: bytes) -> None:
        """Record the time in a head's second line if that line lists the requests present."""
        at_us, head, self._begins = began_us(line), self._begins, None
        if head is not None and at_us is not None:
            self.begun_anew.append((head.first_step, at_us))


_TELLS = re.compile(rb'\s*\{\s*"type"\s*:\s*"(?:header|notice)"')


class _Notices(msgspec.Struct):
    notices: list[str] = []
    message: str = ""


def _notices(lines: list[bytes]) -> set[str]:
    """Return the notices in these headers and notice lines; broken lines are left out."""
    notices: set[str] = set()
    for line in lines:
        if _TELLS.match(line):
            with suppress(ValueError, RecursionError):
                read = msgspec.json.decode(line, type=_Notices)
                notices.update(read.notices, [read.message])
    return notices - {""}
