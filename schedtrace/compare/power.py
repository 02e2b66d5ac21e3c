"""What two sets of trials could have seen, and how many trials it takes to see more.

Planned with the normal approximation: of figures with heavy tails it is an estimate, and the spread itself is
known only as well as so few trials tell it.
"""

from math import ceil, pi, sqrt

import numpy as np
from scipy.stats import norm

from schedtrace.compare.statistics import ALPHA, Values, effective_count, per_trial, smallest_p, spreads

POWER = 0.8
"""How surely a difference as large as the noise floor is found."""
WANTED_FRAC = 0.05
"""The change that people want to see."""
RANK_EFFICIENCY = 3 / pi
"""Of the rank test, relative to the t-test, for normal figures: it needs 5 % more trials."""


def noise_floor(base: Values, new: Values, tests: int) -> float | None:
    """The smallest relative change that these trials would show as significant in ``POWER`` of all cases.

    ``z * spread * sqrt((1 / base_count + 1 / new_count) / efficiency)`` with the relative standard deviation
    of both sides pooled, their effective counts, the ``z`` for ``ALPHA / tests`` two-sided plus that for
    ``POWER``, and the rank test's efficiency. None where the trials are too few for any significance, or the
    base is 0.
    """
    relative = _relative_spread(base, new)
    if relative is None or smallest_p(len(base), len(new)) * tests > ALPHA:
        return None
    return _z(tests) * relative * sqrt(per_trial(base, new, effective_count) / RANK_EFFICIENCY)


def trials_for(base: Values, new: Values, tests: int, wanted_frac: float = WANTED_FRAC) -> int | None:
    """Trials a side for a noise floor of this change, by the same approximation."""
    relative = _relative_spread(base, new)
    if relative is None:
        return None
    held_together = per_trial(base, new, effective_count) / per_trial(base, new, len)
    needed = ceil(2 * (_z(tests) * relative / wanted_frac) ** 2 / RANK_EFFICIENCY * held_together)
    return max(needed, fewest_trials(tests))


def fewest_trials(tests: int) -> int:
    """A side, for any of ``tests`` rank tests to become significant after correction."""
    return next(count for count in range(1, 100) if smallest_p(count, count) * max(1, tests) <= ALPHA)


def _relative_spread(base: Values, new: Values) -> float | None:
    """Each side's standard deviation over its mean, pooled; None with one trial on a side or a base of 0."""
    if min(len(base), len(new)) == 1 or not any(base):
        return None
    squares = [
        (len(side) - 1) * np.var(side, ddof=1) / np.mean(side) ** 2 for side in (base, new) if spreads(side)
    ]
    return float(sqrt(sum(squares) / (len(base) + len(new) - 2)))


def _z(tests: int) -> float:
    return float(norm.isf(ALPHA / max(1, tests) / 2) + norm.isf(1 - POWER))
