"""Entry point ``vllm.general_plugins``, which vLLM loads at the start of each of its processes.

The user may not have asked for a recording. The plugin therefore imports very little, touches no scheduler,
and logs nothing (``docs/recording.md``, "Installed but idle"): engines and workers only listen in their
loops. In a process without a loop, no module of vLLM and few of schedtrace are imported. A process that is
forked later is examined again, because by then its parent has imported the modules that the child runs.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from schedtrace.record.switches import METRICS, SWITCH, NotUnderstoodError, enabled, environment_value, is_on

LOOPS = ENGINE_LOOP, WORKER_LOOP = "run_busy_loop", "worker_busy_loop"
"""Methods that run the main loops of vLLM's engines and workers."""
_CORE = "vllm.v1.engine.core"
_examines_forks = False
"""Whether this process has registered its hook for forks."""


def register() -> None:
    """Listen for clients, and record if the environment asks for it; never raise an error.

    With ``SCHEDTRACE=off``, this does nothing. vLLM calls it once per process, or more often; a second
    installation changes nothing.
    """
    try:
        if not is_on(SWITCH, default=True):
            return
        listen_while_they_run()
        if enabled():
            from schedtrace.record.scheduler_choice import record_from_the_start

            record_from_the_start()
        if "spans=" in environment_value(METRICS):
            from schedtrace.record.otel.spans import choose_span_ids

            choose_span_ids()
    except Exception as error:
        with suppress(Exception):
            from schedtrace.record.log import logger

            why = str(error) if isinstance(error, NotUnderstoodError) else repr(error)
            logger.warning("schedtrace: switched off, nobody can attach: {}", why)


def listen_while_they_run() -> None:
    """Make every engine and worker of this process, and of its forked children, listen in its loop."""
    global _examines_forks  # noqa: PLW0603  # of the process
    _wrap_loops()
    if not _examines_forks:
        _examines_forks = True
        os.register_at_fork(after_in_child=_wrap_loops)


def _wrap_loops() -> None:
    from schedtrace.record.hooks import wrap

    for module, owner, name, around in (
        (_CORE, "EngineCoreProc", ENGINE_LOOP, _engine_loop),
        (_CORE, "DPEngineCoreProc", ENGINE_LOOP, _engine_loop),
        ("vllm.v1.executor.multiproc_executor", "WorkerProc", WORKER_LOOP, _worker_loop),
    ):
        with suppress(Exception):  # then nobody can attach
            loop_class = getattr(sys.modules.get(module), owner, None)
            if loop_class is not None:
                wrap(loop_class, name, around)


def _engine_loop(original: Callable[..., Any], core: Any, *args: object, **kwargs: object) -> Any:
    return _listening("engine_loop")(original, core, *args, **kwargs)


def _worker_loop(original: Callable[..., Any], worker: Any, *args: object, **kwargs: object) -> Any:
    return _listening("worker_loop")(original, worker, *args, **kwargs)


def _listening(name: str) -> Callable[..., Any]:
    """Return a wrapper that listens while a loop runs; if the import fails, it only runs the loop."""
    try:
        from schedtrace.record.live import control_answers

        around: Callable[..., Any] = getattr(control_answers, name)
    except Exception:
        return lambda original, *args, **kwargs: original(*args, **kwargs)
    return around
