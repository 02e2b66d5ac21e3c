"""Behaviour of an installed schedtrace before anybody asks: engines and workers listen in their loops.

No module of vLLM is imported for that, and none of schedtrace's in a process that has no loop. A process that
is forked later is looked at again: its parent has imported by then what it is to run.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from schedtrace.record.hooks import Method, wrap

LOOPS = ENGINE_LOOP, WORKER_LOOP = "run_busy_loop", "worker_busy_loop"
"""Methods in which vLLM's engines and workers spend their lives."""
_core = "vllm.v1.engine.core"
_waits = False
"""State of the hook for forks of this process: True once it is registered."""


def listen_while_they_run() -> None:
    """Have every engine and every worker of this process, and of those forked from it, listen in its loop."""
    global _waits  # noqa: PLW0603  # of the process
    _wrap_loops()
    if not _waits:
        _waits = True
        os.register_at_fork(after_in_child=_wrap_loops)


def _wrap_loops() -> None:
    for module, owner, name, around in (
        (_core, "EngineCoreProc", ENGINE_LOOP, _engine_loop),
        (_core, "DPEngineCoreProc", ENGINE_LOOP, _engine_loop),
        ("vllm.v1.executor.multiproc_executor", "WorkerProc", WORKER_LOOP, _worker_loop),
    ):
        with suppress(Exception):  # then nobody can attach
            loop_class = getattr(sys.modules.get(module), owner, None)
            if loop_class is not None:
                wrap(loop_class, name, around)


def _engine_loop(original: Method, core: Any, *args: object, **kwargs: object) -> Any:
    return _listening("engine_loop")(original, core, *args, **kwargs)


def _worker_loop(original: Method, worker: Any, *args: object, **kwargs: object) -> Any:
    return _listening("worker_loop")(original, worker, *args, **kwargs)


def _listening(name: str) -> Callable[..., Any]:
    """Return a wrapper of a loop that listens; one that does nothing where schedtrace is not importable."""
    try:
        from schedtrace.record.live import control_answers

        around: Callable[..., Any] = getattr(control_answers, name)
    except Exception:
        return lambda original, *args, **kwargs: original(*args, **kwargs)
    return around
