"""Guards of a run: two processes above the engine process, so that no process outlives the run.

``supervise`` starts ``python -m schedtrace.engine.process_guard FD``. It forks twice before vLLM is imported:

    command -> outer guard -> inner guard -> engine process (``child``) -> all that vLLM starts

Linux gives orphans to their nearest ancestor that adopts them (``PR_SET_CHILD_SUBREAPER``), whatever thread,
fork, exec or session they come from. Every process of the run is therefore below a guard, and vLLM needs no
change. Each guard waits for the process below it. The inner guard also detects the end of the command and of
the outer guard, through pipes that only these hold open. Whichever process is killed, a guard remains.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from schedtrace.record.processes import children
from schedtrace.record.switches import RUN_DIR

GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL, for the engine process and then for the processes that it leaves
behind."""
LOOK_EVERY_S = 0.02
GUARD_NAME = "VLLM::Guard"
"""Process name that resembles vLLM's, so that killing schedtrace by name spares the guards, which then end
vLLM's processes."""
_PR_SET_CHILD_SUBREAPER = 36


def guard_engine() -> None:
    """Turn this process into both guards and the engine process."""
    events, ends = int(sys.argv[1]), [sys.stdin.fileno()]
    for watched in ([], ends):
        with contextlib.suppress(AttributeError):  # not Linux; it adopts orphans among its descendants
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # not inherited by a fork
        end, held = os.pipe()
        if child := os.fork():
            os.close(events)
            _guard(child, watched)
        os.close(held)
        ends.append(end)
    for end in ends[1:]:
        os.close(end)

    from schedtrace.engine import child as engine_process

    engine_process.run_commands(events)


def _guard(child: int, watched: Sequence[int]) -> NoReturn:
    """Wait for the child, end the processes that it leaves behind, and exit with its status.

    Args:
        child: Process to guard.
        watched: Pipes whose other ends only the processes above hold; if one of these processes ends, the
            child must end.
    """
    ended = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _send(child, signal.SIGTERM))
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(GUARD_NAME)
    with contextlib.suppress(OSError, KeyError):  # the folder of this run, even if another takes its name
        os.chdir(os.environ[RUN_DIR])
    if watched:
        threading.Thread(target=_end_when_left, args=(child, watched, ended), daemon=True).start()
    _, status = os.waitpid(child, 0)
    ended.set()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_children()
    if _hung_up([sys.stdin.fileno()], timeout_ms=0):
        _note_that_the_command_is_gone()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # so that the command sees by which signal
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_when_left(child: int, watched: Sequence[int], ended: threading.Event) -> None:
    """End the child once a process above it has ended: by SIGTERM or, if that takes too long, SIGKILL."""
    _hung_up(watched, timeout_ms=None)
    if not ended.is_set():
        _send(child, signal.SIGTERM)
        if not ended.wait(GRACE_S):
            _send(child, signal.SIGKILL)


def _end_children() -> None:
    """End all descendants, generation by generation: orphans become children of this process."""
    asked: set[int] = set()
    until = time.monotonic() + GRACE_S
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            late = time.monotonic() > until
            below = children(os.getpid())
            for pid in below if late else set(below) - asked:
                _send(pid, signal.SIGKILL if late else signal.SIGTERM)
            asked.update(below)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            if late and not below:  # a kernel that does not say who they are
                os.killpg(0, signal.SIGKILL)
            time.sleep(LOOK_EVERY_S)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _hung_up(ends: Sequence[int], *, timeout_ms: int | None) -> bool:
    """Return whether the other end of any of these pipes is closed."""
    poll = select.poll()
    for end in ends:
        poll.register(end, 0)
    return bool(poll.poll(timeout_ms))


def _note_that_the_command_is_gone() -> None:
    """Write into ``run.json`` how the run ended, unless the command has already done so."""
    from schedtrace.errors import InputError
    from schedtrace.model.manifest import read_manifest, write_manifest

    with contextlib.suppress(InputError, OSError):
        manifest = read_manifest(Path())
        if manifest is not None and manifest.status in {"starting", "running"}:
            manifest.status, manifest.error = "failed", "the schedtrace command was killed"
            write_manifest(Path(), manifest)


if __name__ == "__main__":
    guard_engine()
