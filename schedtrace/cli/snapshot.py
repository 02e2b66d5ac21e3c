"""``schedtrace snapshot``: write what a flight recorder keeps in memory."""

from pathlib import Path

from schedtrace.cli.attach import EngineArgument
from schedtrace.cli.options import RecordingFolder, print_line
from schedtrace.errors import engine_error


def snapshot(
    engine: EngineArgument = None,
    output: RecordingFolder = Path("logs"),
) -> None:
    """Write the last seconds of a server started with SCHEDTRACE_KEEP.

    The server goes on, and keeps its seconds.
    """
    from schedtrace.engine.running_recordings import snapshot_of

    folders, errors = snapshot_of(engine, output)
    for folder in folders:
        print_line(f"written to {folder}")
    if folders:
        print_line(f"next: schedtrace analyze {' '.join(map(str, folders))}")
    if errors:
        raise engine_error(errors)
