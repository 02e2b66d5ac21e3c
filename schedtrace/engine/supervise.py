"""Supervisor of a run: it starts the engine process, communicates with it, and never waits forever."""

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from schedtrace.engine import run_spec
from schedtrace.engine.run_spec import RunSpec, model_is_local
from schedtrace.errors import EngineError, RecordingError, UsageError
from schedtrace.model import safe_files
from schedtrace.model.trace_bounds import PLAIN
from schedtrace.record import settings, switches

LOG_NAME = "vllm.log"
STOP_GRACE_S = 30.0
TAIL_LINES = 12

_ROOT_CAUSE = re.compile(r"\((?:EngineCore|Worker)\S* pid=\d+\).*?((?:\w+\.)*\w+(?:Error|Exception): .+)")


class EngineProcess:
    """vLLM's process below its guards, in its own session, so that Ctrl-C reaches only the supervisor.

    Args:
        run: Specification of the run.
        folder: Run folder; vLLM's output goes to ``vllm.log`` in it.

    Raises:
        RecordingError: If the log cannot be written.
    """

    def __init__(self, run: RunSpec, folder: Path) -> None:
        self.log_path = folder / LOG_NAME
        try:
            self._log: IO[bytes] = safe_files.writable(self.log_path)
        except OSError as error:
            msg = f"{self.log_path}: cannot be written ({error.strerror})"
            raise RecordingError(msg) from error
        self._lines: deque[bytes] = deque()
        self._rest = b""
        read_end, write_end = os.pipe()
        self._events = read_end
        try:
            self._process = subprocess.Popen(
                # Safe path: as vllm itself, it takes no module from whatever folder it is started in.
                [sys.executable, "-P", "-m", "schedtrace.engine.process_guard", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                start_new_session=True,
                env=_environment(run, folder),
            )
        finally:
            os.close(write_end)
        self.send_command(run_spec.Start(run))

    def send_command(self, command: run_spec.Command) -> None:
        """Send a command; ``read_events`` detects if the process is dead."""
        assert self._process.stdin is not None  # noqa: S101  # it was opened as a pipe above
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()

    def read_events(self) -> Iterator[run_spec.Event]:
        """Yield the process's events until it has stopped.

        Raises:
            UsageError: If vLLM refused the arguments.
            EngineError: If the engine did not start, or died; with the end of its log.
        """
        decode = msgspec.json.Decoder(run_spec.Event).decode
        while (line := self._next_line()) is not None:
            event = decode(line)
            if isinstance(event, run_spec.Failed):
                self._wait()
                if event.usage:
                    raise UsageError(event.message)
                raise self._failure(event.message)
            yield event
            if isinstance(event, run_spec.Stopped):
                self._wait()
                return
        code = self._process.wait()
        msg = f"the engine process ended with exit code {code}"
        if code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            msg = f"the engine process was ended by {signal.Signals(-code).name}{hint}"
        raise self._failure(msg)

    def stop(self) -> None:
        """Request a proper shutdown and wait for it; if it does not happen, end all processes."""
        if self._process.poll() is None:
            self._process.terminate()
        self._wait()

    def kill(self) -> None:
        """End all processes of the run within seconds."""
        self._hang_up()
        self._wait()

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_GRACE_S)
        self._hang_up()
        if self._process.wait() == -signal.SIGKILL:  # maybe both guards at once
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()

    def _hang_up(self) -> None:
        """Close the pipes, which tells the guards that the supervisor has ended."""
        assert self._process.stdin is not None  # noqa: S101  # as in ``send``
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _next_line(self) -> bytes | None:
        """Return the next event's line; None once the process is dead and all its events have been read.

        The engine core inherits the pipe, so the front end's death does not close the pipe and is checked for
        separately.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._events, selectors.EVENT_READ)
            while not self._lines:
                dead = self._process.poll() is not None
                if selector.select(timeout=0 if dead else 0.5):
                    data = os.read(self._events, 1 << 16)
                    if not data:
                        return None
                    *lines, self._rest = (self._rest + data).split(b"\n")
                    self._lines.extend(lines)
                elif dead:
                    return None
        return self._lines.popleft()

    def _failure(self, message: str) -> EngineError:
        lines = log_lines(self.log_path)
        cause = root_cause(lines)
        return EngineError(cause[0] if cause else message, *log_tail(lines), f"full log: {self.log_path}")


def root_cause(lines: list[str]) -> tuple[str, int] | None:
    """Return the error that made an engine process fail to start, and its line's index; None if unknown.

    The front end's own exception only states "see root cause above".
    """
    cause = None
    for at, line in enumerate(lines):
        match = _ROOT_CAUSE.search(line)
        if match and "Engine core initialization failed" not in line:
            cause = match[1], at
    return cause


def log_tail(lines: list[str], count: int = TAIL_LINES) -> list[str]:
    """Return the last informative lines of vLLM's log, up to the root cause if there is one."""
    cause = root_cause(lines)
    until = len(lines) if cause is None else cause[1] + 1
    telling = [line for line in lines[:until] if line.strip() and "[shutdown]" not in line]
    return [f"  | {line[:200]}" for line in telling[-count:]]


def log_lines(path: Path) -> list[str]:
    """Return the lines of vLLM's log; an empty list if there is no log."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _environment(run: RunSpec, folder: Path) -> dict[str, str]:
    """Return the child's environment: the user's, plus variables for the recording."""
    environment = dict(os.environ)
    for name in (switches.DIR, switches.KEEP, switches.SWITCH):  # whoever runs this asks for a recording
        environment.pop(name, None)
    environment[switches.RUN_DIR] = str(folder.absolute())
    environment[settings.TRIAL_IDS] = "1"
    if run.hash_ids:
        environment[settings.HASH_IDS] = "1"
    if run.lines is not None:
        environment[settings.LINES] = run.lines
    environment[settings.TRACE] = run.trace or PLAIN
    environment.setdefault("PYTHONUNBUFFERED", "1")
    if model_is_local(run.engine_args):  # nothing to fetch: do not wait for a hub that may be out of reach
        environment.setdefault("HF_HUB_OFFLINE", "1")
    return environment
