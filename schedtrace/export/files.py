"""What ``schedtrace export`` writes: which files, and none over another."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from schedtrace.errors import InputError, UsageError
from schedtrace.export import Kind
from schedtrace.model import private
from schedtrace.model.facts import ALL_FACTS, Fact
from schedtrace.model.printable import encodable, visible_json
from schedtrace.read.expand import expanded
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace


def export(run: Run, folder: Path, *, kind: Kind, force: bool = False) -> dict[Path, int]:
    """Write one file per table, one per trace for ``Kind.JSONL``, or one for a viewer, into ``folder``.

    Args:
        run: A run.
        folder: Made if need be.
        kind: Format of the files.
        force: Replace files that are there.

    Returns:
        Each file with its number of rows, lines or events.

    Raises:
        UsageError: a file is there already, a log of another kind has no trace to write or no times to
            show, or Polars cannot write to a folder of this name.
        InputError: the folder cannot be written to.
    """
    if encodable(str(folder)) != str(folder):
        msg = f"{folder}: its name is not UTF-8, which Polars needs; --output names another folder"
        raise UsageError(msg)
    files = _files(run, folder, kind)
    there = [file for file in files if file.exists() or file.is_symlink()]
    if there and not force:
        msg = f"{there[0]} is there already; --force replaces it, --output names another folder"
        raise UsageError(msg)
    try:
        private.make_folder(folder)
        return {file: write(file) for file, write in files.items()}
    except OSError as error:
        msg = f"{folder}: cannot be written to ({error.strerror or error})"
        raise InputError(msg) from error


def _files(run: Run, folder: Path, kind: Kind) -> dict[Path, Callable[[Path], int]]:
    """Each file with what writes it."""
    if kind is Kind.JSONL:
        files = {folder / trace.path.name: partial(_expand, trace) for trace in run.traces}
        _require_traces(run, files)
        return dict(files)
    if kind in {Kind.PERFETTO, Kind.CHROME}:
        for trace in run.traces:
            trace.require(Fact.TIMES, "a viewer")
    if kind is Kind.PERFETTO:
        from schedtrace.export.perfetto import write_perfetto  # noqa: PLC0415  # protobuf takes 0.1 s

        return {folder / "trace.pftrace": partial(write_perfetto, run)}
    if kind is Kind.CHROME:
        from schedtrace.export.chrome import write_chrome  # noqa: PLC0415  # likewise: only what is asked for

        return {folder / "trace.json.gz": partial(write_chrome, run)}
    from schedtrace.export.tables import tables, write_table  # noqa: PLC0415  # likewise

    return {
        folder / f"{name}.{kind}": partial(write_table, table, kind) for name, table in tables(run).items()
    }


def _require_traces(run: Run, files: Iterable[Path]) -> None:
    """Raises UsageError unless each file can be written from a trace of its own."""
    foreign = [trace for trace in run.traces if trace.facts != ALL_FACTS]
    if foreign:
        msg = f"{foreign[0].path}: --to jsonl expands traces of schedtrace, and this is a {foreign[0].record}"
        raise UsageError(msg)
    sources = {trace.path.resolve() for trace in run.traces}
    if over := [file for file in files if file.resolve() in sources]:
        msg = f"{over[0]}: --output names the folder of the trace itself, which would be lost"
        raise UsageError(msg)


def _expand(trace: Trace, file: Path) -> int:
    """Line by line, as a large trace in full does not fit memory."""
    count = 0
    with private.writable(file) as target:
        for line in expanded(trace.path):
            target.write(visible_json(line) + b"\n")
            count += 1
    return count
