"""Runs, read for a command; a bar tells how far large traces are."""

from pathlib import Path
from typing import TYPE_CHECKING

from schedtrace.cli.options import print_line, stderr_console
from schedtrace.errors import UsageError

if TYPE_CHECKING:
    from schedtrace.read.run import Run


def read_runs(paths: list[Path], *, cache: bool = True) -> "list[Run]":
    """The runs at these paths.

    Args:
        paths: Run folders or trace files.
        cache: Whether what was read of large traces may be kept in the user's cache, and used again.

    Raises:
        InputError: one cannot be read.
    """
    from schedtrace.present.progress import ReadingBar
    from schedtrace.read.lines import ReadOptions
    from schedtrace.read.run import read_run

    with ReadingBar(stderr_console()) as bar:
        return [read_run(path, ReadOptions(cache=cache, progress=bar)) for path in paths]


def say_left_out(runs: "list[Run]") -> None:
    """Name the files of these runs that are left out, on stderr."""
    for problem in (problem for run in runs for problem in run.problems):
        print_line(f"schedtrace: {problem}", err=True)


def one_run(path: Path) -> "Run":
    """The run at ``path``: its folder, one of its traces, or a folder that holds no other run.

    Raises:
        InputError: there is none, or it cannot be read.
        UsageError: there are several.
    """
    from schedtrace.read.run import find_runs

    found = find_runs([path])
    if len(found) > 1:
        msg = f"{path}: {len(found)} runs in it; name one of them, such as {found[0]}"
        raise UsageError(msg)
    runs = read_runs(found)
    say_left_out(runs)
    return runs[0]
