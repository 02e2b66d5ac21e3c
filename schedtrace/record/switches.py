"""Environment variables that switch something on or off, read alike everywhere.

vLLM loads this in each of its processes, whatever they say: it imports nothing but ``os``.
"""

import os

SWITCH = "SCHEDTRACE"
"""``off``: an installed schedtrace does nothing at all in this process."""

DIR = "SCHEDTRACE_DIR"
"""Folder that gets one run folder per vLLM start; setting it switches recording on."""

RUN_DIR = "SCHEDTRACE_RUN_DIR"
"""The run folder itself; found by the first vLLM process and inherited by the others."""

KEEP = "SCHEDTRACE_KEEP"
"""``120s`` or ``120s,64M``: keep so much in memory and write nothing until a snapshot is asked for."""

YES = frozenset({"1", "true", "yes", "on"})
NO = frozenset({"0", "false", "no", "off"})
EXPECTED = "expected yes or no (1, true, on; 0, false, off)"


class NotUnderstoodError(ValueError):
    """A variable has a value that means nothing; the text says which, and what is expected."""


def environment_value(variable: str) -> str:
    """Return what a variable is set to, without blanks around it; empty: it is not set."""
    return os.environ.get(variable, "").strip()


def is_on(variable: str, *, default: bool = False) -> bool:
    """Return what a variable says that is yes or no.

    Raises:
        NotUnderstoodError: If it says neither.
    """
    text = environment_value(variable).lower()
    if not text:
        return default
    if text not in YES | NO:
        msg = f"{variable}={environment_value(variable)}: {EXPECTED}"
        raise NotUnderstoodError(msg)
    return text in YES


def is_switched_off() -> bool:
    """Return whether this process is to be left alone; also where ``SCHEDTRACE`` is not understood."""
    try:
        return not is_on(SWITCH, default=True)
    except NotUnderstoodError:
        return True


def keeps_in_memory() -> bool:
    """Return whether this process is a flight recorder's: it writes nothing until a snapshot is asked for."""
    return environment_value(KEEP).lower() not in NO | {""}


def enabled() -> bool:
    """Return whether this process is asked to record."""
    return not is_switched_off() and (keeps_in_memory() or any(map(environment_value, (RUN_DIR, DIR))))
