"""Reader of the bytes of a growing trace, in one file or in consecutive parts.

Lines older than the window are only skimmed, to determine which requests are alive when the window begins,
and which of them wait (``LiveRequests``).
"""

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from schedtrace.errors import InputError
from schedtrace.model.manifest import files_of, is_in_parts
from schedtrace.model.safe_files import descriptor
from schedtrace.model.trace import Arrival, Finish, Preemption, Present
from schedtrace.read.decompress import TOO_LARGE, ZstdFrames
from schedtrace.read.lines import LONGEST_LINE, UNREADABLE, decode_line, readable_struct, reading
from schedtrace.read.part_files import Joint, decode_head, head_of, parts_of
from schedtrace.read.tables import STRETCH_SCHEMA, structs_of

CAME, LOST, RUNS = -3, -2, -1
"""Step numbers before the window's first step, for the arrival, the preemption and the admission of requests
that came earlier."""


@dataclass(frozen=True, slots=True)
class Live:
    """Request that has arrived and has not left, with its history."""

    entry: Any
    """``Arrival`` of the request as read, or its ``Present`` if it was present when the trace began."""
    waits_since_us: int | None
    """Time at which the request entered the waiting queue, as far as recorded; None if it runs."""
    preempted: int = 0
    """Number of preemptions of the request so far."""
    lost_tokens: int = 0
    """Largest number of tokens that a preemption discarded."""
    there_us: int | None = None
    """Time at which the trace began, if the request was present then; None if it arrived later."""


class LiveRequests:
    """Tracker of the requests that are alive, updated from step to step."""

    def __init__(self) -> None:
        self.alive: dict[str, Live] = {}
        """Requests that are alive, by id, in the order of arrival."""

    def step(
        self, start_us: int, arrived: Iterable[Any], finished: Iterable[Any], preempted: Iterable[Any]
    ) -> None:
        """Apply a step's line: requests that arrived, finished or were preempted."""
        self.note_changes(arrived, finished)
        for preemption in preempted:
            if (live := self.alive.get(preemption.request_id)) is not None:
                lost = max(live.lost_tokens, preemption.lost_tokens)
                self.alive[preemption.request_id] = replace(
                    live, waits_since_us=start_us, preempted=live.preempted + 1, lost_tokens=lost
                )

    def note_changes(self, arrived: Iterable[Any], finished: Iterable[Any]) -> None:
        """Apply arrivals and departures."""
        for arrival in arrived:
            if not arrival.streaming_update:
                self.alive[arrival.request_id] = Live(arrival, arrival.queued_us)
        for request in finished:
            self.alive.pop(request.request_id, None)

    def were_there(self, at_us: int, present: Iterable[Any]) -> None:
        """Add the requests that were present when the trace began."""
        for request in present:
            since = None if request.state == "running" else at_us
            if request.state == "waiting" and request.queued_us is not None:
                since = request.queued_us
            preempted = request.num_preemptions or int(request.state == "preempted")
            self.alive[request.request_id] = Live(request, since, preempted, request.lost_tokens, at_us)

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """Mark these requests as running."""
        for name in request_ids:
            live = self.alive.get(name)
            if live is not None and live.waits_since_us is not None:
                self.alive[name] = replace(live, waits_since_us=None)

    def alive_requests(self) -> list[Live]:
        """Return a copy of the requests that are alive now."""
        return list(self.alive.values())


