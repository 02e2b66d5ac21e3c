"""``schedtrace export``: a run's tables for one's own notebook, its trace in full, or one for a viewer."""

from pathlib import Path
from typing import Annotated

import typer

from schedtrace.cli.options import RunArgument, one_run, print_line, stderr_console
from schedtrace.errors import UsageError
from schedtrace.export import Kind


def export(
    run: RunArgument,
    to: Annotated[
        Kind,
        typer.Option(
            help="Tables as Parquet or CSV; JSON Lines: the trace with every step in full; "
            "perfetto or chrome: a trace for a viewer."
        ),
    ] = Kind.PARQUET,
    output: Annotated[
        Path | None, typer.Option(help="Output folder (default: export/ in the run folder).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write tables for a notebook, the whole trace, or a trace for a viewer.

    Tables (steps, requests, exits, states and more) are Parquet or CSV; JSON Lines has every step in full;
    Perfetto and Chrome JSON show requests, steps and counters on the clock of a torch profile.
    """
    from schedtrace.export.exports import export as write_files
    from schedtrace.present.phrases import plain
    from schedtrace.present.progress import CountBar

    found = one_run(run)
    beside = found.path if found.path.is_dir() else found.path.parent
    if to is Kind.JSONL:
        for trace in found.traces:
            for problem in trace.problems.sentences(trace.path):
                print_line(f"schedtrace: {plain(problem)}", err=True)
    folder = output or beside / "export"
    if output is None and folder.is_symlink():
        msg = f"{folder} is a link to {folder.readlink()}; --output names the folder to write to"
        raise UsageError(msg)
    with CountBar(stderr_console(), "exporting", counted=False):
        written = write_files(found, folder, kind=to, force=force)
    width = max(len(str(file)) for file in written)
    what = {Kind.JSONL: "lines", Kind.PERFETTO: "events", Kind.CHROME: "events"}.get(to, "rows")
    for file, count in written.items():
        print_line(f"{file!s:<{width}}  {count:>9,} {what}")
    if to in {Kind.PERFETTO, Kind.CHROME}:
        print_line("next: open it in Perfetto UI, https://ui.perfetto.dev (the file stays in your browser)")
