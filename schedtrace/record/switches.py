"""Environment variables that switch something on or off, with one syntax for all.

vLLM loads this module in each of its processes, so it imports nothing but ``os``.
"""

import os

SWITCH = "SCHEDTRACE"
"""Variable ``off``: an installed schedtrace does nothing at all in this process."""

DIR = "SCHEDTRACE_DIR"
"""Folder that gets one run folder per vLLM start; setting it switches recording on."""

RUN_DIR = "SCHEDTRACE_RUN_DIR"
"""Run folder itself; the first vLLM process sets it and the others inherit it."""

KEEP = "SCHEDTRACE_KEEP"
"""Time and size to keep in memory, such as ``120s`` or ``120s,64M``; nothing is written until a snapshot."""

METRICS = "SCHEDTRACE_METRICS"
"""Whether engines make metrics, or the address on which they serve them."""

YES = frozenset({"1", "true", "yes", "on"})
NO = frozenset({"0", "false", "no", "off"})
EXPECTED = "expected yes or no (1, true, on; 0, false, off)"


class NotUnderstoodError(ValueError):
    """Error: a variable has an invalid value; the text names it and says what is expected."""


def environment_value(variable: str) -> str:
    """Return the value of a variable without surrounding spaces; empty if it is not set."""
    return os.environ.get(variable, "").strip()


def is_on(variable: str, *, default: bool = False) -> bool:
    """Return whether a variable is switched on.

    Raises:
        NotUnderstoodError: If the value is neither yes nor no.
    """
    text = environment_value(variable).lower()
    if not text:
        return default
    if text not in YES | NO:
        msg = f"{variable}={environment_value(variable)}: {EXPECTED}"
        raise NotUnderstoodError(msg)
    return text in YES


def is_switched_off() -> bool:
    """Return whether schedtrace must do nothing in this process; also if ``SCHEDTRACE`` is invalid."""
    try:
        return not is_on(SWITCH, default=True)
    except NotUnderstoodError:
        return True


def keeps_in_memory() -> bool:
    """Return whether this process has a flight recorder, which writes nothing before a snapshot."""
    return environment_value(KEEP).lower() not in NO | {""}


def enabled() -> bool:
    """Return whether the environment asks this process to record."""
    return not is_switched_off() and (keeps_in_memory() or any(map(environment_value, (RUN_DIR, DIR))))