def earlier(lives: list[Live]) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Return arrivals, stretches and preemptions that recreate the state of these requests before a window.

    Only requests whose arrival is recorded are included; ``still_there`` returns those that were present when
    the trace began. The added steps have negative numbers and schedule nothing. They contain only what later
    steps depend on: which requests ran, which waited, and how many tokens a preemption discarded. A request
    that waits after a preemption arrives as an update, because the arrival of a new request would count as a
    second wait.
    """
    lives = [live for live in lives if live.there_us is None]
    queued_again = [live for live in lives if live.preempted and live.waits_since_us is not None]
    in_order = [live for live in lives if not live.preempted or live.waits_since_us is None]
    records = [live.entry for live in in_order]
    records += [msgspec.structs.replace(live.entry, streaming_update=True) for live in queued_again]
    arrivals = structs_of(records, Arrival).select(
        pl.lit(CAME, pl.Int64).alias("step"), pl.lit(None, pl.Int64).alias("trial"), pl.all()
    )
    rows = [
        (RUNS, RUNS, None, live.entry.request_id, 0, 0, "resumed" if live.preempted else "new", 0, 0)
        for live in in_order
        if live.waits_since_us is None
    ]
    stretches = pl.DataFrame(rows, schema=STRETCH_SCHEMA, orient="row")
    again = [*queued_again, *(live for live in in_order if live.preempted)]
    lost = [Preemption(live.entry.request_id, live.lost_tokens) for live in again]
    preempted = structs_of(lost, Preemption).select(
        pl.lit(LOST, pl.Int64).alias("step"),
        pl.lit(None, pl.Int64).alias("trial"),
        pl.lit(None, pl.Int64).alias("start_us"),
        pl.all(),
    )
    return arrivals, stretches, preempted


def arrivals_of(lives: list[Live]) -> list[Arrival]:
    """Return the arrivals of the waiting requests that arrived since the trace began, in its format."""
    waiting = [live.entry for live in lives if live.there_us is None and live.waits_since_us is not None]
    return [msgspec.convert(record, Arrival, from_attributes=True) for record in waiting]


def still_there(lives: list[Live]) -> pl.DataFrame:
    """Return the requests that were present when the trace began and still are, in their current state."""
    there = [live for live in lives if live.there_us is not None]
    times = [live.there_us if live.waits_since_us is None else live.waits_since_us for live in there]
    return structs_of([_now(live) for live in there], Present).select(
        pl.Series("at_us", times, pl.Int64), pl.lit(None, pl.Int64).alias("trial"), pl.all()
    )


def present_of(lives: list[Live]) -> list[Present]:
    """Return the requests that were present when the trace began and still are, in the trace's format."""
    return [_now(live) for live in lives if live.there_us is not None]


def entries_in(present: pl.DataFrame) -> list[Present]:
    """Convert rows of ``tables.present_in`` back to entries of the trace's format."""
    return [Present(**row) for row in present.drop("at_us", "trial").to_dicts()]


def _now(live: Live) -> Present:
    """Return the current state of a request that was present when the trace began, less its later tokens."""
    was: Present = msgspec.convert(live.entry, Present, from_attributes=True)
    runs = live.waits_since_us is None
    return msgspec.structs.replace(
        was,
        state="running" if runs else "preempted" if live.preempted else "waiting",
        computed_tokens=was.prompt_tokens + was.output_tokens if runs else 0,
        lost_tokens=live.lost_tokens,
        num_preemptions=live.preempted,
    )


NOTICE = b'{"type":"notice"'
SKIM_BLOCK = 2**23
FULL = b'{"type":"step"'
TELLING = (b'"present":[', b'"arrived":[', b'"finished":[', b'"preempted":[', b'"added":[')
"""Field names to search for in raw lines; a request id cannot contain them, because its quotes are escaped.
"""


def _named_in_lines() -> type[msgspec.Struct]:
    """Return a struct for the parts of a line that name requests and say what happened to them."""
    named: Any = msgspec.defstruct("Named", [("request_id", str)], gc=False)
    changes: Any = msgspec.defstruct("Changes", [("added", list[named], [])], gc=False)
    fields: list[Any] = [
        ("start_us", int, 0),
        ("at_us", int, 0),
        ("requests", list[named], []),
        ("changes", changes | None, None),
    ]
    kinds: dict[str, type[msgspec.Struct]] = {
        "present": Present,
        "arrived": Arrival,
        "finished": Finish,
        "preempted": Preemption,
    }
    for name, kind in kinds.items():
        entry: Any = readable_struct(kind)
        fields.append((name, list[entry], []))
    return msgspec.defstruct("NamedRequests", fields, kw_only=True, gc=False)


_decode = msgspec.json.Decoder(_named_in_lines()).decode


def skim(file: int, at: int, size: int, keep_us: int, lives: LiveRequests) -> tuple[int, list[str]]:
    """Return the position from which to read a trace, and the notices in the lines before it.

    The position is that of the last full line at least ``keep_us`` before the latest full line, or the
    beginning of the trace.

    Args:
        file: Descriptor of the file.
        at: Offset at which the second line begins.
        size: Offset up to which to read.
        keep_us: Length in microseconds of the period to read, which ends with the latest full line.
        lives: Tracker that receives the arrivals and departures before that position.
    """
    full: deque[tuple[int, int]] = deque()
    events: deque[tuple[int, Any]] = deque()
    notices, begun, begin = [], b"", at
    while at + len(begun) < size and (
        block := os.pread(file, min(SKIM_BLOCK, size - at - len(begun)), at + len(begun))
    ):
        *lines, begun = (begun + block).split(b"\n")
        if len(begun) > LONGEST_LINE:  # no line of a trace
            lines, begun = [*lines, begun], b""
        for line in lines:
            if line.startswith(NOTICE):
                notice = decode_line(line)
                notices += [(at, notice.message)] if getattr(notice, "stalled", notice) is None else []
            elif any(key in line for key in TELLING) or line.startswith(FULL):
                _take(line, at, full, events)
            at += len(line) + 1
        while len(full) > 1 and full[1][1] <= full[-1][1] - keep_us:
            full.popleft()
            begin = full[0][0]
        while events and events[0][0] < begin:
            read = events.popleft()[1]
            lives.were_there(read.at_us, read.present)
            lives.step(read.start_us, read.arrived, read.finished, read.preempted)
            admitted = read.changes.added if read.changes else []
            lives.scheduled([row.request_id for row in (*read.requests, *admitted)])
    return begin, [text for place, text in notices if place < begin]


