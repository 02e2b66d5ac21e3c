"""Clock of a trace, and its relation to those of other processes and hosts.

Linux has one monotonic clock since boot for all processes (``clock_gettime(2)``), except for those in a
separate time namespace (``time_namespaces(7)``). The wall clocks of several hosts agree as closely as NTP
keeps them, and the kernel knows how closely (``adjtimex(2)``).
"""

import contextlib
import ctypes
import hashlib
import time
from pathlib import Path
from typing import Any, NamedTuple

_READINGS = 5
_STA_UNSYNC = 0x40
"""Status bit of a wall clock that is not synchronized (``<linux/timex.h>``)."""
_BOOT_ID, _TIME_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")


class Anchor(NamedTuple):
    """Readings of the monotonic and the wall clock at the same moment."""

    ns: int
    """Reading of ``time.monotonic_ns``."""
    wall_us: int
    """Unix time in microseconds."""
    uncertainty_us: int
    """Maximum time between the two readings, in microseconds: half of the time between the monotonic readings
    right before and right after that of the wall clock."""


CLOCK_SET_US = 20_000
"""Difference in microseconds above which the wall clock counts as having been set: NTP sets it by a tenth of
a second or more, and corrects a smaller error by slewing both clocks equally."""


class RecordingClock:
    """Clock of one trace, in microseconds.

    Args:
        anchor_ns: Reading of the monotonic clock, in nanoseconds, at which the trace's time is 0.
        wall_us: Unix time in microseconds at that moment.
    """

    def __init__(self, anchor_ns: int, wall_us: int = 0) -> None:
        self.anchor_ns, self.wall_us = anchor_ns, wall_us

    def since_anchor(self, ns: int) -> int:
        """Return a monotonic time in nanoseconds as microseconds of the trace's clock."""
        return (ns - self.anchor_ns) // 1000

    def elapsed_us(self) -> int:
        """Return the current time in microseconds of the trace's clock."""
        return self.since_anchor(time.monotonic_ns())

    def from_wall_clock(self, unix_s: float, now_us: int) -> int:
        """Convert a Unix time to the trace's microseconds, even if the wall clock has been set since.

        Args:
            unix_s: Unix time of a recent moment; a future time was read before the clock was set back.
            now_us: Current time in the trace's microseconds.
        """
        wall_us, at_us = time.time_ns() // 1000, int(unix_s * 1e6)
        if at_us <= wall_us and abs(wall_us - now_us - self.wall_us) >= CLOCK_SET_US:
            self.wall_us = wall_us - now_us
        return at_us - self.wall_us


def read_anchor() -> Anchor:
    """Read both clocks several times; return the pair of readings that are closest in time."""
    best: tuple[int, int, int] | None = None
    for _ in range(_READINGS):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = (after - before, (before + after) // 2, wall)
    assert best is not None  # noqa: S101  # there is a reading
    apart, ns, wall = best
    return Anchor(ns, wall // 1000, -(-apart // 2000))


def facts(anchor: Anchor) -> dict[str, Any]:
    """Return the header's fields about clocks, with None for unknown facts; empty in virtual time."""
    if getattr(time, "virtual", False):  # a simulation replaces the module
        return {}
    return {
        "monotonic_anchor_us": anchor.ns // 1000,
        "clock_id": clock_id(),
        "wall_uncertainty_us": anchor.uncertainty_us,
        "wall_max_error_us": wall_max_error_us(),
    }


def clock_id() -> str | None:
    """Return an id shared by all processes that read one monotonic clock: a hash of boot and namespace."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        return None
    namespace = ""
    with contextlib.suppress(OSError):  # kernels before 5.6 have none
        namespace = str(_TIME_NAMESPACE.readlink())
    return hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=6).hexdigest()


class _Timex(ctypes.Structure):
    """Beginning of the kernel's ``struct timex``, with room for the rest."""

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
    """Return the wall clock's maximum error in microseconds, as NTP reported it; None if unknown."""
    state = _Timex()
    try:
        answer = ctypes.CDLL(None).adjtimex(ctypes.byref(state))
    except (OSError, AttributeError):
        return None
    return None if answer < 0 or state.status & _STA_UNSYNC else int(state.maxerror)
