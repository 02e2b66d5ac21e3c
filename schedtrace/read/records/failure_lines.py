"""Lines with which vLLM fails: the first error of a start that failed, or of an engine that died."""

import re

from schedtrace.model.printable import hide_in_text, shortened
from schedtrace.model.records import Failure

MARKERS = (
    b"failed to start.",
    b"Engine core initialization failed",
    b"encountered a fatal error",
    b"hit an exception.",
    b"died unexpectedly",
    b"EngineCore hit an exception",
    b"engine_core = EngineCoreProc(",
    b"EngineDeadError",
    b"[shutdown] ",
    b"Traceback (most recent call last):",
    b"  Value error, ",
    b"Error: ",
    b"Exception: ",
)
_START_FAILED = re.compile(r"(?:EngineCore|WorkerProc) failed to start\.|Engine core initialization failed")
_SERVING_FAILED = re.compile(
    r"EngineCore (?:encountered a fatal error|hit an exception)|WorkerProc hit an exception\."
    r"|\bEngineDeadError\b"
)
_IN_START = "engine_core = EngineCoreProc("
"""Code in the traceback of a start that failed. Releases up to 0.8.4 announce it as any other failure."""
_WORKER_DIED = re.compile(
    r"Worker proc (?P<name>[\w-]{1,100}) died unexpectedly(?P<code> \(exit code: [^)]{1,20}\))?"
)
_ERROR = re.compile(r"(?:^|[\])] |\s)(?P<error>(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S.*)$")
_UNCAUGHT = re.compile(r"(?:^|\) |\| )Traceback \(most recent call last\):$")
"""Traceback without a level and a time: Python prints it for an error that ends a process."""
_STAMPED = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) ")
_DETAIL = re.compile(r"validation errors? for \w{1,200}$")
"""End of pydantic's errors, which have the reason on a later line."""
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError|See stack trace"
)
"""Errors that another one caused."""
_SHUTDOWN = "[shutdown] API server: shutdown triggered"
"""Message about a shutdown that was asked for, which may end in an ``EngineDeadError``; vLLM prints other
messages with ``[shutdown]`` whenever it cleans up.
"""
_EXITED = "engine core exited unexpectedly"
LONGEST_REASON = 400
NEAR = 2000
"""Lines within which an error belongs to the failure: several workers write their tracebacks at once."""


class FailureLines:
    """The first error after vLLM says that it fails, else the last one before."""

    def __init__(self) -> None:
        self._stage: str | None = None
        self._stage_line = 0
        self._error: tuple[int, str] | None = None
        """Last error before the failure is announced, or the first after."""
        self._is_first_after = False
        self._worker: str | None = None
        self._shuts_down = False
        self._exited = False
        self._uncaught: int | None = None
        """Number of the line at which an uncaught traceback begins, before any announced failure."""
        self._uncaught_error: tuple[int, str] | None = None

    def take(self, number: int, line: str) -> None:
        """Take what a line says about a failure."""
        if worker := _WORKER_DIED.search(line):
            self._worker = self._worker or worker["name"] + (worker["code"] or "")
            self._announce("serving", number)
        elif _START_FAILED.search(line):
            self._announce("start", number)
        elif _SHUTDOWN in line:
            self._shuts_down = True
        elif _EXITED in line and not self._shuts_down:
            self._exited = True
            self._announce("serving", number)
        elif (failed := _SERVING_FAILED.search(line)) and not (
            self._shuts_down and failed[0] == "EngineDeadError"
        ):
            self._announce("serving", number)
        elif _IN_START in line and self._stage is not None and number - self._stage_line < NEAR:
            self._stage = "start"
        elif _UNCAUGHT.search(line) and not _STAMPED.search(line):
            self._uncaught, self._uncaught_error = number, None
        self._take_uncaught(number, line)
        error = _ERROR.search(line)
        if error is None or _CONSEQUENCE.search(error["error"]) or self._is_first_after:
            return
        if self._stage is not None and number - self._stage_line > NEAR:
            return
        self._error = number, shortened(hide_in_text(error["error"]), LONGEST_REASON)
        self._is_first_after = self._stage is not None

    def _take_uncaught(self, number: int, line: str) -> None:
        """Take the error that ends an uncaught traceback, with the detail on the line after it."""
        if self._uncaught is None or number - self._uncaught > NEAR or _STAMPED.search(line):
            return
        if self._uncaught_error is None and (error := _ERROR.search(line)):
            self._uncaught_error = number, error["error"]
        elif self._uncaught_error is not None and "  Value error, " in line:
            place, text = self._uncaught_error
            if _DETAIL.search(text):
                self._uncaught_error = place, f"{text}: {line[line.index('Value error, ') :]}"

    @property
    def announced(self) -> bool:
        """Whether a line says that the server fails."""
        return self._stage is not None

    def _announce(self, stage: str, number: int) -> None:
        if self._stage is None:
            self._stage, self._stage_line = stage, number
            if self._error is not None and number - self._error[0] > NEAR:
                self._error = None

    def failure(self, *, has_engine: bool) -> Failure | None:
        """Return the failure; None if the lines announce none.

        Args:
            has_engine: Whether the server started: an uncaught error before is then not why it ended.
        """
        if self._stage is None:
            if has_engine or self._uncaught_error is None:
                return None
            place, error = self._uncaught_error
            reason = shortened(hide_in_text(error), LONGEST_REASON)
            return Failure(stage="start", reason=reason, line=place, worker_died=None)
        line, reason = self._error or (self._stage_line, "")
        if not reason and self._worker:
            reason = f"worker process {self._worker} died"
        elif not reason:
            gone = "the engine's process exited unexpectedly"
            reason = gone if self._exited else "the log does not name the error"
        return Failure(
            stage="start" if self._stage == "start" else "serving",
            reason=reason,
            line=line,
            worker_died=self._worker,
        )
