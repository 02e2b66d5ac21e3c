"""The one run that a command is about."""

from pathlib import Path

from schedtrace.errors import UsageError
from schedtrace.read.run import Run, find_runs, read_run


def one_run(path: Path) -> Run:
    """The run at ``path``: its folder, one of its traces, or a folder that holds no other run.

    Raises:
        InputError: there is none, or it cannot be read.
        UsageError: there are several.
    """
    found = find_runs([path])
    if len(found) > 1:
        msg = f"{path}: {len(found)} runs in it; name one of them, such as {found[0]}"
        raise UsageError(msg)
    return read_run(found[0])
