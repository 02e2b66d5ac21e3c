"""When a worker executed a batch, as told by the worker itself.

The worker's process has the plugin, too. It puts two readings of its monotonic clock on the output that it
returns anyway; processes of one host read the same clock.
"""

from functools import cache
from pathlib import Path
from typing import Any

Execution = tuple[str, int, int]
"""Which boot of which machine; begin and end in nanoseconds."""

NAME = "_schedtrace_execution"
"""Attribute of a ``ModelRunnerOutput``."""


def execution_of(output: Any) -> tuple[str, int, int] | None:
    """What a worker of this machine has noted on a ``ModelRunnerOutput``; None if nothing, or elsewhere."""
    noted: Execution | None = getattr(output, NAME, None)
    return noted if noted is not None and noted[0] == machine() else None


@cache
def machine() -> str:
    """Equal for processes whose monotonic clocks are one and the same; empty where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
