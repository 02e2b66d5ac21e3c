"""``schedtrace report``: one run, or two, as an HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from schedtrace.cli.options import (
    FromOption,
    LastOption,
    ToOption,
    print_line,
    runs_at,
    stderr_console,
    window_of,
)
from schedtrace.errors import InputError, UsageError


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folder or trace file; name two to compare them.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="HTML file to write (default: report.html beside the trace; for two runs, comparison.html).",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    begin: FromOption = None,
    end: ToOption = None,
    last: LastOption = None,
) -> None:
    """Write an HTML page with a timeline that you can zoom into.

    The page is one file that fetches nothing. It shows the verdict, every step and request over time, and the
    whole report. With two runs, it shows both on one time axis, and the first step with a different decision.
    """
    from schedtrace.diagnose.analyze import Timelines, analyze_run
    from schedtrace.model import safe_files
    from schedtrace.present.progress import CountBar
    from schedtrace.present.report.page import comparison_html, run_html

    window = window_of(begin=begin, end=end, last=last)
    if len(runs) > 2 or (len(runs) == 2 and window is not None):  # noqa: PLR2004  # base and new
        msg = "give one run, or two without --from, --to and --last"
        raise UsageError(msg)
    recorded_runs = runs_at(runs)
    beside = recorded_runs[-1].path if recorded_runs[-1].path.is_dir() else recorded_runs[-1].path.parent
    file = output or beside / ("report.html" if len(recorded_runs) == 1 else "comparison.html")
    if file.exists() and not force:
        msg = f"{file} exists already: --force replaces it"
        raise UsageError(msg)
    with CountBar(stderr_console(), "writing the page", counted=False):
        if len(recorded_runs) == 1:
            timelines = Timelines(recorded_runs[0], window)
            html = run_html(
                analyze_run(recorded_runs[0], window, timelines=timelines), recorded_runs[0], timelines
            )
        else:
            from schedtrace.compare.compare import compare

            html = comparison_html(compare(base=recorded_runs[0], new=recorded_runs[1]), recorded_runs)
    try:
        safe_files.replace(file, html.encode(errors="backslashreplace"))
    except OSError as error:
        msg = f"{file}: {error.strerror}"
        raise InputError(msg) from error
    print_line(f"{file}  {len(html) / 1e6:,.1f} MB")
