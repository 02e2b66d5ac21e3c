"""Two servers have no trials: their requests are compared, in blocks."""

from math import log, sqrt

import numpy as np
import pytest
from scipy.stats import t

from schedtrace.compare.compare import compare
from schedtrace.compare.metric_changes import (
    FEWEST_VALUES,
    STATISTICS,
    LogChange,
    Served,
    in_windows,
    server_changes,
)
from schedtrace.model.comparison import Outcome
from tests.makers import arrival, finish, step

STEP_US = 10_000


def served(count=60, *, slower=1.0, prompt=100):
    """Requests one after the other, each alone for four steps of about 10 ms."""
    lines, now = [], 0
    draw = np.random.default_rng(count)
    for at in range(count):
        name, came = f"r{at}", now
        each = int(STEP_US * slower * draw.uniform(0.9, 1.1))
        for token in range(4):
            lines.append(
                step(
                    len(lines),
                    start=now,
                    back=each,
                    got={name: 1},
                    new=[name] if not token else [],
                    output_tokens=1,
                    arrived=[arrival(name, came, queued=came, prompt_tokens=prompt)] if not token else [],
                )
            )
            now += each
        times = {"arrived_us": came, "first_token_us": came + each, "last_token_us": now, "finished_us": now}
        done = [finish(name, output_tokens=4, prompt_tokens=prompt, **times)]
        lines.append(step(len(lines), start=now, took=0, back=0, output_tokens=0, finished=done))
    return lines


def metrics_of(comparison):
    return {metric.name: metric for metric in comparison.metrics}


def test_servers_that_are_alike_do_not_differ_and_a_slower_one_does(run_of, recorded_words):
    base, alike = run_of("a", *served(60)), run_of("b", *served(61))
    comparison = compare(base=base, new=alike)
    assert (comparison.compared_by, comparison.tests) == ("requests", 4)
    tested = ("output", "TTFT p50", "TPOT p50", "E2E p50")
    assert {metrics_of(comparison)[name].outcome for name in tested} == {Outcome.NONE_FOUND}
    recorded_words(comparison.verdict)
    slower = metrics_of(compare(base=base, new=run_of("c", *served(60, slower=1.45))))
    for name in tested:
        change = slower[name]
        assert (change.outcome, change.significant) == (Outcome.WORSE, True)
        truth = 1 / 1.45 - 1 if name == "output" else 0.45
        assert change.ci_low_frac < truth < change.ci_high_frac
    assert slower["E2E p99"].outcome is Outcome.ONE_EACH


@pytest.mark.parametrize("new", [{"count": 90}, {"prompt": 200}])
def test_servers_under_different_loads_are_one_against_one(run_of, new, recorded_words):
    comparison = compare(base=run_of("a", *served()), new=run_of("b", *served(slower=1.45, **new)))
    assert (comparison.tests, comparison.undecided) == (0, True)
    assert not any(metric.significant for metric in comparison.metrics)
    recorded_words(comparison.verdict)


def test_too_few_requests_are_not_compared(run_of):
    few = FEWEST_VALUES - 1
    base, new = run_of("a", *served(few)), run_of("b", *served(few, slower=1.45))
    outcomes = {name: metric.outcome for name, metric in metrics_of(compare(base=base, new=new)).items()}
    assert outcomes["TTFT p50"] is Outcome.ONE_EACH
    assert outcomes["output"] in {Outcome.ONE_EACH, Outcome.NONE_FOUND}


def test_values_that_hang_together_are_not_taken_for_so_many():
    """Two levels, each for half of the series: far from 100 independent values."""
    values = np.array([1.0] * 50 + [3.0] * 50)
    base, new = (Served(dict.fromkeys(STATISTICS, factor * values)) for factor in (1, 2))
    change, _ = server_changes(base, new)["output"]
    assert change.change == pytest.approx(log(2))
    assert change.error > 3 * sqrt(2 / len(values)) * values.std() / values.mean()


def test_p_and_interval_are_those_of_t_with_three_degrees_of_freedom():
    change = LogChange(change=log(1.5), error=0.1)
    assert change.p == pytest.approx(2 * t.sf(log(1.5) / 0.1, 3))
    low, high = change.interval
    assert (1 + low) * (1 + high) == pytest.approx(1.5**2)
    assert log(1 + high) - log(1.5) == pytest.approx(0.3182446, rel=1e-6)


def test_windows_are_equal_parts_of_the_time():
    assert in_windows(1e6 * (np.arange(10) + 0.5), np.arange(10), 10_000_000).tolist() == [2, 7]
    assert in_windows(np.arange(4), np.arange(4), 4).size == 0
