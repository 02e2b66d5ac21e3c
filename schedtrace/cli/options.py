"""What several commands share: output formats, the run options' YAML files, and every way to print.

Data come from strangers. So a document is made printable before its view sees it, a line before it is
printed, and rich is never asked to read markup or emoji names in either.
"""

import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from schedtrace.errors import InputError, UsageError
from schedtrace.model.printable import json_of, printable, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Format(StrEnum):
    """How results are printed."""

    TEXT = "text"
    JSON = "json"


def stdout_console() -> "Console":
    """For results: follows the terminal; a pipe gets plain text 100 columns wide."""
    from schedtrace.present.console import make_console

    return make_console(width=None if sys.stdout.isatty() else _pipe_width())


def stderr_console() -> "Console":
    """For progress."""
    from schedtrace.present.console import make_console

    return make_console(stderr=True)


def show(view: "Callable[..., RenderableType]", document: Any, **options: Any) -> None:
    """Print a view of a document on stdout.

    Args:
        view: Of ``present/``; text that it returns is printed as it is.
        document: Structs of ``model/``.
        options: Of the view.
    """
    shown = view(printable(document), **options)
    if not isinstance(shown, str):
        console = stdout_console()
        with console.capture() as captured:
            console.print(shown)
        shown = captured.get()
    _write(shown)


def show_json(document: Any) -> None:
    """Print one JSON object on stdout and nothing else."""
    import msgspec

    _write(msgspec.json.format(json_of(document), indent=2).decode() + "\n")


def say(line: str, *, err: bool = False) -> None:
    """Print one line, on stderr if ``err``."""
    typer.echo(visible(line), err=err)


def _write(text: str) -> None:
    """To stdout by ourselves: rich would turn a closed pipe into exit code 1."""
    sys.stdout.write(text)
    sys.stdout.flush()


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
