"""The ``schedtrace`` command. Heavy modules are imported by the commands that need them."""

import os
import sys
from typing import Annotated

import typer

from schedtrace import __version__
from schedtrace.cli import analyze, diff, run
from schedtrace.errors import ExitCode, SchedtraceError

app = typer.Typer(
    name="schedtrace",
    help="Why did vLLM's scheduler not schedule that request? Records every schedule() call, says why the "
    "token budget went unused, and compares configurations.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("run", context_settings=run.CONTEXT_SETTINGS)(run.run)
app.command("analyze")(analyze.analyze)
app.command("diff", context_settings=diff.CONTEXT_SETTINGS)(diff.diff)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"schedtrace {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of all commands."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code; every error on purpose is told on stderr."""
    try:
        app(args=arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except SchedtraceError as error:
        typer.echo(f"schedtrace: {error}", err=True)
        return error.exit_code
    except KeyboardInterrupt:
        typer.echo("schedtrace: interrupted", err=True)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    return ExitCode.OK


def entry() -> None:
    """The console script."""
    sys.exit(main())
