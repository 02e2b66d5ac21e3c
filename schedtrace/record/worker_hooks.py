"""Hooks into a worker's process: when it began to execute a batch, and when the output was ready.

Both are readings of its monotonic clock, which processes of one host share, put on the output that goes to
the engine anyway; nothing else is sent, and nothing is waited for.
"""

import contextlib
import functools
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from schedtrace.record.disguise import Beside
from schedtrace.record.hooks import Method, unwrap, wrap

Execution = tuple[str, int, int]
"""Machine's boot, and begin and end in nanoseconds of its monotonic clock."""

EXECUTION = "_schedtrace_execution"
"""Attribute of a ``ModelRunnerOutput``."""


def execution_of(output: Any) -> tuple[str, int, int] | None:
    """Return the times that a worker of this machine put on a ``ModelRunnerOutput``; None if absent."""
    noted: Execution | None = getattr(output, EXECUTION, None)
    return noted if noted is not None and noted[0] == machine() else None


@cache
def machine() -> str:
    """Return an id that processes share if their monotonic clocks are the same; empty if not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_BEGAN: Beside[int] = Beside()
"""Time at which each worker began to execute the batch that it is to sample tokens of."""


def wrap_worker() -> None:
    """Install the wrappers on vLLM's own wrapper of whichever worker class it chose (0.12 and newer)."""
    from vllm.v1.worker import worker_base

    wrapper: Any = getattr(worker_base, "WorkerWrapperBase", None)
    if wrapper is None:
        return
    wrap(wrapper, "execute_model", _execute_model)
    if hasattr(worker_base.WorkerBase, "sample_tokens") and not hasattr(wrapper, "sample_tokens"):
        wrapper.sample_tokens = _reach_through
        wrap(wrapper, "sample_tokens", _sample_tokens)


def unwrap_worker() -> None:
    """Take them away again."""
    from vllm.v1.worker import worker_base

    wrapper: Any = getattr(worker_base, "WorkerWrapperBase", None)
    if wrapper is None:
        return
    unwrap(wrapper, "execute_model", _execute_model)
    unwrap(wrapper, "sample_tokens", _sample_tokens)
    if vars(wrapper).get("sample_tokens") is _reach_through:
        del wrapper.sample_tokens


def _reach_through(self: Any, *args: object, **kwargs: object) -> Any:
    """Call the wrapped worker's method, as ``WorkerWrapperBase.__getattr__`` does."""
    return self.worker.sample_tokens(*args, **kwargs)


def _execute_model(original: Method, worker: Any, *args: object, **kwargs: object) -> Any:
    began_ns = time.monotonic_ns()
    output = original(worker, *args, **kwargs)
    if output is None:  # sampling is another call
        _BEGAN.put(worker, began_ns)
    else:
        _note(output, began_ns)
    return output


def _sample_tokens(original: Method, worker: Any, *args: object, **kwargs: object) -> Any:
    output = original(worker, *args, **kwargs)
    began_ns = _BEGAN.get(worker)
    if began_ns is not None and output is not None:
        _BEGAN.drop(worker)
        _note(output, began_ns)
    return output


def _note(output: Any, began_ns: int) -> None:
    with contextlib.suppress(Exception):
        if hasattr(output, "get_output"):  # ready later, on another thread
            output.get_output = functools.partial(_resolved, output.get_output, began_ns)
        else:
            _put(output, began_ns)


def _resolved(get_output: Callable[[], Any], began_ns: int) -> Any:
    output = get_output()
    with contextlib.suppress(Exception):
        _put(output, began_ns)
    return output


def _put(output: Any, began_ns: int) -> None:
    """Put the times on an output, unless it is vLLM's shared empty one or a pipeline stage hands it on."""
    if getattr(output, "req_ids", None):
        setattr(output, EXECUTION, (machine(), began_ns, time.monotonic_ns()))
