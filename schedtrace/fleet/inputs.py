"""Engines at the paths that a user named: which files belong to which trace, and the trace's name.

While a remote trace is read, the parts that the window needs are copied into a temporary folder.
"""

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import product, takewhile
from pathlib import Path

from schedtrace.errors import InputError
from schedtrace.fleet.stores import LocalStore, SourceFile, TraceStore, store_for
from schedtrace.model.fleet import LeftOut
from schedtrace.model.manifest import FILE_NAME, is_trace, part_number, plain_of, trace_of
from schedtrace.read.run import FRONT_END_PATTERN

NO_TRACE = "no trace of schedtrace"
BESIDE = (FILE_NAME, FRONT_END_PATTERN)
"""Names of files in a run folder that belong to all of its traces."""


@dataclass(frozen=True)
class EngineSource:
    """Trace of one engine, before it is read."""

    name: str
    """Name in the report: the run folder relative to the path that the user named."""
    address: str
    """Path or address of the trace, as a user would write it; if the trace is in parts, with ``*`` for their
    numbers."""
    parts: tuple[SourceFile, ...]
    """Files of the trace, in order."""
    beside: tuple[SourceFile, ...]
    """Manifest and records of front ends in the same folder as the trace."""
    engines: int
    """Number of traces in the same folder."""

    @property
    def trace_name(self) -> str:
        """Name of the trace's file; if the trace is in parts, with ``*`` for their numbers."""
        return (
            trace_of(Path(self.parts[0].file_name)).name if len(self.parts) > 1 else self.parts[0].file_name
        )

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """All files on which the summary depends."""
        return (*self.parts, *self.beside)


@dataclass
class FleetInputs:
    """Engines at some paths, and inputs that are not engines."""

    engines: list[EngineSource] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def find_fleet(addresses: Sequence[str]) -> FleetInputs:
    """Return the engines at these paths, globs and addresses, in the order of their names.

    Raises:
        InputError: If there is no engine.
        MissingExtraError: If an address needs a package that is not installed.
    """
    inputs = FleetInputs()
    for address in addresses:
        try:
            _add(inputs, address)
        except InputError as error:
            inputs.left_out.append(LeftOut(path=address, why=str(error).removeprefix(f"{address}: ")))
    if not inputs.engines:
        why = [f"{entry.path}: {entry.why}" for entry in inputs.left_out]
        msg = why[0] if len(why) == 1 else f"{', '.join(addresses)}: {NO_TRACE} there"
        raise InputError(msg, *([] if len(why) == 1 else why))
    first = {engine.address: engine for engine in reversed(inputs.engines)}
    engines = [*first.values()]
    # The folders that all names begin with are left out, and an address replaces a name that several have.
    levels = zip(*(engine.name.split("/")[:-1] for engine in engines), strict=False)
    shared = takewhile(lambda level: len({*level}) == 1, levels if len(engines) > 1 else ())
    left_out = len(list(shared))
    engines = [replace(engine, name="/".join(engine.name.split("/")[left_out:])) for engine in engines]
    several = Counter(engine.name for engine in engines)
    engines = [
        replace(engine, name=engine.address) if several[engine.name] > 1 else engine for engine in engines
    ]
    inputs.engines = sorted(
        engines,
        key=lambda engine: [  # engine-2 before engine-10
            (text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d{0,18})", engine.name)
        ],
    )
    return inputs


