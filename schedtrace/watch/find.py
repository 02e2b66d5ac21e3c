"""Search for the trace to watch, given a path, a process, or nothing."""

import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from schedtrace.errors import InputError, UsageError
from schedtrace.model.manifest import files_of, is_in_parts, is_trace, trace_of, traces_in
from schedtrace.model.safe_files import expanded
from schedtrace.read.follow import require_header
from schedtrace.record.processes import children, process_id

DIR = "SCHEDTRACE_DIR"
GROWING_S = 30.0
"""Age in seconds above which a file counts as no longer growing; the recorder writes every second."""
DEPTH = 4
"""Number of levels of folders below the current one that are searched."""


@dataclass(frozen=True)
class Target:
    """Location of traces."""

    path: Path
    only: bool
    """Whether the target is a single run or trace; otherwise it is a folder of runs, the newest of which
    is watched."""

    def awaited(self) -> str:
        """Describe what the watch waits for while there are no traces."""
        if self.path.exists():
            return f"waiting for a trace in {self.path}"
        return f"waiting for {self.path} to appear: no such file or folder yet"

    def trace_paths(self, without: Collection[Path] = ()) -> list[Path]:
        """Return the traces of the run to watch, by rank; empty if there are none yet.

        Args:
            without: Folders that are not runs of the engine, such as saved windows.
        """
        if self.path.is_file():
            return [trace_of(self.path)]
        if is_in_parts(self.path):
            return [self.path] if files_of(self.path) else []
        own = traces_in(self.path)
        if own or self.only:
            return own
        folders = [folder for folder in _children(self.path, Path.is_dir) if folder.absolute() not in without]
        runs = [traces for folder in folders if (traces := traces_in(folder))]
        # The newest run: growing runs first and, among these, the latest start.
        return max(runs, key=lambda traces: (grows(traces), _modified_s(traces[0].parent)), default=[])


def target(location: str | None, environment: dict[str, str], here: Path, *, wait: bool = True) -> Target:
    """Return the target for a location.

    Args:
        location: A run folder, a folder of runs, a trace, a process id; None: ``SCHEDTRACE_DIR``, else the
            newest trace below ``here`` that grows.
        environment: Environment, with ``SCHEDTRACE_DIR`` if it is set.
        here: Current folder.
        wait: Whether to accept a path that a starting server has yet to create, if its parent exists.

    Raises:
        InputError: If the path or process does not exist, the file is not a trace, or the process records
            nothing.
        UsageError: If there is no location, and nothing is found.
    """
    if location is not None:
        path = Path(location) if os.path.lexists(location) else expanded(location)
        if path.is_dir():
            return Target(path, only=bool(traces_in(path)))
        if path.exists() or (is_in_parts(path) and files_of(path)):
            require_header(path)
            return Target(path, only=True)
        if (pid := process_id(location)) is not None:
            return process_target(pid)
        if wait and path.parent.is_dir():
            return Target(path, only=is_trace(path))
        msg = f"{location}: no such file or folder, and no process id"
        raise InputError(msg)
    if folder := environment.get(DIR):
        return Target(expanded(folder), only=False)
    growing = [path for path in _below(here, DEPTH) if grows([path])]
    if growing:
        return Target(max(growing, key=_modified_s).parent, only=True)
    msg = (
        f"no trace grows below {here} and {DIR} is not set: name a run folder or the server's process id "
        f"(schedtrace watch DIR), and start the server with {DIR}=DIR"
    )
    raise UsageError(msg)


def process_target(pid: int) -> Target:
    """Return the run that a process or one of its descendants records.

    Raises:
        InputError: If the process does not exist, is not accessible, or records nothing.
    """
    if not Path(f"/proc/{pid}").exists():
        msg = f"{pid}: no such process, file or folder"
        raise InputError(msg)
    family = [pid, *_descendants(pid)]
    for process in family:
        for path in _open_traces(process):
            return Target(path.parent, only=True)
    try:
        folder = next(
            (directory for process in family if (directory := _environment(process).get(DIR))), None
        )
    except PermissionError:
        msg = f"process {pid}: its environment cannot be read; name the run folder instead"
        raise InputError(msg) from None
    if folder is None:
        msg = f"process {pid} records nothing: start it with {DIR}=DIR in its environment"
        raise InputError(msg)
    return Target(expanded(folder), only=False)


def _children(folder: Path, wanted: Callable[[Path], bool] = bool) -> list[Path]:
    """Return the folder's entries; an empty list if the folder may not be read."""
    try:
        return [child for child in folder.iterdir() if wanted(child)]
    except OSError:
        return []


def grows(traces: list[Path]) -> bool:
    """Return whether any of these files was written recently."""
    return any(time.time() - _modified_s(path) < GROWING_S for path in traces)


def _modified_s(path: Path) -> float:
    try:
        return max((file.stat().st_mtime for file in files_of(path)[-1:]), default=0.0)
    except OSError:
        return 0.0


def _below(folder: Path, depth: int) -> Iterator[Path]:
    yield from traces_in(folder)
    if depth:
        for child in _children(folder, Path.is_dir):
            if not child.is_symlink() and not child.name.startswith("."):
                yield from _below(child, depth - 1)


def _descendants(pid: int) -> list[int]:
    return [process for child in children(pid) for process in (child, *_descendants(child))]


def _open_traces(pid: int) -> Iterator[Path]:
    """Yield the traces to which a process writes, without those that it only reads."""
    for link in _children(Path(f"/proc/{pid}/fd")):
        try:
            path = Path(os.readlink(link))  # noqa: PTH115  # a deleted file's text is no path
            written = stat.S_IMODE(link.lstat().st_mode) & stat.S_IWUSR
        except OSError:
            continue
        if written and is_trace(path) and path.exists():
            yield path


def _environment(pid: int) -> dict[str, str]:
    try:
        texts = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    except (FileNotFoundError, ProcessLookupError):  # it is gone, or is a thread of the kernel
        return {}
    return dict(text.split("=", 1) for text in texts if "=" in text)
