"""The clock of traces for viewers: Unix time in nanoseconds, which torch's profiles have, too."""

from typing import NamedTuple

from schedtrace.model.trace import Header

QUARTER_NS = 7_889_238_000_000_000
"""A quarter of a mean Gregorian year, ``std::chrono::months(3)``."""


class Clock(NamedTuple):
    """How times of a run, in microseconds of its first trace's clock, become Unix time."""

    wall_ns: int
    """``CLOCK_REALTIME`` at 0; 0 where a foreign log has no wall clock."""
    monotonic_ns: int | None
    """``CLOCK_MONOTONIC`` at 0; None: not recorded, or a simulation's virtual time."""

    def ns(self, us: int) -> int:
        """Unix time; at least 0."""
        return max(0, self.wall_ns + 1000 * us)

    @property
    def torch_base_ns(self) -> int:
        """``baseTimeNanoseconds`` of a torch profile of the same time.

        Kineto counts from a multiple of three months since 1970 (its class ``ChromeTraceBaseTime``), so that
        microseconds fit into a JSON number and profiles agree.
        """
        return self.wall_ns // QUARTER_NS * QUARTER_NS


def clock_of(header: Header) -> Clock:
    """From the anchors of a trace's header."""
    monotonic_us = header.monotonic_anchor_us
    return Clock(1000 * header.wall_anchor_us, None if monotonic_us is None else 1000 * monotonic_us)
