"""Behaviour of an installed schedtrace before any request: engines and workers listen in their loops.

This imports no module of vLLM, and none of schedtrace in a process without a loop. A process that is forked
later is examined again, because by then its parent has imported the modules that the child runs.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from schedtrace.record.hooks import Method, wrap

LOOPS = ENGINE_LOOP, WORKER_LOOP = "run_busy_loop", "worker_busy_loop"
"""Methods that are the main loops of vLLM's engines and workers."""
_core = "vllm.v1.engine.core"
_waits = False
"""Whether this process has registered its hook for forks."""


def listen_while_they_run() -> None:
    """Have every engine and worker of this process, and of its forked children, listen in its loop."""
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
    """Return a wrapper of a loop that listens meanwhile, or only calls the loop if the import fails."""
    try:
        from schedtrace.record.live import control_answers

        around: Callable[..., Any] = getattr(control_answers, name)
    except Exception:
        return lambda original, *args, **kwargs: original(*args, **kwargs)
    return around
