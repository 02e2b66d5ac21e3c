"""Relation of a trace's clock to those of other processes and hosts.

Linux has one monotonic clock for all processes since it booted (``clock_gettime(2)``), save for those in a
time namespace of their own (``time_namespaces(7)``). Wall clocks of several hosts agree as well as NTP holds
them, which the kernel is told (``adjtimex(2)``).
"""

import contextlib
import ctypes
import hashlib
import time
from pathlib import Path
from typing import Any, NamedTuple

_READINGS = 5
_STA_UNSYNC = 0x40
"""Status bit of a wall clock that nothing disciplines (``<linux/timex.h>``)."""
_BOOT_ID, _TIME_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")


class Anchor(NamedTuple):
    """Moment on both clocks."""

    ns: int
    """``time.monotonic_ns``."""
    wall_us: int
    """Unix time in microseconds."""
    uncertainty_us: int
    """Largest distance of the two: half of the time between two readings of the first."""


def read_anchor() -> Anchor:
    """Read the clocks now; of some readings return the one that was interrupted least."""
    best: tuple[int, int, int] | None = None
    for _ in range(_READINGS):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = (after - before, (before + after) // 2, wall)
    assert best is not None  # noqa: S101  # there is a reading
    apart, ns, wall = best
    return Anchor(ns, wall // 1000, -(-apart // 2000))


def facts(anchor: Anchor) -> dict[str, Any]:
    """Return the fields of the header; None for what this machine does not tell; none in virtual time."""
    if getattr(time, "virtual", False):  # a simulation replaces the module
        return {}
    return {
        "monotonic_anchor_us": anchor.ns // 1000,
        "clock_id": clock_id(),
        "wall_uncertainty_us": anchor.uncertainty_us,
        "wall_max_error_us": wall_max_error_us(),
    }


def clock_id() -> str | None:
    """Return the same for all processes that read one monotonic clock: a hash of boot and time namespace."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        return None
    namespace = ""
    with contextlib.suppress(OSError):  # kernels before 5.6 have none
        namespace = str(_TIME_NAMESPACE.readlink())
    return hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=6).hexdigest()


class _Timex(ctypes.Structure):
    """The beginning of the kernel's ``struct timex``, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 512),
    )


def wall_max_error_us() -> int | None:
    """Return how far the wall clock may be off, as the kernel knows from NTP; None: no NTP, or not known."""
    state = _Timex()
    try:
        answer = ctypes.CDLL(None).adjtimex(ctypes.byref(state))
    except (OSError, AttributeError):
        return None
    return None if answer < 0 or state.status & _STA_UNSYNC else int(state.maxerror)
