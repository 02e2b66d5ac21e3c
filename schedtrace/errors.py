"""Errors that commands report in one line, with their exit codes.

SchedtraceError
├── UsageError      2  the command line or a configuration file is wrong
│   ├── MissingExtraError a package of an extra is not installed
│   └── NeverEndsError    a load never ends under the requested settings
├── InputError      3  a trace, run folder or workload file cannot be read
├── EngineError     4  vLLM did not start, or died
├── RecordingError  4  vLLM works, but its trace is missing or incomplete
└── InterruptedRunError 130  a person stopped a run; what was recorded stays
"""

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of the process."""

    OK = 0
    FINDINGS = 1
    USAGE = 2
    INPUT = 3
    ENGINE = 4
    INTERRUPTED = 130


def reason_of(error: Exception) -> str:
    """Return an exception's text in one line; for pydantic's errors, each reason with its setting."""
    if not hasattr(error, "errors"):
        return " ".join(str(error).split()) or type(error).__name__
    reasons = [
        (".".join(map(str, reason["loc"])), reason["msg"].removeprefix("Value error, "))
        for reason in error.errors()
    ]
    return "; ".join(f"{place}: {text}" if place else text for place, text in reasons)


class SchedtraceError(Exception):
    """Base of all errors raised on purpose; ``str(error)`` is its message.

    Args:
        message: Line that the user sees.
        details: Lines to print below the message, such as the end of a log.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, message: str = "", *details: str) -> None:
        super().__init__(message)
        self.details = details


class UsageError(SchedtraceError):
    """Error: the command line or a configuration file asks for something impossible."""

    exit_code = ExitCode.USAGE


class MissingExtraError(UsageError):
    """Error: a command needs a package that only an extra of schedtrace installs.

    Args:
        what: Command or option that needs the package.
        extra: Name of the extra, as in ``pip install "schedtrace[extra]"``.
        instead: Clause that states what works without the package.
    """

    def __init__(self, *, what: str, extra: str, instead: str = "") -> None:
        otherwise = f"; {instead}" if instead else ""
        super().__init__(f"{what} needs an extra: pip install 'schedtrace[{extra}]'{otherwise}")


class NeverEndsError(UsageError):
    """Error: a simulated load never ends under the settings that the user asked for."""


class InputError(SchedtraceError):
    """Error: a trace, run folder or workload file is missing or cannot be understood."""

    exit_code = ExitCode.INPUT


class EngineError(SchedtraceError):
    """Error: vLLM's engine did not start, or died while working."""

    exit_code = ExitCode.ENGINE


def engine_error(errors: Sequence[str]) -> EngineError:
    """Return one error about several engines, with a line for each engine."""
    return EngineError(errors[0], *(f"schedtrace: {error}" for error in errors[1:]))


class RecordingError(SchedtraceError):
    """Error: the recording cannot be written, or was removed."""

    exit_code = ExitCode.ENGINE


class InterruptedRunError(SchedtraceError):
    """Error: a person stopped a run."""

    exit_code = ExitCode.INTERRUPTED
