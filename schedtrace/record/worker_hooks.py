"""Hooks into a worker's process, which record when a batch's execution began and ended.

Both times are readings of the monotonic clock, which the processes of one host share. The times are attached
to the output that goes to the engine anyway; nothing else is sent, and nothing waits.
"""

import contextlib
import time
from functools import cache
from pathlib import Path
from typing import Any

from schedtrace.record.disguise import Beside
from schedtrace.record.hooks import Method, unwrap, wrap

Execution = tuple[str, int, int]
"""Boot id of the machine, and begin and end in nanoseconds of its monotonic clock."""

EXECUTION = "_schedtrace_execution"
"""Name of the attribute of a ``ModelRunnerOutput`` that contains the times of the execution."""


def execution_of(output: Any) -> tuple[str, int, int] | None:
    """Return the times that a worker of this machine attached to a ``ModelRunnerOutput``; None if absent."""
    noted: Execution | None = getattr(output, EXECUTION, None)
    return noted if noted is not None and noted[0] == machine() else None


@cache
def machine() -> str:
    """Return an id that processes share if they read the same monotonic clock; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_BEGAN: Beside[int] = Beside()
"""Time at which each worker began to execute the batch for which it samples tokens next."""


def wrap_worker() -> None:
    """Install the wrappers on vLLM's wrapper around the chosen worker class (0.12 and newer)."""
    from vllm.v1.worker import worker_base

    wrapper: Any = getattr(worker_base, "WorkerWrapperBase", None)
    if wrapper is None:
        return
    wrap(wrapper, "execute_model", _execute_model)
    if hasattr(worker_base.WorkerBase, "sample_tokens") and not hasattr(wrapper, "sample_tokens"):
        wrapper.sample_tokens = _reach_through
        wrap(wrapper, "sample_tokens", _sample_tokens)


def unwrap_worker() -> None:
    """Remove the wrappers."""
    from vllm.v1.worker import worker_base

    wrapper: Any = getattr(worker_base, "WorkerWrapperBase", None)
    if wrapper is None:
        return
    unwrap(wrapper, "execute_model", _execute_model)
    unwrap(wrapper, "sample_tokens", _sample_tokens)
    if vars(wrapper).get("sample_tokens") is _reach_through:
        del wrapper.sample_tokens


def _reach_through(self: Any, *args: object, **kwargs: object) -> Any:
    """Call the method of the wrapped worker, as ``WorkerWrapperBase.__getattr__`` does."""
    return self.worker.sample_tokens(*args, **kwargs)


def _execute_model(original: Method, worker: Any, *args: object, **kwargs: object) -> Any:
    began_ns = time.monotonic_ns()
    output = original(worker, *args, **kwargs)
    if output is None:  # sampling is another call
        _BEGAN.store(worker, began_ns)
    else:
        _note(output, began_ns)
    return output


def _sample_tokens(original: Method, worker: Any, *args: object, **kwargs: object) -> Any:
    output = original(worker, *args, **kwargs)
    began_ns = _BEGAN.look_up(worker)
    if began_ns is not None and output is not None:
        _BEGAN.drop(worker)
        _note(output, began_ns)
    return output


def _note(output: Any, began_ns: int) -> None:
    """Attach the times to an output with requests, which vLLM's shared empty output does not have."""
    with contextlib.suppress(Exception):
        if not hasattr(output, "get_output"):
            if getattr(output, "req_ids", None):
                setattr(output, EXECUTION, (machine(), began_ns, time.monotonic_ns()))
            return
        get_output = output.get_output

        def awaited_output() -> Any:
            """Return the output when it is ready, on another thread."""
            ready = get_output()
            _note(ready, began_ns)
            return ready

        output.get_output = awaited_output
