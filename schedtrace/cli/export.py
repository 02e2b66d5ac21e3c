"""``schedtrace export``: a run's tables as files, for one's own notebook."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from schedtrace.cli.options import say


class To(StrEnum):
    """Formats of the files."""

    PARQUET = "parquet"
    CSV = "csv"


def export(
    run: Annotated[Path, typer.Argument(help="Run folder or trace file.")],
    to: Annotated[To, typer.Option(help="Format of the files.")] = To.PARQUET,
    output: Annotated[
        Path | None, typer.Option(help="Folder that gets the files (default: export in the run's folder).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write steps, requests, exits, caps, preemptions, arrivals and finishes as Parquet or CSV."""
    from schedtrace.cli.runs import one_run
    from schedtrace.diagnose.export import Kind, write_tables

    found = one_run(run)
    beside = found.path if found.path.is_dir() else found.path.parent
    written = write_tables(found, output or beside / "export", kind=Kind(to), force=force)
    width = max(len(str(file)) for file in written)
    for file, rows in written.items():
        say(f"{file!s:<{width}}  {rows:>9,} rows")
