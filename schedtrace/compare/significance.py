"""Statistics of two sets of trials: the change of a figure, and the smallest change they could detect.

No test assumes that the figures are distributed normally; only the number of trials is planned with the
normal approximation. For figures with heavy tails, that number is a rough estimate, and few trials determine
the spread itself only roughly.
"""

from collections.abc import Callable, Sequence
from math import ceil, comb, pi, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

ALPHA = 0.05
"""Probability that a whole comparison reports any difference although there is none."""
CONFIDENCE = 0.95
RESAMPLES = 9999
FEWEST_TO_CORRELATE = 6
MOST_DIVISIONS = 3_432
"""Maximum number of ways to divide the trials into two sides up to which all are counted; enough for 7 trials
per side. With so few trials, asymptotic p-values are far off if some values are equal."""

Values = Sequence[float]
Figures = NDArray[np.float64]


def relative_change(base: Values, new: Values) -> float | None:
    """Return ``new / base - 1`` of the means; None if the base is 0."""
    return float(np.mean(new) / np.mean(base) - 1) if any(base) else None


def change_interval(base: Values, new: Values) -> tuple[float, float] | None:
    """Return the 95 % percentile bootstrap interval of ``relative_change``, from a fixed seed.

    Trials are assumed to be independent. With four per side it contains the truth in about 84 of 100 cases,
    with eight in 94. None if there are too few trials for any significance (such as three per side),
    neither side has any spread, or a base trial is 0.
    """
    if min(base) <= 0 or not (spreads(base) or spreads(new)) or smallest_p(len(base), len(new)) > ALPHA:
        return None

    def mean_change(now: Figures, before: Figures, axis: int = -1) -> Figures:
        return np.asarray(now.mean(axis=axis) / before.mean(axis=axis) - 1)

    from scipy.stats import bootstrap  # noqa: PLC0415  # half a second, before which arguments are checked

    interval = bootstrap(
        (new, base),
        mean_change,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def rank_test(base: Values, new: Values) -> tuple[float, float]:
    """Return Cliff's delta and the p-value of a two-sided Mann-Whitney U test.

    The delta is ``P(new > base) - P(new < base)`` over all pairs of trials: 1 if every new value is larger. p
    is exact for few trials and otherwise asymptotic, but never below the minimum that the number of trials
    allows. Few means up to 8 trials on a side or, with ties (as in numbers of steps), up to 7 on both sides,
    whose divisions are all counted. If neighbouring trials correlate, the normal score of p is scaled to the
    ``effective_count``.
    """
    from scipy.stats import PermutationMethod, mannwhitneyu  # noqa: PLC0415  # as above

    divisions = comb(len(new) + len(base), len(base))
    tied = len({*new, *base}) < len(new) + len(base)
    few = tied and divisions <= MOST_DIVISIONS
    method = PermutationMethod(n_resamples=divisions) if few else "auto"
    tested = mannwhitneyu(new, base, alternative="two-sided", method=method)
    delta = 2 * tested.statistic / (len(new) * len(base)) - 1
    p = max(float(tested.pvalue), smallest_p(len(base), len(new)))
    worth = sqrt(per_trial(base, new, len) / per_trial(base, new, effective_count))
    return float(delta), p if worth == 1 else float(2 * ndtr(ndtri(p / 2) * worth))


def effective_count(values: Values) -> float:
    """Return the number of independent trials that would contain as much information as the values.

    A machine has slow phases, which slow several trials in a row, so two sides may differ although their
    configurations do not. If the ranks of neighbouring trials have the correlation r, n trials are worth
    ``n * (1 - r) / (1 + r)`` (Bayley and Hammersley 1946). If r could be due to chance (one-sided, 5 %),
    they are worth n.
    """
    count = len(values)
    if count < FEWEST_TO_CORRELATE or not spreads(values):
        return float(count)
    _, places, ties = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (ties.cumsum() - (ties - 1) / 2)[places] - (count + 1) / 2  # those of equal values: their mean
    r = float((ranks[1:] * ranks[:-1]).sum() / (ranks**2).sum())
    chance = -ndtri(ALPHA) / sqrt(count) - 1 / count
    return count * (1 - r) / (1 + r) if r > chance else float(count)


def smallest_p(base_count: int, new_count: int) -> float:
    """Return the smallest possible p-value of a two-sided rank test: that of two sides without overlap."""
    return min(1.0, 2 / comb(base_count + new_count, base_count))


def holm(ps: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm 1979), so that ``ALPHA`` limits the chance of any error."""
    corrected, highest = [0.0] * len(ps), 0.0
    for rank, at in enumerate(sorted(range(len(ps)), key=lambda at: ps[at])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[at]))
        corrected[at] = highest
    return corrected


def spreads(values: Values) -> bool:
    """Return whether the figure varies."""
    return min(values) != max(values)


def per_trial(base: Values, new: Values, count: Callable[[Values], float]) -> float:
    """Return the variance of the difference of both means, as a multiple of a single trial's variance."""
    return 1 / count(base) + 1 / count(new)


POWER = 0.8
"""Probability of finding a difference as large as the noise floor."""
WANTED_FRAC = 0.05
"""Relative change that users want to detect."""
RANK_EFFICIENCY = 3 / pi
"""Efficiency of the rank test relative to the t-test for normal figures; it needs 5 % more trials."""


def noise_floor(base: Values, new: Values, tests: int) -> float | None:
    """Return the smallest relative change that these trials would detect with a power of ``POWER``.

    ``z * spread * sqrt((1 / base_count + 1 / new_count) / efficiency)`` with the relative standard deviation
    of both sides pooled, their effective counts, the ``z`` for ``ALPHA / tests`` two-sided plus that for
    ``POWER``, and the rank test's efficiency. None if there are too few trials for any significance, or the
    base is 0.
    """
    relative = _relative_spread(base, new)
    if relative is None or smallest_p(len(base), len(new)) * tests > ALPHA:
        return None
    return _z(tests) * relative * sqrt(per_trial(base, new, effective_count) / RANK_EFFICIENCY)


def trials_for(base: Values, new: Values, tests: int, wanted_frac: float = WANTED_FRAC) -> int | None:
    """Return the trials per side for a noise floor of ``wanted_frac``, by the formula of ``noise_floor``."""
    relative = _relative_spread(base, new)
    if relative is None:
        return None
    held_together = per_trial(base, new, effective_count) / per_trial(base, new, len)
    needed = ceil(2 * (_z(tests) * relative / wanted_frac) ** 2 / RANK_EFFICIENCY * held_together)
    return max(needed, fewest_trials(tests))


def fewest_trials(tests: int) -> int:
    """Return the trials per side with which one of ``tests`` corrected rank tests can be significant."""
    return next(count for count in range(1, 100) if smallest_p(count, count) * max(1, tests) <= ALPHA)


def _relative_spread(base: Values, new: Values) -> float | None:
    """Return both sides' pooled relative standard deviation; None with one trial or a base of 0."""
    if min(len(base), len(new)) == 1 or not any(base):
        return None
    squares = [
        (len(side) - 1) * np.var(side, ddof=1) / np.mean(side) ** 2 for side in (base, new) if spreads(side)
    ]
    return float(sqrt(sum(squares) / (len(base) + len(new) - 2)))


def _z(tests: int) -> float:
    return -float(ndtri(ALPHA / max(1, tests) / 2) + ndtri(1 - POWER))