def _take(line: bytes, at: int, full: deque[tuple[int, int]], events: deque[tuple[int, Any]]) -> None:
    try:
        read: Any = _decode(line)
    except UNREADABLE:
        return
    if line.startswith(FULL):
        full.append((at, read.start_us))
    events.append((at, read))


BLOCK = 2**20
PART_BLOCK = 2**16
"""Compressed bytes of a part that are read at once."""
GAP = b'{"type":"gap"}'
"""Line that is yielded in place of missing parts; no recorder writes such a line."""


class LostError(InputError):
    """Error: reading cannot continue, because the file was removed, replaced or truncated."""


class Growing(ABC):
    """Reader of the new lines of a trace.

    Args:
        path: Path of the trace, which is one file or several parts.
        keep_us: Length in microseconds of the period to read, which ends with the last step; older lines may
            be left out.

    Raises:
        InputError: If the file cannot be opened.
    """

    _file: int
    """Descriptor of the file being read."""
    notes: Sequence[str] = ()
    """Sentence for each file that is left out of this trace, wholly or from some point on."""

    @abstractmethod
    def begin(self, lives: LiveRequests) -> tuple[bytes, list[str]] | None:
        """Return the header's line and the notices in skipped lines; None if the header is incomplete.

        Args:
            lives: Tracker that receives the arrivals and departures in skipped lines.
        """

    @abstractmethod
    def lines(self) -> Iterator[list[bytes]]:
        """Yield the new lines, up to the last newline.

        Raises:
            LostError: If the file was removed, replaced or truncated.
            OSError: If the file cannot be read.
        """

    @abstractmethod
    def modified_s(self) -> float:
        """Return the Unix time of the last write."""

    def close(self) -> None:
        """Close the file or the current part."""
        os.close(self._file)


class GrowingFile(Growing):
    """Reader of a single growing file."""

    def __init__(self, path: Path, keep_us: int) -> None:
        self._path, self._keep_us, self._at = path, keep_us, 0
        with reading(path):
            self._file = descriptor(path)

    def begin(self, lives: LiveRequests) -> tuple[bytes, list[str]] | None:
        """Read the header, and skim the lines that are too old."""
        size = self._checked_size()
        head, newline, _ = os.pread(self._file, BLOCK, 0).partition(b"\n")
        if not newline:
            return None
        self._at, notices = skim(self._file, len(head) + 1, size, self._keep_us, lives)
        return head, notices

    def lines(self) -> Iterator[list[bytes]]:
        """Yield blocks of new complete lines; the recorder may still remove a line without a newline."""
        size, begun = self._checked_size(), b""
        while left := size - self._at - len(begun):
            block = os.pread(self._file, min(BLOCK, left), self._at + len(begun))
            if not block:
                return
            *lines, begun = (begun + block).split(b"\n")
            self._at += sum(map(len, lines)) + len(lines)
            if len(begun) > LONGEST_LINE:  # dropped in pieces, each of which is a broken line
                self._at += len(begun)
                lines, begun = [*lines, begun[:1]], b""
            if lines:
                yield lines

    def _checked_size(self) -> int:
        ours = os.fstat(self._file)
        try:
            now = self._path.stat()
        except FileNotFoundError:
            msg = f"{self._path}: removed while it was followed"
            raise LostError(msg) from None
        if (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino):
            msg = f"{self._path}: replaced by another file while it was followed"
            raise LostError(msg)
        if ours.st_size < self._at:
            msg = f"{self._path}: cut while it was followed"
            raise LostError(msg)
        return ours.st_size

    def modified_s(self) -> float:
        """Return the Unix time of the last write to the file that has this name now."""
        return self._path.stat().st_mtime


