"""Closed loops: clients that keep so many requests open, each sending its next one after an answer.

A replay at the recorded times would be wrong for them: an engine that answers sooner is sent more.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST = 8
"""Requests that follow an answer: fewer show no pattern."""
AT_ONCE_FRAC = 0.05
"""Of the median end-to-end latency: a client that thinks so little sends its next request at once."""
MOSTLY_AT_ONCE_FRAC = 0.25
"""Likewise of nine tenths of the requests."""
STEADY_FRAC = 0.35
"""Think times that differ by less than this share of their median are a client's, not chance."""
TIGHTER = 0.5
"""An arrival has to follow the answer before it at least twice as tightly as it follows earlier arrivals."""


@dataclass(frozen=True)
class ClosedLoop:
    """So many clients, and how long they think."""

    clients: int
    think_us: tuple[float, ...]
    """From the n-th answer to the n-th request that follows one, in order."""


def closed_loop(
    arrived_us: Sequence[float], answered_us: Sequence[float | None], clients: int | None = None
) -> ClosedLoop | None:
    """The closed loop that a load is; None where arrivals do not follow answers.

    Of ``C`` clients the request ``C + n`` follows the answer ``n``. A closed loop shows in these lags: they
    are next to nothing, or steadier than the time from the request ``n`` to the request ``C + n``, which
    would be the steady one if a clock set the pace.

    Args:
        arrived_us: When each request was sent, in any order.
        answered_us: When each was answered, in the same order; None: never.
        clients: So many, whatever the times look like; None: as many as were open at most.
    """
    came = np.sort(np.asarray(arrived_us, dtype=float))
    gone = np.sort(np.asarray([one for one in answered_us if one is not None], dtype=float))
    asked = clients is not None
    clients = clients or _most_open(came, gone)
    following = min(len(came) - clients, len(gone))
    if following < (1 if asked else FEWEST):
        return ClosedLoop(clients, ()) if asked else None
    lags = came[clients : clients + following] - gone[:following]
    loop = ClosedLoop(clients, tuple(float(lag) for lag in np.clip(lags, 0, None)))
    if asked:
        return loop
    took = float(np.median([b - a for a, b in zip(arrived_us, answered_us, strict=True) if b is not None]))
    at_once = np.median(lags) <= AT_ONCE_FRAC * took and np.quantile(lags, 0.9) <= MOSTLY_AT_ONCE_FRAC * took
    periods = came[clients : clients + following] - came[:following]
    steady = _spread(lags) <= STEADY_FRAC * np.median(lags) and _spread(lags) < TIGHTER * _spread(periods)
    return loop if at_once or steady else None


def _most_open(came: "np.ndarray", gone: "np.ndarray") -> int:
    """Requests that were open at once, at most; an answer and the request that follows it do not overlap."""
    ended = gone.tolist()
    return max(number + 1 - bisect.bisect_right(ended, us) for number, us in enumerate(came.tolist()))


def _spread(values: "np.ndarray") -> float:
    """The interquartile range: a pause of the client now and then does not count."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low)
