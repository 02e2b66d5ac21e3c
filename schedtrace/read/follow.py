"""Reader of the last minutes of a growing trace; it reads only new lines and never locks the file."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from schedtrace.errors import InputError
from schedtrace.model.delta import Delta
from schedtrace.model.manifest import is_in_parts
from schedtrace.model.trace import Cpu, End, Events, Header, Notice, Output, ScheduledRequest, Step
from schedtrace.read.chain import Chain
from schedtrace.read.growing import (
    GAP,
    Growing,
    GrowingFile,
    GrowingParts,
    Live,
    LiveRequests,
    arrivals_of,
    earlier,
    entries_in,
    first_trace_line,
    present_of,
    still_there,
)
from schedtrace.read.lines import AS_READ, decode_line, read_header, reading
from schedtrace.read.problems import Problems, gaps_of
from schedtrace.read.tables import (
    EVENTS,
    FLAT,
    LISTS,
    STRETCHES,
    cpu_times,
    entries_of,
    event_rows,
    frame_of,
    present_in,
    stalls_in,
)
from schedtrace.read.trace import Trace, about_the_recorder, merge_outputs, side_tables, unseen_requests

MOST_STALLS = 64
"""Maximum number of recent stall lines that are kept."""
_KINDS = {as_read: line for line, as_read in AS_READ.items()}


@dataclass
class Chunk:
    """Lines of a trace that were read together."""

    lives: list[Live]
    """Requests that were alive before the chunk."""
    steps: pl.DataFrame
    tables: dict[str, pl.DataFrame]
    """Tables named in ``read.tables.LARGE``."""
    events: dict[str, pl.DataFrame]
    """Tables named in ``read.tables.EVENTS``."""
    present: pl.DataFrame
    """Result of ``tables.present_in``, with all entries."""
    begun_anew: list[tuple[int, int]]
    """Losses of lines, as in ``lines.WholeLines.begun_anew``."""
    dropped: list[Any]
    """``events`` lines that report dropped steps."""
    cpu: list[Any]
    lines: list[bytes]
    first: Step | None
    """First step of the chunk, in full."""
    first_line: int
    """Index of the first step's line in ``lines``."""
    last_us: int


@dataclass
class _Taken:
    """Decoded content of some lines."""

    lines: dict[type, list[Any]] = field(default_factory=lambda: {kind: [] for kind in AS_READ})
    begun_anew: list[tuple[int, int]] = field(default_factory=list)
    first_requests: list[ScheduledRequest] | None = None
    """Requests of the first step."""
    first_line: int = 0


def require_header(path: Path) -> None:
    """Raise InputError for a file that is not a trace and will not become one by growing."""
    with reading(path):
        head, whole = first_trace_line(path)
    if whole:
        read_header(path, [head])


