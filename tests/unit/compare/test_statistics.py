from itertools import pairwise
from math import exp, sqrt

import numpy as np
import pytest
from scipy.stats import norm

from schedtrace.compare import significance
from schedtrace.compare.significance import fewest_trials, noise_floor, trials_for


def test_p_of_separated_sides_is_the_smallest_that_so_many_trials_allow():
    assert significance.smallest_p(3, 3) == pytest.approx(0.1)
    assert significance.rank_test([1, 2, 3], [4, 5, 6]) == (1.0, pytest.approx(0.1))
    assert significance.rank_test([4, 5, 6], [1, 2, 3]) == (-1.0, pytest.approx(0.1))


def test_p_with_ties_is_exact_for_few_trials():
    """Steps of two runs of six trials: all of one side lie above all of the other."""
    base, new = [1065, 1071, 1066, 1060, 1070, 1065], [1190, 1173, 1173, 1175, 1203, 1173]
    assert significance.rank_test(base, new) == (1.0, pytest.approx(2 / 924))
    assert significance.rank_test([1, 2, 2], [2, 3, 3])[1] == pytest.approx(0.3)  # 3 of 20 ways on each side


def test_p_with_ties_is_never_below_what_so_many_trials_allow():
    assert significance.rank_test([1, 1, 1], [5, 5, 6])[1] >= significance.smallest_p(3, 3)


@pytest.mark.parametrize(("base", "new", "delta"), [((1, 4), (2, 3), 0), ((1, 2), (2, 3), 0.75)])
def test_the_effect_is_the_share_of_pairs_that_are_higher_minus_lower(base, new, delta):
    assert significance.rank_test(base, new)[0] == delta


@pytest.mark.parametrize(("tests", "trials"), [(0, 4), (1, 4), (2, 5), (6, 5), (7, 6), (13, 6)])
def test_the_fewest_trials_grow_with_the_number_of_tests(tests, trials):
    assert fewest_trials(tests) == trials
    assert significance.smallest_p(trials, trials) * max(1, tests) <= 0.05
    assert significance.smallest_p(trials - 1, trials - 1) * max(1, tests) > 0.05


def test_holm_corrects_the_smallest_most_and_keeps_the_order():
    assert significance.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert significance.holm([0.9, 0.8]) == [1.0, 1.0]
    assert significance.holm([]) == []


def test_the_change_is_of_the_means_and_unknown_from_0():
    assert significance.relative_change([10, 20], [30, 30]) == 1.0
    assert significance.relative_change([0, 0], [1, 1]) is None


def test_the_interval_holds_the_change_and_is_the_same_every_time():
    base, new = [10, 11, 12, 13, 14], [20, 21, 22, 23, 24]
    low, high = significance.change_interval(base, new)
    assert 0.6 < low < significance.relative_change(base, new) < high < 1.2
    assert significance.change_interval(base, new) == (low, high)


@pytest.mark.parametrize(
    ("base", "new"),
    [((1, 2, 3), (4, 5, 6)), ((1, 1, 1, 1), (2, 2, 2, 2)), ((0, 0, 0, 0), (1, 2, 3, 4)), ((1,), (2,))],
    ids=["three trials", "no spread", "from 0", "one trial"],
)
def test_without_enough_to_draw_from_there_is_no_interval(base, new):
    assert significance.change_interval(base, new) is None


def test_a_base_that_may_be_drawn_as_nothing_but_zeros_has_no_interval():
    assert significance.change_interval([0, 0, 0, 1], [1, 2, 3, 4]) is None


def test_independent_trials_count_in_full_and_slow_phases_do_not():
    assert significance.effective_count([1, 9, 2, 8, 3, 7, 4, 6]) == 8
    assert significance.effective_count([5] * 8) == 8
    assert significance.effective_count([1, 2, 3, 4, 5]) == 5
    phases = [1, 2, 3, 4, 5, 6, 7, 8]
    r = sum((a - 4.5) * (b - 4.5) for a, b in pairwise(phases)) / 42
    assert significance.effective_count(phases) == pytest.approx(8 * (1 - r) / (1 + r))
    two_levels = [1, 1, 1, 1, 2, 2, 2, 2]  # equal trials have the mean of their ranks: 2.5 and 6.5
    assert significance.effective_count(two_levels) == pytest.approx(8 * (1 - 20 / 32) / (1 + 20 / 32))


def test_p_of_trials_that_hang_together_is_larger():
    mixed = [1, 5, 2, 6, 3, 7, 4, 8]
    higher = [value + 8.5 for value in mixed]
    assert significance.rank_test(mixed, higher)[1] == pytest.approx(significance.smallest_p(8, 8))
    assert significance.rank_test(sorted(mixed), sorted(higher))[1] > 10 * significance.smallest_p(8, 8)


def test_the_noise_floor_is_the_formula_of_its_page():
    base, new = [9, 11, 9, 11, 9, 11], [18, 22, 18, 22, 18, 22]
    spread = sqrt(6 / 5) * 0.1
    z = norm.isf(0.05 / 2 / 2) + norm.isf(0.2)
    assert noise_floor(base, new, 2) == pytest.approx(z * spread * sqrt(2 / 6 * np.pi / 3))
    assert trials_for(base, new, 2) == np.ceil(2 * (z * spread / 0.05) ** 2 * np.pi / 3)


def test_no_noise_floor_where_nothing_could_be_significant_but_trials_needed_are_known():
    assert noise_floor([1, 2, 3], [1, 2, 3], 1) is None
    assert trials_for([99.9, 100, 100.1], [99.9, 100, 100.1], 1) == 4
    assert trials_for([1], [2, 3], 1) is None
    assert trials_for([0, 0], [1, 2], 1) is None


def test_so_many_trials_find_5_percent_in_4_of_5_cases():
    draw = np.random.default_rng(1)
    pilot = [list(draw.lognormal(0, 0.05, 400)) for _ in range(2)]
    needed = trials_for(*pilot, 1)
    assert 15 <= needed <= 20
    p = [
        significance.rank_test(draw.lognormal(0, 0.05, needed), 1.05 * draw.lognormal(0, 0.05, needed))[1]
        for _ in range(300)
    ]
    assert 0.72 <= np.mean(np.array(p) <= 0.05) <= 0.9


def test_slow_phases_that_say_nothing_are_rarely_called_a_difference():
    """Both sides wander alike; as independent trials they would be called different every third time."""

    def wandering(draw):
        level, values = 0.0, []
        for noise in draw.normal(size=30):
            level = 0.6 * level + noise
            values.append(exp(level / 20))
        return values

    draw = np.random.default_rng(2)
    found = [significance.rank_test(wandering(draw), wandering(draw))[1] <= 0.05 for _ in range(300)]
    assert np.mean(found) <= 0.12
