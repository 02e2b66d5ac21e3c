"""Runs at the paths that a user gave: run folders with one trace per engine, or single files.

Each trace of a run is read on demand, because all ranks of a large run together may not fit into memory.
"""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import overload

import msgspec

from schedtrace.errors import InputError
from schedtrace.model.manifest import (
    FILE_NAME,
    PLAIN,
    Configured,
    FrontEndLine,
    Manifest,
    RequestRefusal,
    files_of,
    is_in_parts,
    is_trace,
    read_manifest,
    trace_of,
    traces_in,
)
from schedtrace.model.trace import Header
from schedtrace.read.file_sample import RecordReader
from schedtrace.read.kinds import TRACE, Reader, kind_of, look_of, refusal
from schedtrace.read.lines import (
    HUGE_NUMBER,
    READ,
    UNREADABLE,
    ReadOptions,
    WholeLines,
    decode_line,
    read_header,
)
from schedtrace.read.trace import Trace, read_trace


def read_record(path: Path, options: ReadOptions = READ) -> list[Trace]:
    """Read a trace, or a log that has steps; return one trace per engine.

    Raises:
        InputError: If the file cannot be read, or is of another kind.
    """
    if is_trace(path):
        try:
            return [read_trace(path, options)]
        except InputError:  # a log may have a trace's name
            if (reader := foreign_reader(path)) is None:
                raise
            return reader(path)
    kind = kind_of(path)
    if kind is not None and kind.reader is not None:
        return kind.reader(path)
    if kind is TRACE:
        return [read_trace(path, options)]
    msg = f"{path}: {refusal(kind)}"
    raise InputError(msg)


def foreign_reader(path: Path) -> Reader | None:
    """Return the reader of this file if it is a foreign log; None otherwise."""
    kind = kind_of(path)
    return None if kind is None else kind.reader


_ONE_LINE = ReadOptions(chunk_bytes=2**16)
"""Options for reading a single line of a file."""


@dataclass(frozen=True)
class _Unread:
    """Trace whose header alone has been read so far."""

    path: Path
    header: Header
    options: ReadOptions

    def load_trace(self) -> Trace:
        return read_trace(self.path, self.options)


class Traces(Sequence[Trace]):
    """Traces in the order of data-parallel ranks.

    Indexing keeps a trace in memory; ``once`` does not, except for the first trace, which is needed often.
    """

    def __init__(self, traces: Sequence[Trace | _Unread]) -> None:
        self._traces = list(traces)

    @property
    def headers(self) -> list[Header]:
        """Headers of all traces, read or not."""
        return [trace.header for trace in self._traces]

    def once(self, place: int) -> Trace:
        """Return the trace at this place without keeping it; a second call reads it again.

        Raises:
            InputError: If the trace cannot be read.
        """
        trace = self._traces[place]
        if isinstance(trace, Trace):
            return trace
        return self[0] if place == 0 else trace.load_trace()

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
            trace = self._traces[place] = trace.load_trace()
        return trace


def traces_of(files: Sequence[Path], options: ReadOptions) -> tuple[Traces, list[str]]:
    """Return the traces in these files, and a sentence for each file that is left out as unreadable.

    If there are several traces of schedtrace, only their headers are read here.

    Raises:
        InputError: If none of the files is readable, or two are of the same rank.
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
    ranks: dict[int, Path] = {}
    for trace in traces:
        rank = trace.header.engine_rank
        if rank in ranks:  # the figures of two could not be told apart
            msg = f"{ranks[rank]} and {trace.path} are both of rank {rank}: name or keep one of them"
            raise InputError(msg)
        ranks[rank] = trace.path
    return Traces(traces), [f"{error}; this file is left out" for error in left_out]


def _header(file: Path) -> Header | None:
    """Return the header of a trace; None if there is no valid header, which ``read_record`` will report.

    Raises:
        InputError: If there are lines after the header, but none is valid.
    """
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


_NAME = re.compile(r"profile_(?P<at>\d{4})_bs(?P<bs>\d{1,12})_in(?P<in>\d{1,12})_out(?P<out>\d{1,12})")


class ProfileName(msgspec.Struct, frozen=True):
    """Workload as stated in the name of a log; it is not checked against the log's content."""

    at: str
    """Time of day in the form ``HHMM``."""
    batch_size: int
    input_len: int
    output_len: int

    @property
    def label(self) -> str:
        """Label such as ``10:25 bs16 in1024 out64``."""
        at = f"{self.at[:2]}:{self.at[2:]}"
        return f"{at} bs{self.batch_size} in{self.input_len} out{self.output_len}"