class Following:
    """The trace of one engine, which may still grow.

    Args:
        path: Path of the trace, which is one file or several parts.
        keep_us: Length in microseconds of the period to keep, which ends with the last step.

    Raises:
        InputError: If the trace cannot be opened.
    """

    def __init__(self, path: Path, keep_us: int) -> None:
        self.path, self._keep_us = path, keep_us
        self.header: Header | None = None
        """Header of the trace; None if its first line has not been written yet."""
        self.notices: list[str] = []
        self.end: End | None = None
        """End line; None unless the engine was shut down properly."""
        self.newest_us = 0
        """Latest time in any line."""
        self.garbled_us: int | None = None
        """Latest time before the last line that could not be used; None if all could be used."""
        self.dropped = False
        """Whether the recorder dropped steps."""
        self.gaps = False
        """Whether steps are missing for another reason."""
        self.chunks: deque[Chunk] = deque()
        self._next_step = 0
        self._behind_gap = False
        """Whether the next ``events`` line lists the requests present after a gap."""
        self._listed_us: int | None = None
        """Time in that ``events`` line, until the first step after the gap has been read; None otherwise."""
        self._head = b""
        self._put: list[pl.DataFrame] = []
        self._chain = Chain(self._put.append)
        self._lives = LiveRequests()
        self._outputs: deque[Any] = deque(maxlen=4096)
        self._stalls: deque[Any] = deque(maxlen=MOST_STALLS)
        self._growing: Growing = (GrowingParts if is_in_parts(path) else GrowingFile)(path, keep_us)

    def close(self) -> None:
        """Close the file or parts."""
        self._growing.close()

    def trace_modified_s(self) -> float:
        """Return the Unix time of the last write."""
        return self._growing.modified_s()

    @property
    def left_out(self) -> Sequence[str]:
        """Sentence for each file that is left out of the trace, wholly or from some point on."""
        return self._growing.notes

    @property
    def lives(self) -> list[Live]:
        """Requests that are alive now, in the order of arrival."""
        return self._lives.alive_requests()

    @property
    def stalled(self) -> Any:
        """Current stall as its line describes it; None if there is none."""
        latest = self._stalls[-1].stalled if self._stalls else None
        return None if latest is None or latest.until_us is not None else latest

    def read(self) -> list[Chunk]:
        """Read the new lines; return them in chunks, without those that are already too old.

        Raises:
            LostError: If the file was removed, replaced or truncated.
            InputError: If the file is not a trace, or cannot be read.
        """
        with reading(self.path):
            if self.header is None:
                if (begun := self._growing.begin(self._lives)) is None:
                    return []
                self._head, earlier_notices = begun
                self.header = read_header(self.path, [self._head])
                self.notices = [*self.header.notices, *earlier_notices]
            new = 0
            for lines in self._growing.lines():
                self.chunks.append(self._chunk(lines))
                new += 1
                while len(self.chunks) > 1 and self.chunks[0].last_us < self.newest_us - self._keep_us:
                    self.chunks.popleft()
        return list(self.chunks)[-new:] if new else []

    def trace(self, chunks: list[Chunk]) -> Trace:
        """Return the trace of consecutive chunks, with the requests that were present before the first."""
        if self.header is None:
            msg = f"{self.path}: no header"
            raise InputError(msg)
        lives = chunks[0].lives if chunks else []
        arrivals, stretches, preempted = earlier(lives)
        tables = {
            name: pl.concat(
                [*([before] if before is not None else []), *(chunk.tables[name] for chunk in chunks)]
            )
            for name in (STRETCHES, *LISTS)
            for before in [{STRETCHES: stretches, "preempted": preempted}.get(name)]
        }
        events = {
            name: pl.concat([chunk.events[name] for chunk in chunks], how="diagonal") for name in EVENTS
        }
        steps = merge_outputs(pl.concat([chunk.steps for chunk in chunks]), list(self._outputs))
        begun_anew = [step for chunk in chunks for step in chunk.begun_anew]
        gaps = gaps_of(steps, begun_anew, [line for chunk in chunks for line in chunk.dropped])
        listed = pl.concat([chunk.present for chunk in chunks])
        present = pl.concat([still_there(lives), listed])
        return Trace(
            path=self.path,
            header=self.header,
            steps=steps,
            large={name: table.lazy().set_sorted("step") for name, table in tables.items()},
            arrivals=pl.concat([arrivals, events["arrived"]], how="diagonal"),
            finishes=events["finished"],
            present=unseen_requests(present, pl.concat([arrivals, events["arrived"]], how="diagonal"), steps),
            gaps=gaps,
            there_after=listed.filter(pl.col("at_us").is_in(gaps["told_us"].drop_nulls().implode())),
            notices=self.notices,
            end=self.end,
            problems=Problems(),
            cpu=cpu_times([line for chunk in chunks for line in chunk.cpu]),
            stalls=stalls_in(self._stalls),
            **side_tables(events),
        )

    def since(self, us: int) -> list[Chunk]:
        """Return the chunks with steps that began at or after this time; at least the last chunk."""
        chunks = [chunk for chunk in self.chunks if chunk.last_us >= us]
        return chunks or list(self.chunks)[-1:]

    def saved(self, us: int) -> bytes:
        """Return a trace file's content: the steps from about this time on, and the requests waiting then."""
        chunks = [chunk for chunk in self.since(us) if chunk.first is not None]
        if not chunks or chunks[0].first is None:
            return self._head + b"\n"
        began, *later = chunks
        first = chunks[0].first
        before = Events(
            at_us=first.start_us,
            trial=first.trial,
            present=[
                *present_of(began.lives),
                *entries_in(began.present.unique("request_id", keep="first", maintain_order=True)),
            ],
            arrived=arrivals_of(began.lives),
        )
        after = began.lines[began.first_line + 1 :] + [line for chunk in later for line in chunk.lines]
        encode = msgspec.json.encode
        head = msgspec.json.decode(self._head)
        head["notices"] = [*self.notices, f"saved by schedtrace watch: it begins at step {first.step}"]
        head["first_step"] = first.step
        lines = [
            encode(head),
            *([encode(before)] if before.present or before.arrived else []),
            encode(first),
            *after,
        ]
        return b"".join(line + b"\n" for line in lines if line)

    def _chunk(self, lines: list[bytes]) -> Chunk:
        lives = self._lives.alive_requests()
        taken = _Taken()
        self._chain.forget()
        for place, line in enumerate(lines):
            if line:
                self._take(line, place, taken)
        self._chain.running.cut()
        columns, first = self._chain.pop_columns(), None
        if taken.first_requests is not None:
            values = {name: column[0] for name, column in columns.items()}
            first = Step(**values, requests=taken.first_requests)
        order = sorted(range(len(columns["step"])), key=columns["step"].__getitem__)
        columns = {name: [column[place] for place in order] for name, column in columns.items()}
        tables = {name: entries_of(columns, name) for name in LISTS}
        stretches = pl.concat(self._put)
        tables[STRETCHES] = stretches if self._chain.in_order else stretches.sort("step", "order")
        self._put.clear()
        idle = taken.lines[Events]
        events = {name: event_rows(name, entries_of(columns, name).drop("start_us"), idle) for name in EVENTS}
        self.notices += about_the_recorder(taken.lines[Notice])
        self._stalls.extend(line for line in taken.lines[Notice] if line.stalled is not None)
        self._outputs.extend(taken.lines[Output])
        steps = frame_of(columns, FLAT)
        return Chunk(
            lives=lives,
            steps=steps,
            tables=tables,
            events=events,
            present=present_in(idle, keep="all"),
            begun_anew=taken.begun_anew,
            dropped=[line for line in idle if line.dropped_steps],
            cpu=taken.lines[Cpu],
            lines=lines,
            first=first,
            first_line=taken.first_line,
            last_us=self.newest_us,
        )

    def _take(self, line: bytes, place: int, taken: _Taken) -> None:
        if line == GAP:  # who is there then is told next
            self.gaps, self._lives, self._behind_gap = True, LiveRequests(), True
            self._chain.take(None)
            return
        read = decode_line(line)
        kind = None if read is None else _KINDS[type(read)]
        if kind in {None, Header}:
            self.garbled_us = self.newest_us
            self._chain.take(None)
        elif kind in {Step, Delta}:
            self._step(read, place, taken)
        elif kind is not None:
            taken.lines[kind].append(read)
            self.newest_us = max(self.newest_us, getattr(read, "at_us", 0))
            if kind is Events:
                if self._behind_gap:
                    self._listed_us, self._behind_gap = read.at_us, False
                self._lives.were_there(read.at_us, read.present)
                self._lives.note_changes(read.arrived, read.finished)
                self.dropped |= read.dropped_steps > 0
                self._next_step += read.dropped_steps if self._next_step else 0
            if kind is End:
                self.end = msgspec.convert(read, End, from_attributes=True)

    def _step(self, read: Any, place: int, taken: _Taken) -> None:
        is_taken = self._chain.take(read)
        self.gaps |= not is_taken or read.step > self._next_step > 0
        self._next_step = max(self._next_step, read.step + 1)
        if not is_taken:
            self.garbled_us = self.newest_us
            return
        if self._listed_us is not None:
            taken.begun_anew.append((read.step, self._listed_us))
            self._listed_us = None
        self._lives.step(read.start_us, read.arrived, read.finished, read.preempted)
        rows = read.requests if hasattr(read, "requests") else read.changes.added if read.changes else ()
        self._lives.scheduled([row.request_id for row in rows])
        self.newest_us = max(self.newest_us, read.start_us, read.output_us or 0)
        if taken.first_requests is None:
            rows = self._chain.running.request_rows()
            taken.first_requests = [ScheduledRequest(*row) for row in rows]
            taken.first_line = place
