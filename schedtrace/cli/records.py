"""The part of ``schedtrace analyze`` for records that are weaker than a trace, and for standard input."""

import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from schedtrace.cli.options import put, show
from schedtrace.errors import InputError, UsageError

if TYPE_CHECKING:
    from schedtrace.model.records import WeakRecord
    from schedtrace.model.report import RunReport

_PIPES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def piped(paths: list[Path], stack: ExitStack) -> dict[Path, str]:
    """Return the paths to read by name; a pipe is written to a temporary file first, as kinds need rereading.

    Args:
        paths: As on the command line; ``-`` is standard input.
        stack: Removes the temporary files.

    Raises:
        UsageError: If standard input is a terminal or is named twice.
        InputError: If a pipe cannot be read.
    """
    from schedtrace.read.text_stream import spooled

    names: dict[Path, str] = {}
    stack.enter_context(_errors_by_name(names))
    for path in paths:
        name = str(path)
        if name != "-" and not (name.startswith(_PIPES) and _is_pipe(path)):
            names[path] = name
            continue
        if name in names.values():
            msg = f"{name}: a pipe can be read only once"
            raise UsageError(msg)
        if name == "-" and sys.stdin.isatty():
            msg = "-: standard input is a terminal; pipe a log: kubectl logs POD | schedtrace analyze -"
            raise UsageError(msg)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="schedtrace-")))
        stream = sys.stdin.buffer if name == "-" else stack.enter_context(path.open("rb"))
        names[spooled(stream, folder)] = name
    return names


@contextmanager
def _errors_by_name(names: Mapping[Path, str]) -> Iterator[None]:
    """Name a pipe as on the command line in errors about its temporary file."""
    try:
        yield
    except InputError as error:
        message = str(error)
        for path, name in names.items():
            message = message.replace(str(path), name)
        raise InputError(message, *error.details) from error


def _is_pipe(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)


def show_records(
    records: "list[WeakRecord]",
    output_format: str,
    of_traces: Mapping[str, Any],
    runs: "Sequence[RunReport]" = (),
) -> None:
    """Print the statements about records without steps, below the reports of runs if there are any.

    Args:
        records: What is shown; without any, nothing is printed.
        output_format: Name of the format.
        of_traces: Options of the command line that apply only to traces, with their values.
        runs: Reports that are shown already.

    Raises:
        UsageError: If an option that only traces have is set.
        InputError: If ``--fail-on`` asks for a judgement.
    """
    from schedtrace.diagnose.records import compare_with_trace
    from schedtrace.model.records import Records
    from schedtrace.present.pages.records import records_page

    asked = [option for option, value in of_traces.items() if value and option != "--fail-on"]
    if records and asked:
        msg = f"{asked[0]} is about traces: {records[0].path} has no steps ({records[0].kind})"
        raise UsageError(msg)
    if records and runs:
        put("\n")
        for record in records:
            same_file = [result for result in records if result.path == record.path]
            compare_with_trace(record, runs, same_file)
    if records:
        show(records_page(Records(records=records)), output_format)
    if records and (level := of_traces.get("--fail-on")):
        msg = f"--fail-on {level} cannot be judged: {records[0].path} has no steps: record the engine"
        raise InputError(msg)
