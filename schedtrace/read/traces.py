"""The traces of a run, each read when it is asked for: all ranks of a large run hardly fit into memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from schedtrace.errors import InputError
from schedtrace.model.trace import Header
from schedtrace.read.detect import foreign_reader, read_record
from schedtrace.read.lines import read_header
from schedtrace.read.options import READ, ReadOptions
from schedtrace.read.trace import Trace, read_trace


@dataclass(frozen=True)
class _Unread:
    """A trace of schedtrace of which only the header is known."""

    path: Path
    header: Header
    options: ReadOptions

    def read(self) -> Trace:
        return read_trace(self.path, self.options)


class Traces(Sequence[Trace]):
    """One trace per data-parallel rank, in their order.

    A trace that was asked for by its place is kept; ``once`` reads one without keeping it, except for the
    first, which many ask for.
    """

    def __init__(self, traces: Sequence[Trace | _Unread]) -> None:
        self._traces = list(traces)

    @property
    def headers(self) -> list[Header]:
        """Of all traces, read or not."""
        return [trace.header for trace in self._traces]

    def once(self, place: int) -> Trace:
        """This trace; whoever asks for it again reads it again.

        Raises:
            InputError: it cannot be read.
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
            return [self[one] for one in range(len(self))[place]]
        trace = self._traces[place]
        if isinstance(trace, _Unread):
            trace = self._traces[place] = trace.read()
        return trace


def traces_of(files: Sequence[Path], options: ReadOptions = READ) -> Traces:
    """The traces in these files; of several that schedtrace wrote only the headers are read here.

    Raises:
        InputError: one is of no known kind, holds nothing, or cannot be read.
    """
    found: list[Trace | _Unread] = []
    for file in files:
        header = _header(file) if len(files) > 1 else None
        found += read_record(file, options) if header is None else [_Unread(file, header, options)]
    return Traces(found)


def _header(file: Path) -> Header | None:
    """None where the first line is none: who reads the file whole says what is wrong with it."""
    if foreign_reader(file) is not None:
        return None
    with file.open("rb") as lines:
        try:
            return read_header(file, [lines.readline()])
        except InputError:
            return None
