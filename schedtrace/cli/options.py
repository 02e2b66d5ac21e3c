"""What several commands share: the output format, the run options' YAML files, and every way to print.

Data come from strangers: a page makes its sections from a printable copy of its document, a line is made
visible before it is printed, and rich is never asked to read markup or emoji names in either.
"""

import os
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

FormatOption = Annotated[
    Format, typer.Option("--format", help="Output format; markdown is for issues and pull requests.")
]


def stderr_console() -> "Console":
    """For progress."""
    from schedtrace.present.console import make_console

    return make_console(stderr=True)


def show(page: "Page[Any]", output_format: Format = Format.TEXT) -> None:
    """Print a page on stdout, as wide as the terminal; a pipe gets text 100 columns wide.

    It is written by ourselves: rich would turn a closed pipe into exit code 1.
    """
    width = None if sys.stdout.isatty() else _pipe_width()
    sys.stdout.write(renderer(output_format)(page, width=width))
    sys.stdout.flush()


def say(line: str, *, err: bool = False) -> None:
    """Print one line, on stderr if ``err``."""
    typer.echo(visible(line), err=err)


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
