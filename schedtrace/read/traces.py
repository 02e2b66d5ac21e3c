"""Traces of a run, each read on demand, because all ranks of a large run hardly fit in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from schedtrace.errors import InputError
from schedtrace.model.trace import Header
from schedtrace.model.trace_names import is_trace
from schedtrace.read.kinds import TRACE, Reader, kind_of, refusal
from schedtrace.read.lines import READ, ReadOptions, WholeLines, decode_line, read_header
from schedtrace.read.trace import Trace, read_trace


def read_record(path: Path, options: ReadOptions = READ) -> list[Trace]:
    """Read a file of any kind; return one trace per engine.

    Raises:
        InputError: If it is of no kind that is read, or cannot be read.
    """
    kind = kind_of(path)
    if kind is not None and kind.reader is not None:
        return kind.reader(path)
    if kind is TRACE or is_trace(path):
        return [read_trace(path, options)]
    msg = f"{path}: {refusal(kind)}"
    raise InputError(msg)


def foreign_reader(path: Path) -> Reader | None:
    """Return the reader of this file if it is a foreign log.

    Raises:
        InputError: If it cannot be read.
    """
    kind = kind_of(path)
    return None if kind is None else kind.reader


_ONE_LINE = ReadOptions(chunk_bytes=2**16)
"""Options for reading a single line of a file."""


@dataclass(frozen=True)
class _Unread:
    """Trace of schedtrace of which only the header has been read."""

    path: Path
    header: Header
    options: ReadOptions

    def read(self) -> Trace:
        return read_trace(self.path, self.options)


class Traces(Sequence[Trace]):
    """Traces in the order of data-parallel ranks.

    Indexing keeps the trace; ``once`` reads it without keeping it, except for the first, which is needed
    often.
    """

    def __init__(self, traces: Sequence[Trace | _Unread]) -> None:
        self._traces = list(traces)

    @property
    def headers(self) -> list[Header]:
        """Headers of all traces, read or not."""
        return [trace.header for trace in self._traces]

    def once(self, place: int) -> Trace:
        """Return this trace without keeping it; asking for it again reads it again.

        Raises:
            InputError: If it cannot be read.
        """
        trace = self._traces[place]
        if isinstance(trace, Trace):
            return trace
        return self[0] if place == 0 else trace.read()

    def __len__(self) -> int:
        return len(self._traces)

    @overload
    def __getitem__(self, place: int) -> Trace: ...
    @overload
    def __getitem__(self, place: slice) -> list[Trace]: ...
    def __getitem__(self, place: int | slice) -> Trace | list[Trace]:
        if isinstance(place, slice):
            return [self[index] for index in range(len(self))[place]]
        trace = self._traces[place]
        if isinstance(trace, _Unread):
            trace = self._traces[place] = trace.read()
        return trace


def traces_of(files: Sequence[Path], options: ReadOptions = READ) -> tuple[Traces, list[str]]:
    """Return the traces in these files, and a sentence for each unreadable file among several.

    If there are several traces of schedtrace, only their headers are read here.

    Raises:
        InputError: If nothing is understood of any of them, or two are of one rank.
    """
    if len(files) == 1:
        return Traces(read_record(files[0], options)), []
    traces: list[Trace | _Unread] = []
    left_out: list[InputError] = []
    for file in files:
        try:
            header = _header(file)
            traces += read_record(file, options) if header is None else [_Unread(file, header, options)]
        except InputError as error:
            left_out.append(error)
    if not traces:
        raise left_out[0]
    _require_ranks(traces)
    return Traces(traces), [f"{error}; this file is left out" for error in left_out]


def _require_ranks(traces: Sequence[Trace | _Unread]) -> None:
    """Raise InputError for two traces of one rank, whose figures could not be told apart."""
    files: dict[int, Path] = {}
    for trace in traces:
        rank = trace.header.engine_rank
        if rank in files:
            msg = f"{files[rank]} and {trace.path} are both of rank {rank}: name or keep one of them"
            raise InputError(msg)
        files[rank] = trace.path


def _header(file: Path) -> Header | None:
    """Return the header of a trace; None if there is none: reading the whole file then reports the problem.

    Raises:
        InputError: of what follows it, not one line is understood.
    """
    if foreign_reader(file) is not None:
        return None
    header, broken = None, 0
    for _, lines in WholeLines(file, _ONE_LINE):
        for line in filter(bytes.strip, lines):
            if header is None:
                try:
                    header = read_header(file, [line])
                except InputError:
                    return None
            elif decode_line(line) is not None:
                return header
            else:
                broken += 1
    if broken:
        msg = f"{file}: not one of the {broken:,} lines after its header is understood"
        raise InputError(msg)
    return header
