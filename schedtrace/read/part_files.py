"""Parts of a trace: the content of their complete zstd frames, and which parts are needed."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from zstandard import ZstdDecompressor, ZstdError

from schedtrace.model.manifest import files_of, is_in_parts
from schedtrace.model.safe_files import opened

if TYPE_CHECKING:
    from zstandard import ZstdDecompressionObj  # of its stubs

MAGIC = b"\x28\xb5\x2f\xfd"
"""First bytes of a frame (RFC 8878)."""
PIECE = 2**8
"""Bytes given to the decompressor at a time; they expand to at most 8 MiB, whatever the file contains."""
MOST_EXPANSION = 256
"""Maximum expansion of a frame; a recorder's most repetitive line reaches 140."""
TOO_LARGE = (
    f"a frame expands to more than {MOST_EXPANSION} times its size, which no recorder writes; it and what "
    "follows it in its part was dropped"
)
"""Message about a part with such a frame."""
SMALL_FRAME = 2**12
"""Number of decompressed bytes that any frame may have."""
HEAD_LINES = 2
"""Lines at the beginning of every part but the first: the header and the requests present."""
LONGEST_HEAD = 2**25
"""Maximum decompressed bytes of these lines; 100,000 requests take 24 MB."""
BLOCK = 2**16
"""Compressed bytes read at once."""
_NAMED = 3
"""Maximum number of files that a sentence names."""
_BLANK = re.compile(rb"\n\n+")


@dataclass
class ZstdFrames:
    """Decompressor of a file's frames, which gets the file block by block."""

    cut: bool = False
    """Whether the last frame is incomplete."""
    broken: int = 0
    """Number of dropped frames; a newline replaces the rest of each."""
    oversized: bool = False
    """Whether a frame expanded to more than any recorder writes; it and all that follows was dropped."""

    def __post_init__(self) -> None:
        self._frame: ZstdDecompressionObj | None = None
        self._searching = False
        self._read = self._made = 0
        """Compressed and decompressed bytes of the frame so far."""

    @property
    def is_open(self) -> bool:
        """Return whether the current frame has not ended."""
        return self._frame is not None

    def blocks(self, compressed: Iterable[bytes], least_bytes: int) -> Iterator[bytes]:
        """Yield decompressed blocks of at least this many bytes, except for the last."""
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
        self.cut = self.is_open

    def content(self, block: bytes) -> Iterator[bytes]:
        """Yield the content that a block adds, without blank lines, which no recorder writes."""
        at = 0
        while at < len(block) and not self.oversized:
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
        """Return the decompressed ``used`` bytes; a newline if the frame expands too far."""
        self._read += used
        self._made += len(content)
        if self._made <= SMALL_FRAME + MOST_EXPANSION * self._read:
            return content
        self.oversized = True
        return b"\n"


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
    """Decode the time in the second line of a part, which lists the requests present; else None."""
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
    """Sentence about the parts of each other engine, and about copies."""
    in_order: bool = True
    """Whether the numbers in the files' names follow the order of the steps."""


def parts_of(path: Path) -> TraceParts:
    """Return the parts of a trace that belong together: those of the engine that wrote most of them.

    Files may have been renamed, so a part's place is taken from its header. A part with a broken header
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
    """Return the first of these files' names, and how many there are."""
    if len(names) <= _NAMED:
        return ", ".join(names)
    return f"{len(names):,} parts ({', '.join(names[:_NAMED])}, ...)"


def _copies(heads: dict[Path, Begins]) -> dict[Path, Path]:
    """Return each file whose content equals that of an earlier file, and that earlier file."""
    alike: dict[tuple[int, int], list[Path]] = defaultdict(list)
    copies = {}
    with suppress(OSError):
        for file, head in heads.items():
            alike[head.first_step, file.stat().st_size].append(file)
        for files in alike.values():
            originals: dict[bytes, Path] = {}
            for file in files if len(files) > 1 else ():
                same = originals.setdefault(_digest(file), file)
                if same != file:
                    copies[file] = same
    return copies


def _digest(file: Path) -> bytes:
    with file.open("rb") as source:  # its head was read: it is a regular file
        return file_digest(source, blake2b).digest()


def files_for(path: Path, last_us: int | None) -> list[Path]:
    """Return the files of a trace that cover this many microseconds before its end; None for all files.

    The trace ends after its last part begins, so it is enough to go back that long from this beginning. A
    part whose beginning is unknown, such as one that is just being created, is read with its neighbours.
    """
    return last_of(parts_of(path).files, last_us)


def last_of(files: list[Path], last_us: int | None) -> list[Path]:
    """Return the files of a trace that ``files_for`` selects."""
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
    """Return a part's beginning from its second line; None for the first part, or without such a line."""
    lines = head_of(part, HEAD_LINES)
    return began_us(lines[1]) if len(lines) == HEAD_LINES else None


def head_of(part: Path, count: int) -> list[bytes]:
    """Return the first complete lines of a part; none if the part cannot be read."""
    blocks, size, newlines = [], 0, 0
    with suppress(OSError), opened(part) as file:
        for block in ZstdFrames().blocks(iter(partial(file.read, BLOCK), b""), 1):
            blocks.append(block)
            size += len(block)
            newlines += block.count(b"\n")
            if newlines >= count or size >= LONGEST_HEAD:
                break
    return b"".join(blocks).split(b"\n")[:-1][:count]
