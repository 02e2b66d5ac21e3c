"""``schedtrace export``: a run's tables, its trace in full or for a viewer, its load."""

from pathlib import Path
from typing import Annotated

import typer

from schedtrace.cli.options import RunArgument, one_run, print_line, stderr_console
from schedtrace.errors import ExitCode, UsageError
from schedtrace.export import ExportKind

WRITTEN = {
    ExportKind.JSONL: "lines",
    ExportKind.PERFETTO: "events",
    ExportKind.CHROME: "events",
    ExportKind.MOONCAKE: "requests",
}
"""Unit of the entries in each kind of file that is not a table."""


def export(
    run: RunArgument,
    to: Annotated[
        ExportKind,
        typer.Option(
            help="Tables as Parquet or CSV; JSON Lines: the trace with every step in full; "
            "perfetto or chrome: a trace for a viewer; mooncake: the load, for a benchmark that replays it."
        ),
    ] = ExportKind.PARQUET,
    output: Annotated[
        Path | None, typer.Option(help="Output folder (default: export/ in the run folder).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Export tables, the trace in full or for a viewer, or the load.

    Tables (steps, requests, exits, states and more) are Parquet or CSV; JSON Lines contains every step in
    full; Perfetto and Chrome JSON show requests, steps and counters on the clock of a torch profile; a
    Mooncake trace has each request's arrival, lengths and shared prefix. Exits with 3 if the trace lacks
    steps; the files are still written, and a message says what they lack.
    """
    from schedtrace.export.exports import gap_sentences
    from schedtrace.export.exports import write_exports as write_files
    from schedtrace.export.mooncake import mooncake_loads, mooncake_notes
    from schedtrace.model.message import plain
    from schedtrace.present.progress import CountBar

    recorded_run = one_run(run)
    beside = recorded_run.path if recorded_run.path.is_dir() else recorded_run.path.parent
    for trace in recorded_run.traces:
        for problem in trace.problems.sentences(trace.path):
            print_line(f"schedtrace: {plain(problem)}", err=True)
    folder = output or beside / "export"
    if output is None and folder.is_symlink():
        msg = f"{folder} is a link to {folder.readlink()}; --output names the folder to write to"
        raise UsageError(msg)
    with CountBar(stderr_console(), "exporting", counted=False):
        written = write_files(recorded_run, folder, kind=to, force=force)
    width = max(len(str(file)) for file in written)
    what = WRITTEN.get(to, "rows")
    for file, count in written.items():
        print_line(f"{file!s:<{width}}  {count:>9,} {what}")
    if to is ExportKind.MOONCAKE:
        for note in dict.fromkeys(
            plain(note) for load in mooncake_loads(recorded_run).values() for note in mooncake_notes(load)
        ):
            print_line(f"note: {note}")
    if to in {ExportKind.PERFETTO, ExportKind.CHROME}:
        print_line("next: open it in Perfetto UI, https://ui.perfetto.dev (the file stays in your browser)")
    if lacks := gap_sentences(recorded_run):
        for sentence in lacks:
            print_line(f"schedtrace: {plain(sentence)}", err=True)
        raise typer.Exit(ExitCode.INPUT)
