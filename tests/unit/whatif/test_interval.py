"""The interval of a predicted ratio, by hand."""

import math
from types import SimpleNamespace

import pytest
from scipy import stats

from schedtrace.model.report import TrialReport
from schedtrace.whatif.figures import (
    MAKESPAN,
    RESTARTED_CPU,
    ratio_interval,
    restart_factor,
    timing_figures,
    with_leaned,
)


def test_it_joins_the_spread_of_resampled_fits_and_the_drift_of_trials():
    """Logarithms 0.1 and 0.3 have variance 0.02; trials off by 0 and 0.2 have 0.02 and 0.1 squared, twice."""
    low, high = ratio_interval(
        2.0, [math.exp(0.1), math.exp(0.3)], [10.0, 10.0 * math.exp(0.2)], [10.0, 10.0]
    )
    width = stats.t.ppf(0.95, 3) * math.sqrt(0.02 + 2 * (0.02 + 0.01))
    assert (low, high) == pytest.approx((2 * math.exp(-width) - 1, 2 * math.exp(width) - 1))


def test_many_trials_have_more_degrees_of_freedom():
    steady = [10.0] * 6
    low, _ = ratio_interval(1.0, [1.0, math.exp(0.2)], steady, steady)
    assert low == pytest.approx(math.exp(-stats.t.ppf(0.95, 5) * math.sqrt(0.02)) - 1)


@pytest.mark.parametrize(("resampled", "trials"), [([], 2), ([1.0], 2), ([1.0, 1.1], 0)])
def test_there_is_none_without_ground_for_it(resampled, trials):
    assert ratio_interval(1.0, resampled, [1.0] * trials, [1.0] * trials) == (None, None)


def test_of_one_trial_the_drift_is_what_its_replay_is_off_by():
    low, high = ratio_interval(1.0, [1.0, 1.0], [math.exp(0.03)], [1.0])
    width = stats.t.ppf(0.95, 3) * math.sqrt(2) * 0.03
    assert (low, high) == pytest.approx((math.exp(-width) - 1, math.exp(width) - 1))


@pytest.mark.parametrize(
    ("header", "factors"),
    [
        ({"device": "cpu"}, (math.exp(-RESTARTED_CPU), math.exp(RESTARTED_CPU))),
        ({"device": "NVIDIA H100 80GB HBM3"}, (1, 1)),
        ({"device": "simulated NVIDIA H100"}, (1, 1)),
        ({"device": "cpu", "clock": "virtual"}, (1, 1)),
    ],
)
def test_steps_take_less_or_longer_in_another_start_of_a_cpu_engine(header, factors):
    header = SimpleNamespace(**{"clock": "monotonic"} | header)
    assert [restart_factor(header, seed) for seed in (2, 3)] == pytest.approx(list(factors))


def test_between_a_replay_and_its_bound_the_middle_is_said_and_both_are_within():
    """Makespan 10 -> 4 with economies of scale, 9 without; no spread, no drift."""

    def trials(seconds):
        return [SimpleNamespace(**dict.fromkeys(TrialReport.__struct_fields__) | {"duration_s": seconds})] * 2

    spread = {MAKESPAN.name: [0.4, 0.4]}
    [found] = timing_figures(trials(10.0), trials(10.0), trials(4.0), spread, trials(9.0))
    assert (found.low_frac, found.high_frac) == pytest.approx((-0.6, -0.1))
    assert found.change_frac == pytest.approx(-0.4)
    assert (found.before, found.value) == pytest.approx((10.0, 6.0))


def test_steps_outside_the_record_widen_either_side_by_their_own_replay():
    """Widths 3 and 4 of independent errors make 5; the other side has no error of such steps."""
    width = math.exp(0.3)
    low, high = with_leaned(2.0, (2 / width - 1, 2 * width - 1), [2 * math.exp(0.4), 2.0])
    assert (low, high) == pytest.approx((2 / width - 1, 2 * math.exp(0.5) - 1))


def test_without_steps_outside_the_interval_stays():
    assert with_leaned(2.0, (0.0, 3.0), []) == pytest.approx((0.0, 3.0))
    assert with_leaned(2.0, (None, None), [3.0]) == (None, None)
