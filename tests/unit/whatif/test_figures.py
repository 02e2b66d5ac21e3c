"""Figures of a prediction by hand: intervals of ratios, and bounds of an output rate.

What front ends and clients did, and the front end's thread, bound the rate: they are not replayed.
"""

import math
from types import SimpleNamespace

import pytest
from scipy import stats

from schedtrace.model.manifest import Configured
from schedtrace.model.report import TrialReport
from schedtrace.model.trace import Cpu, ThreadTime
from schedtrace.read.run import FrontEndRecord
from schedtrace.whatif.figures import (
    MAKESPAN,
    RESTARTED_CPU,
    Processors,
    bound_output,
    ratio_interval,
    recorded_processors,
    restart_factor,
    timing_figures,
    with_leaned,
)
from tests.makers import step
from tests.unit.whatif.conftest import a_figure


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


SECOND = 1_000_000


def a_server(view_of, threads, **header):
    """Two seconds with 50 steps of 2 tokens in the first and 20 of 3 in the second; then it is idle.

    ``threads`` has the front end's time on a processor, and its wait, after 1, 2 and 3 seconds.
    """
    ends = [20_000 * number for number in range(50)] + [SECOND + 20_000 * number for number in range(20)]
    steps = [
        step(number, start=end, back=1000, decode_tokens=2 if end < SECOND else 3, total_requests=1)
        for number, end in enumerate(ends)
    ]
    lines = [
        Cpu(at_us=second * SECOND, threads=[ThreadTime("front_end", 7, 7, ran, waited)])
        for second, (ran, waited) in enumerate(threads)
    ]
    view = view_of(*steps, *lines, **header)
    view.front_end = FrontEndRecord(Configured(at_unix_us=0, usage_context="OPENAI_API_SERVER"))
    return view


def test_the_time_of_front_ends_counts_while_the_engine_works(view_of):
    """The thread ran for 0.6 of 2 s, and waited for 0.2 s; afterwards it ran alone."""
    times = [(100, 0), (400_100, 100_000), (600_100, 200_000), (1_600_100, 200_000)]
    recorded = recorded_processors([a_server(view_of, times)])
    assert recorded == Processors(100, pytest.approx(0.2 / 0.8), pytest.approx(0.3))
    assert recorded.are_short


@pytest.mark.parametrize(("waited_frac", "are_short"), [(0.1, True), (0.09, False), (None, False)])
def test_processors_are_short_if_a_front_end_waits_for_them(waited_frac, are_short):
    assert Processors(50, waited_frac).are_short is are_short


def test_without_times_of_threads_only_the_output_is_known(view_of):
    assert recorded_processors([a_server(view_of, [])]) == Processors(100)


def test_in_virtual_time_no_processors_are_used(view_of):
    assert recorded_processors([a_server(view_of, [], clock="virtual")]) is None


def figures(change, low, high, *, steps=0.0):
    """Return an output's change and its inverse, and the change of the number of steps."""
    ends = [None if frac is None else 1 / (1 + frac) - 1 for frac in (high, low)]
    return [
        a_figure("steps", steps),
        a_figure("output", change, higher=True, low=low, high=high),
        a_figure("makespan", 1 / (1 + change) - 1, low=ends[0], high=ends[1]),
    ]


@pytest.mark.parametrize(
    ("processors", "expected"),
    [
        pytest.param(Processors(2, 0.2), (4, 1, 9), id="short, and twice as much shown"),
        pytest.param(Processors(1, 0.2), (4, 0, 9), id="short, and no more shown"),
        pytest.param(Processors(6, 0.2), (4, 3, 9), id="short, and more shown than the interval's low end"),
        pytest.param(Processors(2, 0.05), (4, 3, 9), id="not short"),
        pytest.param(Processors(2, 0.05, 0.125), (4, 3, 7), id="an eighth of a processor used"),
        pytest.param(Processors(2, 0.05, 0.25), (3, 3, 3), id="a quarter of a processor used"),
        pytest.param(Processors(2, 0.2, 0.25), (3, 1, 3), id="both"),
        pytest.param(Processors(2, 0.05, 1.0), (0, 0, 0), id="all of a processor used"),
    ],
)
def test_the_interval_of_an_output_and_of_its_makespan(processors, expected):
    """An output of 1 token a second is predicted to be 5 (4 to 10)."""
    changed = figures(4, 3, 9)
    bound_output(changed, processors)
    _, output, makespan = changed
    assert (output.change_frac, output.low_frac, output.high_frac) == pytest.approx(expected)
    assert output.value == pytest.approx(1 + expected[0])
    ends = (makespan.change_frac, makespan.high_frac, makespan.low_frac)
    assert ends == pytest.approx([1 / (1 + frac) - 1 for frac in expected])
    assert makespan.value == pytest.approx(1 / (1 + expected[0]))


def test_fewer_steps_take_less_of_the_front_end():
    """A quarter of a processor for each step's output allows four times as many steps a second."""
    changed = figures(4, 3, 19, steps=-0.5)
    bound_output(changed, Processors(2, 0.05, 0.25))
    assert (changed[1].change_frac, changed[1].high_frac) == pytest.approx((4, 7))


def test_without_an_interval_none_is_made():
    changed = figures(4, None, None)
    bound_output(changed, Processors(2, 0.2))
    assert [(figure.change_frac, figure.low_frac) for figure in changed[1:]] == [(4, None), (-0.8, None)]
