"""Closed loops: clients that keep so many requests open, each sending its next one after an answer.

A replay at the recorded times would be wrong for them: an engine that answers sooner is sent more.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from schedtrace.model.message import Message
from schedtrace.model.say import say

FEWEST = 8
"""Requests that follow an answer: fewer show no pattern."""
AT_ONCE_FRAC = 0.05
"""Think time, as a share of the median end-to-end latency, up to which a client sends its next request at
once."""
MOSTLY_AT_ONCE_FRAC = 0.25
"""The same share for nine tenths of the requests."""
STEADY_FRAC = 0.35
"""Think times that differ by less than this share of their median are a client's, not chance."""
TIGHTER = 0.5
"""An arrival has to follow the answer before it at least twice as tightly as it follows earlier arrivals."""


@dataclass(frozen=True)
class ClosedLoop:
    """Number of clients and their think times."""

    clients: int
    think_us: tuple[float, ...]
    """Times from the n-th answer to the n-th request that follows an answer, in order."""

    @property
    def note(self) -> Message:
        """Sentence on how the loop is replayed."""
        if not self.think_us:
            return say("The load is that of {clients:n client} with one request open each.", self)
        return say(
            "The load is a closed loop: {clients:n client} with one request open each; the next one was "
            "sent {thinks:us} (median) after an answer, and so it is here.",
            self,
            thinks=round(median(self.think_us)),
        )


def closed_loop(
    arrived_us: Sequence[float], answered_us: Sequence[float | None], clients: int | None = None
) -> ClosedLoop | None:
    """Return the closed loop that a load is; None where arrivals do not follow answers.

    Of ``C`` clients the request ``C + n`` follows the answer ``n``. A closed loop shows in these lags: they
    are next to nothing, or steadier than the time from the request ``n`` to the request ``C + n``, which
    would be the steady one if a clock set the pace.

    Args:
        arrived_us: When each request was sent, in any order.
        answered_us: When each was answered, in the same order; None: never.
        clients: So many, whatever the times look like; None: as many as were open at most.
    """
    sent_us, gone = sorted(arrived_us), sorted(us for us in answered_us if us is not None)
    most = _most_open(sent_us, gone) if clients is None else clients
    lags = [sent - answered for sent, answered in zip(sent_us[most:], gone, strict=False)]
    loop = ClosedLoop(most, tuple(max(0.0, lag) for lag in lags))
    if clients is not None:
        return loop
    if len(lags) < FEWEST:
        return None
    took = median(b - a for a, b in zip(arrived_us, answered_us, strict=True) if b is not None)
    nine_tenths = quantiles(lags, n=10, method="inclusive")[-1]
    at_once = median(lags) <= AT_ONCE_FRAC * took and nine_tenths <= MOSTLY_AT_ONCE_FRAC * took
    periods = [later - earlier for later, earlier in zip(sent_us[most:], sent_us, strict=False)][: len(lags)]
    steady = _spread(lags) <= STEADY_FRAC * median(lags) and _spread(lags) < TIGHTER * _spread(periods)
    return loop if at_once or steady else None


def _most_open(sent_us: Sequence[float], gone: Sequence[float]) -> int:
    """Return the most requests that were open at once; an answer and the next request do not overlap."""
    return max((number - bisect.bisect_right(gone, us) for number, us in enumerate(sent_us, 1)), default=0)


def _spread(values: Sequence[float]) -> float:
    """Return the interquartile range: a pause of the client now and then does not count."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low