def _add(inputs: FleetInputs, address: str) -> None:
    """Add the engines at an address, and list everything else there as left out.

    Raises:
        InputError: If there is nothing to add.
    """
    store = store_for(address)
    listing = store.listing(address)
    inputs.left_out += listing.left_out
    folders: dict[str, list[SourceFile]] = defaultdict(list)
    for file in listing.files:
        folders[file.folder].append(file)
    for folder, pattern in product(folders, BESIDE) if listing.of_files else ():
        with suppress(InputError):  # a folder that cannot be listed
            there = store.listing(store.location(f"{folder}/{pattern}")).files
            folders[folder] += [file for file in there if _is_beside(file)]
    engines = [
        engine
        for folder, files in folders.items()
        for engine in _engines_in(store, listing.root, folder, files)
    ]
    used = {file.path for engine in engines for file in engine.files}
    unused = [file for file in listing.files if file.path not in used and not _is_beside(file)]
    inputs.left_out += [LeftOut(path=store.location(file.path), why=NO_TRACE) for file in unused]
    if not engines and not unused:
        msg = f"{address}: {NO_TRACE} there" if listing.files else f"{address}: no such file or folder"
        raise InputError(msg)
    inputs.engines += engines


def _engines_in(store: TraceStore, root: str, folder: str, files: Sequence[SourceFile]) -> list[EngineSource]:
    """Return the engines whose traces lie in one folder."""
    traces: dict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        if is_trace(Path(file.file_name)):
            traces[trace_of(Path(file.file_name)).name].append(file)
    beside = tuple(file for file in files if _is_beside(file))
    is_run = any(file.file_name == FILE_NAME for file in beside)
    inside = folder.removeprefix(root).strip("/") if folder.startswith(root) else folder
    engines = []
    for trace, parts in traces.items():
        # The name is the folder below the root and, unless the trace is a whole run, the trace's.
        last = "" if is_run and len(traces) == 1 else plain_of(Path(trace)).removesuffix(".jsonl")
        name = "/".join(part for part in (inside, last) if part)
        engines.append(
            EngineSource(
                name=name or folder.rpartition("/")[2] or folder or ".",
                address=store.location(f"{folder}/{trace}" if folder else trace),
                parts=tuple(sorted(parts, key=lambda part: part_number(Path(part.file_name)))),
                beside=beside,
                engines=len(traces),
            )
        )
    return engines


def _is_beside(file: SourceFile) -> bool:
    return any(fnmatchcase(file.file_name, pattern) for pattern in BESIDE)


def engine_named(inputs: FleetInputs, name: str) -> EngineSource:
    """Return the engine with this name or address.

    Raises:
        InputError: If there is no such engine.
    """
    for engine in inputs.engines:
        if name in {engine.name, engine.address}:
            return engine
    endings = [engine for engine in inputs.engines if engine.name.endswith(f"/{name}")]
    if len(endings) == 1:
        return endings[0]
    some = ", ".join(engine.name for engine in (endings or inputs.engines)[:3])
    msg = f"--engine {name}: {len(endings) or 'no'} engines have this name; there are {some}, ..."
    raise InputError(msg)


@dataclass(frozen=True)
class StagedTrace:
    """Trace whose files are available on this machine."""

    path: Path
    files: list[Path]
    """Staged files, including those beside the trace."""
    vanished: list[str]
    """Names of the files that have vanished since they were listed."""


@contextmanager
def staged(source: EngineSource, parts: Sequence[SourceFile]) -> Iterator[StagedTrace]:
    """Make a trace readable as local files, in a context.

    Args:
        source: The engine.
        parts: Files of its trace to read, in order.

    Raises:
        FileNotFoundError: If all parts vanished.
        OSError: If a file cannot be read.
    """
    store, needed = store_for(source.address), (*parts, *source.beside)
    if isinstance(store, LocalStore) and len(parts) == len(source.parts):
        paths = [Path(file.path) for file in needed]
        there = [path for path in paths if path.exists()]
        vanished = [path.name for path in paths if path not in there]
        yield StagedTrace(paths[0].with_name(source.trace_name), there, vanished)
        return
    with tempfile.TemporaryDirectory(prefix="schedtrace-fleet-") as name:
        folder = Path(name)
        files, vanished = [], []
        for file in needed:
            try:
                store.copy(file, folder / file.file_name)
                files.append(folder / file.file_name)
            except FileNotFoundError:
                vanished.append(file.file_name)
        yield StagedTrace(folder / source.trace_name, files, vanished)
