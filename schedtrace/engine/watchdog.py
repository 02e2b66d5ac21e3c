"""Notices that the engine core died: vLLM's synchronous client would wait for its output for ever."""

import os
import signal
import threading
import time
from typing import Any, NoReturn

from schedtrace.errors import EngineError

LOOK_EVERY_S = 0.25


def watch(client: Any) -> None:
    """Raise ``EngineError`` in the main thread once vLLM's client knows that its engine core is dead.

    Args:
        client: vLLM's ``MPClient``; one that runs the engine in this process has nothing to watch.
    """
    resources = getattr(client, "resources", None)
    if resources is None:
        return

    def died(_signal: int, _frame: Any) -> NoReturn:
        raise EngineError(_how(resources))

    def look() -> None:
        while not resources.engine_dead:
            time.sleep(LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, died)
    threading.Thread(target=look, name="schedtrace-watchdog", daemon=True).start()


def stop_watching() -> None:
    """From now on the engine core may end: it was asked to."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _how(resources: Any) -> str:
    """What is known of the dead processes."""
    processes = getattr(resources.engine_manager, "processes", ())
    codes = [process.exitcode for process in processes if process.exitcode not in {None, 0}]
    if any(code == -signal.SIGKILL for code in codes):
        return "vLLM's engine core was killed (SIGKILL; out of memory?)"
    if codes:
        return f"vLLM's engine core died (exit code {codes[0]})"
    return "vLLM's engine core died"
