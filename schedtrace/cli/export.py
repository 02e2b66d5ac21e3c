"""``schedtrace export``: a run's tables as files for one's own notebook, or its trace in full."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from schedtrace.cli.options import say


class To(StrEnum):
    """Formats of the files."""

    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"


def export(
    run: Annotated[Path, typer.Argument(help="Run folder or trace file.")],
    to: Annotated[
        To, typer.Option(help="Tables as Parquet or CSV, or JSON Lines: the trace with every step in full.")
    ] = To.PARQUET,
    output: Annotated[
        Path | None, typer.Option(help="Output folder (default: export/ in the run folder).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write tables for a notebook, or the whole trace.

    Tables (steps, requests, exits, states and more) are Parquet or CSV; JSON Lines has every step in full.
    """
    from schedtrace.cli.runs import one_run
    from schedtrace.diagnose.export import Kind
    from schedtrace.diagnose.export import export as write_files
    from schedtrace.present.phrases import plain

    found = one_run(run)
    beside = found.path if found.path.is_dir() else found.path.parent
    if to is To.JSONL:
        for trace in found.traces:
            for problem in trace.problems.sentences(trace.path):
                say(f"schedtrace: {plain(problem)}", err=True)
    written = write_files(found, output or beside / "export", kind=Kind(to), force=force)
    width = max(len(str(file)) for file in written)
    what = "lines" if to is To.JSONL else "rows"
    for file, count in written.items():
        say(f"{file!s:<{width}}  {count:>9,} {what}")