class GrowingParts(Growing):
    """Reader of parts, beginning with the part that was written ``keep_us`` ago."""

    def __init__(self, path: Path, keep_us: int) -> None:
        self._path = path
        parts = parts_of(path)
        self.notes: list[str] = parts.left_out
        self._listed = set(files_of(path))
        ended = [at for at, (before, _) in enumerate(pairwise(parts.files)) if _age_s(before) * 1e6 > keep_us]
        first = ended[-1] + 1 if ended else 0
        self._later = parts.files[first + 1 :]
        """Parts after the current one that have been listed so far."""
        self._joint = Joint(parts)
        self._begin_part((parts.files or [path])[first])
        self._ready: list[bytes] = []

    def _begin_part(self, part: Path) -> None:
        """Switch from the current part to this one.

        Raises:
            InputError: If the part cannot be opened; the current part is then kept.
            FileNotFoundError: If the part no longer exists.
        """
        with reading(part, missing=True):
            file = descriptor(part)
        if hasattr(self, "_part"):
            os.close(self._file)
        self._file, self._part, self._at, self._begun, self._frames = file, part, 0, b"", ZstdFrames()
        self._joint.begin(part)

    def begin(self, lives: LiveRequests) -> tuple[bytes, list[str]] | None:
        """Read the header; no line is skimmed, because every later part begins with the requests present."""
        del lives
        for lines in self._part_lines():
            head, *self._ready = lines
            return head, []
        return None

    def lines(self) -> Iterator[list[bytes]]:
        """Yield the lines of the current part and of later ones; combine those of several small parts."""
        gathered, self._ready = self._ready, []
        size = sum(map(len, gathered))
        for lines in self._read():
            gathered += lines
            size += sum(map(len, lines)) + len(lines)
            if size >= BLOCK:
                yield gathered
                gathered, size = [], 0
        if gathered:
            yield gathered
        if not os.fstat(self._file).st_nlink and not files_of(self._path):
            msg = f"{self._path}: removed while it was followed"
            raise LostError(msg)

    def _read(self) -> Iterator[list[bytes]]:
        """Yield the lines of the current part and of later ones, one part at a time."""
        while True:
            listed = files_of(self._path) if not self._later else []  # once every listed part has begun
            if new := [part for part in listed if part not in self._listed]:
                self._listed.update(new)
                parts = parts_of(self._path)
                self._later = [part for part in parts.files if part in new]
                self.notes += [note for note in parts.left_out if note not in self.notes]
            yield from self._part_lines()  # after the look: a part with a later one is complete
            if not self._later:
                return
            frames = self._frames
            frames.cut = frames.cut or bool(self._begun)
            damaged = frames.broken or frames.cut or frames.oversized or frames.in_frame
            is_whole = 0 < self._at <= os.fstat(self._file).st_size and not damaged
            self._joint.end_part(self._part, lacks=not is_whole)
            while self._later:
                try:
                    self._begin_part(self._later[0])
                except FileNotFoundError:  # it went meanwhile
                    self._later.pop(0)
                else:
                    self._later.pop(0)
                    break

    def _part_lines(self) -> Iterator[list[bytes]]:
        """Yield the lines added to the current part; ``GAP`` replaces a header after lost lines."""
        while block := os.pread(self._file, PART_BLOCK, self._at):
            self._at += len(block)
            *lines, self._begun = (self._begun + b"".join(self._frames.content(block))).split(b"\n")
            if len(self._begun) > LONGEST_LINE:
                self._begun = self._begun[:1]
            note = f"{self._part.name}: {TOO_LARGE}"
            if self._frames.oversized and note not in self.notes:
                self.notes.append(note)
            if lines:
                lines = self._joint.joint_lines(lines)
                if self._joint.kept_head:
                    lines[0] = GAP
                yield lines

    def modified_s(self) -> float:
        """Return the Unix time of the last write to the part being read."""
        return os.fstat(self._file).st_mtime


def _age_s(part: Path) -> float:
    """Return the seconds since the last write to the part."""
    with suppress(OSError):
        return time.time() - part.stat().st_mtime
    return 0.0


def first_trace_line(path: Path) -> tuple[bytes, bool]:
    """Return the first line of a trace, as far as it has been written, and whether it is complete."""
    parts = files_of(path)
    file = descriptor(parts[-1] if parts else path)
    try:
        head = os.pread(file, BLOCK, 0)
    finally:
        os.close(file)
    if is_in_parts(path):
        lines = head_of(parts[-1], 1)
        is_broken = bool(lines) and decode_head(lines[0]) is None
        header = parts_of(path).header if is_broken else b""
        return header or b"".join(lines), bool(lines)
    line, whole, _ = head.partition(b"\n")
    return line, bool(whole) or len(line) >= BLOCK
