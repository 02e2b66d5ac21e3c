"""The ``schedtrace`` command. Heavy modules are imported by the commands that need them."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from schedtrace.cli import (
    advise,
    analyze,
    attach,
    demo,
    diff,
    doctor,
    engines,
    export,
    findings,
    fleet,
    probe,
    queue,
    replay,
    report,
    request,
    run,
    simulate,
    step,
    sweep,
    watch,
)
from schedtrace.cli.options import WITH_OPTIONS_OF_VLLM, Command, forget_absurd_terminal, print_line
from schedtrace.errors import ExitCode, SchedtraceError
from schedtrace.model.printable import capped, shortened
from schedtrace.version import __version__

LONGEST_ARGUMENT = 1000
"""Maximum number of characters of an argument that is quoted in full; paths may be long."""
LONGEST_MESSAGE = 4000


class CommandGroups(TyperGroup):
    """The command ``schedtrace``, whose help lists its commands under headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  # click's signature
        """Write a section for each heading, in the order in which commands were added."""
        width = formatter.width - 6 - max(map(len, self.commands))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            heading = str(getattr(command, "rich_help_panel", None) or "Commands")
            sections.setdefault(heading, []).append((name, command.get_short_help_str(width)))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows, col_max=max(map(len, self.commands)) + 2)


app = typer.Typer(
    name="schedtrace",
    cls=CommandGroups,
    help="Why did vLLM's scheduler not schedule that request? Records every schedule() call, shows why token "
    "budget went unused, and compares configurations.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)

RECORD, READ, ASK, LIVE = "Record", "Read a recording", "Ask what if", "Look at running engines"
COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    RECORD: (doctor.doctor, run.run, attach.attach, attach.detach, attach.snapshot),
    READ: (
        demo.demo,
        analyze.analyze,
        report.report,
        step.step,
        request.request,
        diff.diff,
        fleet.fleet,
        export.export,
        findings.findings,
    ),
    ASK: (replay.replay, advise.advise, sweep.sweep, simulate.simulate),
    LIVE: (engines.engines, probe.probe, queue.queue, watch.watch),
}
"""Commands by their heading in ``--help``, each under its function's name."""
PASSES_OPTIONS_TO_VLLM = (run.run, simulate.simulate, diff.diff)
for _heading, _functions in COMMANDS.items():
    for _function in _functions:
        app.command(
            cls=Command,
            rich_help_panel=_heading,
            context_settings=WITH_OPTIONS_OF_VLLM if _function in PASSES_OPTIONS_TO_VLLM else None,
        )(_function)


def _show_version(asked: bool) -> None:
    if asked:
        print_line(f"schedtrace {__version__}")
        raise typer.Exit


@app.callback()
def global_options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Accept the options that all commands share."""


@cache
def all_commands() -> Any:
    """Return the command line as one group; it is cached, because it takes Typer long to build."""
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code; deliberate errors become one line on stderr."""
    forget_absurd_terminal()
    command = all_commands()
    command_line = sys.argv[1:] if arguments is None else arguments
    try:  # not app(): it would turn Ctrl-C and closed pipes into exit codes of its own
        with command.make_context("schedtrace", command_line or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except SchedtraceError as error:
        return _tell(_cut(str(error), command_line), error.exit_code, *error.details)
    except typer.TyperException as error:
        return _tell(_cut(error.format_message(), command_line), ExitCode.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _tell("interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has seen enough
        _drop_output()
    except OSError as error:
        if error.filename is None:  # a full disk under our own output, most likely
            _drop_output()
        return _tell(
            _cut(f"{error.filename or 'output'}: {error.strerror or error}", command_line), ExitCode.INPUT
        )
    return ExitCode.OK


def _drop_output() -> None:
    """Discard buffered output that cannot be written, which Python would retry at exit."""
    with suppress(io.UnsupportedOperation):  # an output in memory, of a caller in Python, is never full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _cut(message: str, command_line: list[str]) -> str:
    """Return the message with long arguments, and their values, shortened as ids are."""
    parts = {part for argument in command_line for part in (argument, *argument.split("="))}
    for part in sorted(parts, key=len, reverse=True):
        if len(part) > LONGEST_ARGUMENT:
            message = message.replace(part, capped(part))
    return shortened(message, LONGEST_MESSAGE)


def _tell(message: str, code: int, *details: str) -> int:
    for line in (f"schedtrace: {message}", *details):
        print_line(line, err=True)
    return code


def open_closed_streams() -> None:
    """Put the null device in place of stdin, stdout and stderr that were closed (``>&-``).

    Otherwise a file that is opened later would get the descriptor of a closed stream, and thus receive
    schedtrace's output.
    """
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004  # stderr
        os.set_inheritable(file, True)
    os.close(file)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115, PTH123  # stays open


def entry() -> None:
    """Run the console script."""
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without our characters gets question marks
    if "_SCHEDTRACE_COMPLETE" in os.environ:  # set by the shell's completion, which main() does not know
        app(prog_name="schedtrace")
    sys.exit(main())
