"""Interval of a predicted change: the fit's error, drift between trials, another start, extrapolation."""

import math
import statistics
from collections.abc import Sequence

from scipy import stats

from schedtrace.model.trace import Header

COVERAGE = 0.9
RESTARTED_CPU = 0.1
"""Standard deviation of the logarithm of the ratio of the same steps' times in two starts of a CPU engine.

Measured, as is that of an H100, which is 0.002 and left out: ``docs/what-if.md``, "Another start of the
engine".
"""


def restart_factor(header: Header, seed: int) -> float:
    """Return by how much longer steps take in another start of the engine: a deviation up or down, in turn.

    The recording is of one start, so it cannot show this.

    Args:
        header: Header of the engine's trace.
        seed: Number of the replay.
    """
    if header.device != "cpu" or header.clock == "virtual":
        return 1.0
    return math.exp(RESTARTED_CPU if seed % 2 else -RESTARTED_CPU)


def ratio_interval(
    ratio: float, resampled: list[float], was: list[float], replayed: list[float]
) -> tuple[float | None, float | None]:
    """Return the 90 % interval of a ratio minus 1.

    The variance of its logarithm is that of the resampled fits, and twice that of the drift: the spread over
    trials of log(recorded / replayed). The changed run will be another start of the engine, which differs at
    least as much as one trial from another; more trials do not reduce this. The interval uses Student's t
    with the trials' degrees of freedom. The drift includes the square of the replays' mean error.
    """
    trials = min(len(was), len(replayed))
    if len(resampled) < 2 or not trials:  # noqa: PLR2004  # for a spread
        return None, None
    variance = statistics.variance(map(math.log, resampled)) + 2 * drift(was, replayed)
    deviation = math.sqrt(variance)
    width = float(stats.t.ppf((1 + COVERAGE) / 2, max(trials - 1, 3))) * deviation
    return ratio * math.exp(-width) - 1, ratio * math.exp(width) - 1


def drift(recorded: Sequence[float], replayed: Sequence[float]) -> float:
    """Return the variance of the trials' misfits (log ratios) plus the square of their mean."""
    off = [math.log(was / ours) for was, ours in zip(recorded, replayed, strict=False)]
    spread = statistics.variance(off) if len(off) > 1 else 0.0
    return spread + statistics.fmean(off) ** 2


def with_leaned(
    ratio: float, interval: tuple[float | None, float | None], leaned: Sequence[float]
) -> tuple[float | None, float | None]:
    """Return the interval of a ratio minus 1, widened by the error of steps outside the recorded range.

    On either side, the widths add as independent errors do: as the root of the sum of their squares.

    Args:
        ratio: Ratio by the fit.
        interval: Interval of the ratio from all other errors.
        leaned: Ratios at both ends of the interval of the time of steps outside the range.
    """
    high = interval[1]
    if high is None:
        return interval
    width = math.log((1 + high) / ratio)
    below, above = (
        math.hypot(width, max([0.0, *(sign * math.log(end / ratio) for end in leaned)])) for sign in (-1, 1)
    )
    return ratio * math.exp(-below) - 1, ratio * math.exp(above) - 1
