"""The interval of a predicted ratio, by hand."""

import math

import pytest
from scipy import stats

from schedtrace.whatif.figures import interval


def test_it_joins_the_spread_of_resampled_fits_and_the_drift_of_trials():
    """Logarithms 0.1 and 0.3 have variance 0.02; trials off by 0 and 0.2 have 0.02, twice."""
    low, high = interval(2.0, [math.exp(0.1), math.exp(0.3)], [10.0, 10.0 * math.exp(0.2)], [10.0, 10.0])
    width = stats.t.ppf(0.95, 3) * math.sqrt(0.02 + 2 * 0.02)
    assert (low, high) == pytest.approx((2 * math.exp(-width) - 1, 2 * math.exp(width) - 1))


def test_many_trials_have_more_degrees_of_freedom():
    steady = [10.0] * 6
    low, _ = interval(1.0, [1.0, math.exp(0.2)], steady, steady)
    assert low == pytest.approx(math.exp(-stats.t.ppf(0.95, 5) * math.sqrt(0.02)) - 1)


@pytest.mark.parametrize(("resampled", "trials"), [([], 2), ([1.0], 2), ([1.0, 1.1], 0)])
def test_there_is_none_without_ground_for_it(resampled, trials):
    assert interval(1.0, resampled, [1.0] * trials, [1.0] * trials) == (None, None)


def test_of_one_trial_the_drift_is_what_its_replay_is_off_by():
    low, high = interval(1.0, [1.0, 1.0], [math.exp(0.03)], [1.0])
    width = stats.t.ppf(0.95, 3) * math.sqrt(2) * 0.03
    assert (low, high) == pytest.approx((math.exp(-width) - 1, math.exp(width) - 1))
