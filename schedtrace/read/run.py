"""Runs at the paths that a user typed: run folders with one trace per engine, or single files."""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import msgspec

from schedtrace.errors import InputError
from schedtrace.model.manifest import (
    FILE_NAME,
    Configured,
    FrontEndLine,
    Manifest,
    RequestRefusal,
    read_manifest,
)
from schedtrace.model.trace_names import PLAIN, files_of, is_in_parts, trace_of, traces_in
from schedtrace.read.kinds import kind_of, look_of
from schedtrace.read.lines import HUGE_NUMBER, READ, UNREADABLE, ReadOptions, WholeLines
from schedtrace.read.traces import Traces, foreign_reader, traces_of

_NAME = re.compile(r"profile_(?P<at>\d{4})_bs(?P<bs>\d{1,12})_in(?P<in>\d{1,12})_out(?P<out>\d{1,12})")


class ProfileName(msgspec.Struct, frozen=True):
    """Workload as stated in the name of its log, which is not compared with the log."""

    at: str
    """Time of day as ``HHMM``."""
    batch_size: int
    input_len: int
    output_len: int

    @property
    def label(self) -> str:
        """``10:25 bs16 in1024 out64``."""
        at = f"{self.at[:2]}:{self.at[2:]}"
        return f"{at} bs{self.batch_size} in{self.input_len} out{self.output_len}"


def profile_name(path: Path) -> ProfileName | None:
    """Return the parts of the name; None if it has another form."""
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
    """The configuration that the engines run with; None if not recorded."""
    refused: list[RequestRefusal] = field(default_factory=list)
    """Refused requests in order of time."""
    arrived: int = 0
    """Requests that reached an engine, including the warm-up; counted only if some requests were refused."""


def read_front_end(folder: Path, engines_began_unix_us: int) -> FrontEndRecord | None:
    """Read every ``front-end-<pid>.jsonl`` of a run folder; lines that are cut or broken are left out.

    A front end also makes configurations just to read defaults; the engines' configuration is the last one
    made before they began.

    Args:
        folder: Of the run.
        engines_began_unix_us: When the first engine wrote its header.

    Returns:
        None where no front end wrote a line.
    """
    lines = [line for file in sorted(folder.glob(FRONT_END_PATTERN)) for line in _front_end_lines(file)]
    if not lines:
        return None
    lines.sort(key=lambda line: line.at_unix_us)
    configured = [line for line in lines if isinstance(line, Configured)]
    before = [line for line in configured if line.at_unix_us <= engines_began_unix_us]
    return FrontEndRecord(
        configured=before[-1] if before else None,
        refused=[line for line in lines if isinstance(line, RequestRefusal)],
    )


def _front_end_lines(file: Path) -> list[Configured | RequestRefusal]:
    """Return the complete lines of one file; none if it cannot be read."""
    decoded = []
    with suppress(InputError):
        for _, lines in WholeLines(file):
            for line in lines:
                with suppress(*UNREADABLE):
                    decoded += [] if HUGE_NUMBER.search(line) else [_decode_front_end_line(line)]
    return decoded


@dataclass
class Run:
    """Run whose traces are read on demand."""

    path: Path
    manifest: Manifest | None
    traces: Traces
    """Traces in the order of data-parallel ranks."""
    engines: int
    """Number of ranks of the run, even if only one of them was asked for."""
    named: ProfileName | None = None
    """Workload as stated in the name of a foreign log."""
    front_end: FrontEndRecord | None = None
    """Record of the front ends; None if there is none."""
    problems: list[str] = field(default_factory=list)
    """Sentences about files of the folder that are left out, with the reason."""

    @property
    def label(self) -> str:
        """Name of the run for users."""
        if self.named is not None:
            return self.named.label
        return (self.manifest and self.manifest.label) or self.path.name


@dataclass(frozen=True)
class Skipped:
    """File in a folder that no command reads."""

    path: Path
    why: str


@dataclass
class FoundRuns:
    """Runs and other files at some paths."""

    runs: list[Path] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    """Other files in a folder of runs."""


def look_for_runs(paths: list[Path]) -> FoundRuns:
    """Return the run folders and files in ``paths``; a folder of runs or logs stands for all of them.

    Raises:
        InputError: If a path is missing or holds no trace.
    """
    runs_found = FoundRuns()
    for path in paths:
        if not _exists(path):
            missing = "no such file or folder"
            msg = f"{path}: {'save the input to a file first' if str(path) == '-' else missing}"
            raise InputError(msg)
        if path.is_file() or is_in_parts(path) or _is_run(path):
            runs_found.runs.append(path)
            continue
        if not path.is_dir():
            msg = f"{path}: neither a regular file nor a folder"
            raise InputError(msg)
        inside = _inside(path)
        if not inside.runs:
            msg = f"{path}: no traces in it; expected {PLAIN}, folders that have them, or logs"
            raise InputError(msg, *skipped_lines(inside.skipped))
        runs_found.runs += inside.runs
        runs_found.skipped += inside.skipped
    several = Counter(trace_of(path) for path in runs_found.runs)
    runs = [trace_of(path) if several[trace_of(path)] > 1 else path for path in runs_found.runs]
    return FoundRuns(list(dict.fromkeys(runs)), runs_found.skipped)


def find_runs(paths: list[Path]) -> list[Path]:
    """Return what ``look_for_runs`` finds, without the files that it skips."""
    return look_for_runs(paths).runs


def _inside(folder: Path) -> FoundRuns:
    """Return the run folders and logs in a folder, and its other files."""
    contents = FoundRuns()
    for child in sorted(folder.iterdir()):
        if not child.is_file():
            contents.runs += [child] if traces_in(child) else []
            continue
        why = _why_skipped(child)
        if why is None:
            contents.runs.append(child)
        else:
            contents.skipped.append(Skipped(child, why))
    return contents


def _why_skipped(file: Path) -> str | None:
    """Return the reason why a file in a folder of runs is not a run; None if it is one."""
    try:
        kind = kind_of(file)
    except (InputError, OSError) as error:
        return str(error).removeprefix(f"{file}: ")
    return None if kind is not None and kind.reader is not None else look_of(kind)


MOST_REASONS, MOST_NAMES = 8, 3


def skipped_lines(skipped: list[Skipped]) -> list[str]:
    """Return a line for each reason, with the names of some files."""
    files: dict[str, list[str]] = {}
    for file in skipped:
        files.setdefault(file.why, []).append(file.path.name)
    lines = [f"skipped {_some(names)}: {why}" for why, names in islice(files.items(), MOST_REASONS)]
    left = sum(map(len, islice(files.values(), MOST_REASONS, None)))
    files_left = "1 more file" if left == 1 else f"{left:,} more files"
    return [*lines, *([f"skipped {files_left}"] if left else [])]


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def runs_without_trace(paths: list[Path]) -> list[Path]:
    """Return run folders within the folders of ``paths`` that have a manifest but no trace."""
    children = [child for path in paths if path.is_dir() for child in path.iterdir() if child.is_dir()]
    return sorted(child for child in children if _is_run(child) and not traces_in(child))


def read_run(path: Path, options: ReadOptions = READ) -> Run:
    """Read a run folder, a single trace file with the manifest beside it, or a foreign log.

    Raises:
        InputError: If nothing was recorded, or it cannot be understood.
    """
    if path.is_file() and (reader := foreign_reader(path)):
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