def profile_name(path: Path) -> ProfileName | None:
    """Return the workload that a file's name states; None if the name has another form."""
    parts = _NAME.fullmatch(path.stem)
    if parts is None:
        return None
    return ProfileName(parts["at"], int(parts["bs"]), int(parts["in"]), int(parts["out"]))


FRONT_END_PATTERN = "front-end-*.jsonl"
_decode_front_end_line = msgspec.json.Decoder(FrontEndLine).decode


@dataclass(frozen=True)
class FrontEndRecord:
    """Record of the front ends of one run."""

    configured: Configured | None = None
    """Configuration that the engines run with; None if not recorded."""
    refused: list[RequestRefusal] = field(default_factory=list)
    """Refused requests in the order of time."""
    arrived: int = 0
    """Number of requests that reached an engine, including the warm-up; counted only if some requests were
    refused."""


def read_front_end(folder: Path, engines_began_unix_us: int) -> FrontEndRecord | None:
    """Read every ``front-end-<pid>.jsonl`` of a run folder; lines that are cut or broken are left out.

    A front end also makes configurations just to read defaults; the engines' configuration is the last one
    made before they began.

    Args:
        folder: Run folder.
        engines_began_unix_us: Unix time in microseconds at which the first engine wrote its header.

    Returns:
        The record; None if no front end wrote a line.
    """
    lines: list[Configured | RequestRefusal] = []
    for file in sorted(folder.glob(FRONT_END_PATTERN)):
        with suppress(InputError):
            for _, chunk in WholeLines(file):
                for line in chunk:
                    with suppress(*UNREADABLE):
                        lines += [] if HUGE_NUMBER.search(line) else [_decode_front_end_line(line)]
    if not lines:
        return None
    lines.sort(key=lambda line: line.at_unix_us)
    configured = [line for line in lines if isinstance(line, Configured)]
    before = [line for line in configured if line.at_unix_us <= engines_began_unix_us]
    return FrontEndRecord(
        configured=before[-1] if before else None,
        refused=[line for line in lines if isinstance(line, RequestRefusal)],
    )


@dataclass
class Run:
    """Run whose traces are read on demand."""

    path: Path
    manifest: Manifest | None
    traces: Traces
    """Traces in the order of data-parallel ranks."""
    engines: int
    """Number of ranks of the run, even if the user asked for only one of them."""
    named: ProfileName | None = None
    """Workload as stated in the name of a foreign log."""
    front_end: FrontEndRecord | None = None
    """Record of the front ends; None if there is none."""
    problems: list[str] = field(default_factory=list)
    """Sentences about files of the folder that are left out, each with the reason."""

    @property
    def label(self) -> str:
        """Name of the run for users."""
        if self.named is not None:
            return self.named.label
        return (self.manifest and self.manifest.label) or self.path.name


@dataclass(frozen=True)
class Skipped:
    """File that no command can read, in a folder of runs."""

    path: Path
    why: str


@dataclass
class FoundRuns:
    """Runs at some paths, and files that are not runs."""

    runs: list[Path] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    """Other files in a folder of runs, which are skipped."""
    records: dict[Path, RecordReader] = field(default_factory=dict)
    """Records that contain less than a trace, which only ``analyze`` reads."""


def look_for_runs(paths: list[Path]) -> FoundRuns:
    """Return the run folders and files in ``paths``; a folder of runs or logs stands for all of them.

    Raises:
        InputError: If a path does not exist or contains no trace.
    """
    runs_found = FoundRuns()
    for path in paths:
        if not _exists(path):
            missing = "no such file or folder"
            msg = f"{path}: {'save the input to a file first' if str(path) == '-' else missing}"
            raise InputError(msg)
        if path.is_file() or is_in_parts(path) or _is_run(path):
            kind = kind_of(path) if path.is_file() and not is_trace(path) else None
            if kind is not None and kind.record is not None:
                runs_found.records[path] = kind.record
            else:
                runs_found.runs.append(path)
            continue
        if not path.is_dir():
            msg = f"{path}: neither a regular file nor a folder"
            raise InputError(msg)
        inside = _inside(path)
        if not inside.runs and not inside.records:
            msg = f"{path}: no traces in it; expected {PLAIN}, folders that have them, or logs"
            raise InputError(msg, *skipped_lines(inside.skipped))
        runs_found.runs += inside.runs
        runs_found.skipped += inside.skipped
        runs_found.records |= inside.records
    several = Counter(trace_of(path) for path in runs_found.runs)
    runs = [trace_of(path) if several[trace_of(path)] > 1 else path for path in runs_found.runs]
    return FoundRuns(list(dict.fromkeys(runs)), runs_found.skipped, runs_found.records)


