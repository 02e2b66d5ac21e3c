"""The search itself, on one feature at a time."""

import numpy as np

from schedtrace.diagnose.excess_search import search
from schedtrace.diagnose.work_fit import fit_work
from schedtrace.timeline.excess import Feature

STEPS = np.arange(1000)
NOISE = 1 + 0.02 * np.sin(STEPS * 7.0)
WORK = np.ones((1000, 1))


def explanations(slow, feature):
    """The explanations of steps of 1 ms, of which some take twice as long, by a single feature."""
    times = 1000 * NOISE * np.where(slow, 2, 1)
    return search(fit_work(times, WORK), [feature])


def request(inside):
    return Feature("request", inside.astype(float), "r")


def test_a_request_that_is_in_most_slow_steps_explains_them():
    inside = (STEPS >= 120) & (STEPS < 160)
    [explanation] = explanations(inside | (STEPS % 40 == 0), request(inside))
    assert explanation.terms[0].feature.detail == "r"
    assert 0.9 <= explanation.effect <= 1.1


def test_a_request_does_not_explain_steps_of_which_most_are_slow_without_it():
    inside = (STEPS >= 120) & (STEPS < 160)
    assert explanations(inside | ((STEPS >= 600) & (STEPS < 650)), request(inside)) == []


def test_a_clear_effect_that_half_of_the_steps_lack_is_another_feature():
    """Half of the steps with more than 15 waiting requests are twice as long, and no others."""
    waiting = Feature("waiting", (STEPS % 20).astype(float))
    assert explanations((STEPS % 20 > 15) & (STEPS // 20 % 2 == 0), waiting) == []
    [explanation] = explanations(STEPS % 20 > 15, waiting)
    assert explanation.terms[0].cut == 15.5
