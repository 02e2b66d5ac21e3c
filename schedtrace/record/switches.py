"""Environment variables that switch features on or off, with a common syntax.

vLLM loads this module in each of its processes, so it imports nothing but ``os``.
"""

import os

SWITCH = "SCHEDTRACE"
"""Variable that switches an installed schedtrace off completely in this process (``off``)."""

DIR = "SCHEDTRACE_DIR"
"""Variable with the folder that gets one run folder per vLLM start; setting it switches recording on."""

RUN_DIR = "SCHEDTRACE_RUN_DIR"
"""Variable with the run folder itself; the first vLLM process sets it and the others inherit it."""

KEEP = "SCHEDTRACE_KEEP"
"""Variable with the time and size to keep in memory, such as ``120s`` or ``120s,64M``; nothing is written
until a snapshot."""

METRICS = "SCHEDTRACE_METRICS"
"""Variable that states whether engines export metrics, or the address at which they serve them."""

YES = frozenset({"1", "true", "yes", "on"})
NO = frozenset({"0", "false", "no", "off"})
EXPECTED = "expected yes or no (1, true, on; 0, false, off)"


class NotUnderstoodError(ValueError):
    """Error: a variable has an invalid value; the text names the variable and states the expected form."""


def environment_value(variable: str) -> str:
    """Return the value of a variable without surrounding spaces; empty if it is not set."""
    return os.environ.get(variable, "").strip()


def is_on(variable: str, *, default: bool = False) -> bool:
    """Return whether a variable is switched on.

    Raises:
        NotUnderstoodError: If the value means neither yes nor no.
    """
    text = environment_value(variable).lower()
    if not text:
        return default
    if text not in YES | NO:
        msg = f"{variable}={environment_value(variable)}: {EXPECTED}"
        raise NotUnderstoodError(msg)
    return text in YES


def is_switched_off() -> bool:
    """Return whether schedtrace must do nothing here; true also if ``SCHEDTRACE`` is invalid."""
    try:
        return not is_on(SWITCH, default=True)
    except NotUnderstoodError:
        return True


def keeps_in_memory() -> bool:
    """Return whether this process has a flight recorder, which writes only snapshots."""
    return environment_value(KEEP).lower() not in NO | {""}


def enabled() -> bool:
    """Return whether the environment asks this process to record."""
    return not is_switched_off() and (keeps_in_memory() or any(map(environment_value, (RUN_DIR, DIR))))