def find_runs(paths: list[Path]) -> list[Path]:
    """Return the runs that ``look_for_runs`` finds, without the files that it skips.

    A record without steps is included if the user gives its own path, because reading it then reports why it
    is refused.

    Raises:
        InputError: If there is no run.
    """
    search = look_for_runs(paths)
    runs = search.runs + [path for path in search.records if path in paths]
    if paths and not runs:
        record = next(iter(search.records))
        kind = search.records[record].name
        msg = f"{paths[0]}: no traces in it; only schedtrace analyze reads {record.name} ({kind})"
        raise InputError(msg)
    return runs


def _inside(folder: Path) -> FoundRuns:
    """Return the run folders and logs in a folder, and the folder's other files."""
    contents = FoundRuns()
    for child in sorted(folder.iterdir()):
        if not child.is_file():
            contents.runs += [child] if traces_in(child) else []
            continue
        try:
            kind = kind_of(child)
        except (InputError, OSError) as error:
            contents.skipped.append(Skipped(child, str(error).removeprefix(f"{child}: ")))
            continue
        if kind is not None and kind.record is not None:
            contents.records[child] = kind.record
        elif kind is not None and kind.reader is not None:
            contents.runs.append(child)
        else:
            contents.skipped.append(Skipped(child, look_of(kind)))
    return contents


MOST_REASONS, MOST_NAMES = 8, 3


def skipped_lines(skipped: list[Skipped]) -> list[str]:
    """Return one line per reason for skipping files, with the names of some of them."""
    files: dict[str, list[str]] = {}
    for file in skipped:
        files.setdefault(file.why, []).append(file.path.name)
    lines = []
    for why, names in islice(files.items(), MOST_REASONS):
        more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
        lines.append(f"skipped {', '.join(names[:MOST_NAMES])}{more}: {why}")
    left = sum(map(len, islice(files.values(), MOST_REASONS, None)))
    files_left = "1 more file" if left == 1 else f"{left:,} more files"
    return [*lines, *([f"skipped {files_left}"] if left else [])]


def runs_without_trace(paths: list[Path]) -> list[Path]:
    """Return run folders within the folders of ``paths`` that have a manifest but no trace."""
    children = [child for path in paths if path.is_dir() for child in path.iterdir() if child.is_dir()]
    return sorted(child for child in children if _is_run(child) and not traces_in(child))


def read_run(path: Path, options: ReadOptions = READ) -> Run:
    """Read a run folder, a single trace file with the manifest beside it, or a foreign log.

    Raises:
        InputError: If nothing was recorded, or the files cannot be read.
    """
    if path.is_file() and not is_trace(path) and (reader := foreign_reader(path)):
        traces = Traces(reader(path))
        return Run(path, None, traces, len(traces), named=profile_name(path))
    folder = path if path.is_dir() else path.parent
    manifest = read_manifest(folder)
    files = traces_in(path) if path.is_dir() else [path]
    if not files:
        why = f" (run {manifest.status}: {manifest.error})" if manifest and manifest.error else ""
        msg = f"{path}: no trace in this run{why}; expected {PLAIN}"
        raise InputError(msg)
    traces, problems = traces_of(files, options)
    engines = len(traces_in(folder)) if manifest else len(traces)
    began = min((header.wall_anchor_us for header in traces.headers), default=0)
    front_end = read_front_end(folder, began)
    if front_end is not None and front_end.refused:
        each = (traces.once(place).arrivals for place in range(len(traces)))
        arrived = sum(arrivals["request_id"].n_unique() for arrivals in each)
        front_end = replace(front_end, arrived=arrived)
    return Run(path, manifest, traces, engines, front_end=front_end, problems=problems)


def _exists(path: Path) -> bool:
    try:
        return path.exists() or (is_in_parts(path) and any(file.exists() for file in files_of(path)))
    except OSError:  # no possible name
        return False


def _is_run(folder: Path) -> bool:
    return (folder / FILE_NAME).exists() or bool(traces_in(folder))
