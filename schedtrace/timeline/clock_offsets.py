"""The clocks of two traces against each other."""

from typing import NamedTuple

from schedtrace.model.trace import Header


class Offset(NamedTuple):
    """What to add to times of one trace to have them on the clock of another, in microseconds."""

    us: int
    uncertainty_us: int | None
    """It may be off by so much; None: not known, since a host's wall clock is not known to be right."""


def offset(of: Header, to: Header) -> Offset:
    """From the clock of the trace with header ``of`` to that of the one with header ``to``.

    Processes of one machine read one monotonic clock: exact. Otherwise by wall clocks: the uncertainties of
    both readings and, unless it is one host, what NTP leaves open on each.
    """
    if (
        of.clock_id is not None
        and of.clock_id == to.clock_id
        and of.monotonic_anchor_us is not None
        and to.monotonic_anchor_us is not None
    ):
        return Offset(of.monotonic_anchor_us - to.monotonic_anchor_us, 0)
    parts = [of.wall_uncertainty_us, to.wall_uncertainty_us]
    if of.host != to.host:
        parts += [of.wall_max_error_us, to.wall_max_error_us]
    known = [part for part in parts if part is not None]
    return Offset(of.wall_anchor_us - to.wall_anchor_us, sum(known) if len(known) == len(parts) else None)
