"""Metrics over trials and between two servers, what became of them, and which changes are a regression."""

from math import log, sqrt
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import t

from schedtrace.compare.compare import compare
from schedtrace.compare.metric_changes import (
    FEWEST_VALUES,
    METRICS,
    STATISTICS,
    LogChange,
    Served,
    in_windows,
    metric_changes,
    number_of_tests,
    regressed,
    server_changes,
    trials_used,
)
from schedtrace.errors import UsageError
from schedtrace.model.comparison import Outcome
from schedtrace.model.report import TrialReport
from schedtrace.model.statistics import Percentiles
from tests.makers import arrival, finish, step
from tests.unit.compare.reports import metrics_of, report

LATENCIES = ["TTFT p50", "TTFT p99", "TPOT p50", "E2E p50", "E2E p99"]


def trial(number, rank=0, *, complete=True, **figures):
    """One trial on one engine of which nothing is known but ``figures``."""
    unknown = dict.fromkeys(TrialReport.__struct_fields__)
    counts = {"steps": 0, "new_per_step": [], "requests_finished": 0, "requests_aborted": 0}
    which = {"trial": number, "engine_rank": rank, "complete": complete}
    return TrialReport(**{**unknown, **counts, **which, **figures})


def run(*trials):
    return report(trials=trials)


def run_with(**figures):
    """A run whose trials have these figures, one value a trial each."""
    values = zip(*figures.values(), strict=True)
    return run(*(trial(at, **dict(zip(figures, row, strict=True))) for at, row in enumerate(values, start=1)))


def outputs(*values):
    """A run with so many output tokens/s in each trial."""
    return run_with(output_tokens_per_s=values)


def milliseconds(p50, p99=0.0):
    return Percentiles(count=1, mean=p50, p50=p50, p90=p50, p99=p99)


def changes(base, new):
    return {change.name: change for change in metric_changes(base=base, new=new)}


def means(of):
    return {name: change.new.mean for name, change in changes(of, of).items()}


def test_a_metric_is_mean_and_range_over_the_trials():
    output = changes(outputs(10, 20), outputs(20, 30, 40))["output"]
    assert (output.base.count, output.base.mean, output.base.min, output.base.max) == (2, 15, 10, 20)
    assert (output.new.count, output.new.mean, output.new.min, output.new.max) == (3, 30, 20, 40)
    assert (output.unit, output.higher_is_better, output.change_frac) == ("tok/s", True, 1.0)


@pytest.mark.parametrize(
    ("base", "new", "beyond"),
    [
        ((10, 20), (21, 40), True),
        ((21, 40), (10, 20), True),
        ((10, 20), (20, 40), False),
        ((20, 40), (10, 20), False),
        ((10, 40), (20, 30), False),
        ((10, 10), (20, 20), True),
        ((10, 10), (10, 10), False),
        ((10,), (20, 30), None),
        ((10, 20), (30,), None),
    ],
)
def test_a_change_is_beyond_the_spread_only_if_the_ranges_do_not_touch(base, new, beyond):
    assert changes(outputs(*base), outputs(*new))["output"].beyond_spread is beyond


def test_every_metric_is_the_figure_of_its_name():
    figures = {
        "output_tokens_per_s": 1,
        "total_tokens_per_s": 2,
        "requests_per_s": 3,
        "queue_ms": milliseconds(15, 16),
        "ttft_ms": milliseconds(4, 5),
        "tpot_ms": milliseconds(6, 7),
        "e2e_ms": milliseconds(8, 9),
        "steps": 10,
        "first_step_requests": 11,
        "first_step_tokens": 12,
        "new_per_step": [1, 2, 3],
        "preemptions": 14,
    }
    better = dict(zip(["output", "total", "requests"], [1, 2, 3], strict=True))
    names = ["queue mean", *LATENCIES, "E2E mean", "preemptions"]
    worse = dict(zip(names, [15, 4, 5, 6, 8, 9, 8, 14], strict=True))
    shapes = {"steps": 10, "first-step requests": 11, "first-step tokens": 12, "steps that admit": 3}
    assert means(run(trial(1, **figures))) == better | worse | shapes
    for higher_is_better, named in ((True, better), (False, worse), (None, shapes)):
        assert [one.name for one in METRICS if one.higher_is_better is higher_is_better] == list(named)


def test_engines_of_a_trial_are_added_up_but_their_latencies_are_averaged():
    figures = {
        "output_tokens_per_s": 10,
        "ttft_ms": milliseconds(100, 100),
        "tpot_ms": milliseconds(100),
        "e2e_ms": milliseconds(100, 100),
        "first_step_requests": 1,
        "new_per_step": [1],
        "preemptions": 1,
        "steps": 5,
    }
    other = {**figures, "output_tokens_per_s": 30, "ttft_ms": milliseconds(300, 500), "steps": 6}
    told = means(run(trial(1, 0, **figures), trial(1, 1, **other)))
    assert (told["output"], told["steps"], told["first-step requests"]) == (40, 11, 2)
    assert (told["steps that admit"], told["preemptions"]) == (2, 2)
    assert [told[name] for name in LATENCIES] == [200, 300, 100, 100, 100]


def test_engines_are_no_trials():
    told = changes(outputs(5), run(*(trial(1, rank, output_tokens_per_s=5) for rank in range(4))))["output"]
    assert (told.new.count, told.new.mean, told.beyond_spread) == (1, 20, None)
    assert len(trials_used(run(trial(None, 0), trial(None, 1)))) == 1


def test_what_lacks_a_figure_leaves_it_to_the_others_and_is_not_taken_for_0():
    assert means(run(trial(1, 0, ttft_ms=milliseconds(100)), trial(1, 1)))["TTFT p50"] == 100
    assert changes(outputs(10, None), outputs(10))["output"].base.count == 1
    assert list(changes(outputs(10), run(trial(1)))) == ["steps", "steps that admit"]


def test_cut_trials_are_left_out_unless_there_are_no_others():
    whole, cut = trial(1, output_tokens_per_s=10), trial(2, complete=False, output_tokens_per_s=90)
    assert trials_used(run(whole, cut)) == [[whole]]
    assert trials_used(run(cut)) == [[cut]]
    assert means(run(whole, cut))["output"] == 10


def test_without_a_value_to_start_from_there_is_no_percentage():
    assert changes(outputs(0), outputs(5))["output"].change_frac is None
    assert changes(outputs(5), outputs(0))["output"].change_frac == -1


def changed(name, base, new):
    field = {"output": "output_tokens_per_s"}.get(name, name)
    return changes(run_with(**{field: base}), run_with(**{field: new}))[name]


LOW, HIGH = (10, 13, 11, 12), (20, 23, 21, 22)


@pytest.mark.parametrize(
    ("name", "base", "new", "outcome", "significant", "worsened"),
    [
        ("output", LOW, HIGH, Outcome.BETTER, True, False),
        ("output", HIGH, LOW, Outcome.WORSE, True, True),
        ("preemptions", LOW, HIGH, Outcome.WORSE, True, True),
        ("preemptions", HIGH, LOW, Outcome.BETTER, True, False),
        ("steps", LOW, HIGH, Outcome.DIFFERS, True, False),
        ("output", LOW, (11, 12, 13, 12), Outcome.NONE_FOUND, False, False),
        ("output", LOW, LOW, Outcome.SAME, False, False),
        ("output", (20, 21, 22), (10, 11, 12), Outcome.TOO_FEW, None, False),
        ("output", (10,), (20,), Outcome.TOO_FEW, None, False),
        ("output", (10,), (20, 21, 22, 23), Outcome.TOO_FEW, None, False),
        ("preemptions", (0, 0), (5, 5), Outcome.EXACT, True, True),
        ("preemptions", (5, 5), (0, 0), Outcome.EXACT, True, False),
        ("steps", (5, 5), (9, 9), Outcome.EXACT, True, False),
        ("preemptions", (0,), (5,), Outcome.TOO_FEW, None, False),
        ("preemptions", (0,), (0,), Outcome.SAME, None, False),
        ("preemptions", (0, 0), (0, 0), Outcome.SAME, False, False),
    ],
)
def test_the_outcome_follows_the_test_and_worse_is_what_is_certain_and_has_a_good_side(
    name, base, new, outcome, significant, worsened
):
    change = changed(name, base, new)
    assert (change.outcome, change.significant, change.worsened) == (outcome, significant, worsened)


def test_means_and_ranks_that_disagree_are_neither_better_nor_worse():
    change = changed("output", (10, 17, 12, 15, 14, 13, 16, 11), (20, 26, 22, -500, 24, 23, 25, 21))
    assert change.p_corrected <= 0.05
    assert (change.outcome, change.worsened) == (Outcome.DIFFERS, False)


def test_one_figure_in_other_units_is_one_test():
    def in_units(values):
        return run_with(
            output_tokens_per_s=values,
            total_tokens_per_s=[9 * value for value in values],
            requests_per_s=[value / 32 for value in values],
            preemptions=[1, 2, 1, 2],
        )

    told = changes(in_units(LOW), in_units(HIGH))
    assert number_of_tests(list(told.values())) == 2
    assert told["output"].p == told["total"].p == told["requests"].p == pytest.approx(2 / 70)
    assert told["output"].p_corrected == told["requests"].p_corrected == pytest.approx(4 / 70)
    assert told["output"].outcome is Outcome.TOO_FEW
    assert told["steps"].p is None


SPREAD = 0.04
MEANS_MS = {"ttft_ms": 100.0, "tpot_ms": 5.0, "e2e_ms": 900.0}


def measured(draw, trials, slower=1.0):
    """Trials that vary by a few percent as a whole and in each figure; slower by a factor."""
    whole = draw.lognormal(0, SPREAD, trials) * slower
    own = {name: mean * whole * draw.lognormal(0, SPREAD, trials) for name, mean in MEANS_MS.items()}
    latencies = {name: [milliseconds(value, 1.1 * value) for value in values] for name, values in own.items()}
    return run_with(output_tokens_per_s=list(2000 / whole), **latencies)


def compared(slower, comparisons, trials=20):
    draw = np.random.default_rng(7)
    return [
        metric_changes(base=measured(draw, trials), new=measured(draw, trials, slower))
        for _ in range(comparisons)
    ]


@pytest.fixture
def _without_intervals(monkeypatch):
    """They take most of the time and decide nothing."""
    monkeypatch.setattr("schedtrace.compare.significance.change_interval", lambda *_: None)


@pytest.mark.usefixtures("_without_intervals")
def test_two_sets_of_20_equal_trials_differ_at_most_at_the_nominal_rate_and_a_tenth_slower_is_found():
    assert np.mean([any(one.significant for one in found) for found in compared(1.0, 200)]) <= 0.05
    assert {found[0].outcome for found in compared(1.1, 40)} == {Outcome.WORSE}


def change(name, change_frac, *, worsened=True):
    return SimpleNamespace(name=name, change_frac=change_frac, worsened=worsened)


@pytest.mark.parametrize(
    ("asked", "name", "change_frac", "fails"),
    [
        ("regression", "output", -0.001, True),
        ("regression", "TTFT p99", 0.5, True),
        ("regression:output", "output", -0.001, True),
        ("regression:output", "total", -0.5, False),
        ("regression:output:5", "output", -0.05, True),
        ("regression:output:5", "output", -0.049, False),
        ("regression:OUTPUT:5%", "output", -0.06, True),
        ("regression:TTFT p99:10", "TTFT p99", 0.2, True),
        ("regression:ttft-p99:10", "TTFT p99", 0.2, True),
        ("regression:preemptions:10", "preemptions", None, True),
        ("regression", "steps", 0.5, False),
    ],
)
def test_a_metric_fails_if_it_became_worse_by_as_much_as_asked(asked, name, change_frac, fails):
    assert regressed([asked])(change(name, change_frac)) is fails
    assert not regressed([asked])(change(name, change_frac, worsened=False))


def test_one_of_several_conditions_is_enough_and_none_never_fails():
    both = regressed(["regression:output:50", "regression:tpot-p50"])
    assert both(change("TPOT p50", 0.01))
    assert not both(change("output", -0.1))
    assert not regressed([])(change("output", -0.9))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("warning", "expected regression, regression:METRIC or regression:METRIC:PERCENT"),
        ("regression:a:b:c", "expected regression"),
        (
            "regression:speed",
            "no metric speed that can be worse; there are output, total, requests, queue-mean, TTFT-p50",
        ),
        ("regression:steps", "no metric steps that can be worse"),
        ("regression:output:much", "much is no percentage, such as 5"),
        ("regression:output:-5", "-5 is no percentage"),
        ("regression:output:nan", "nan is no percentage"),
    ],
)
def test_anything_else_is_refused_with_what_there_is(asked, says):
    with pytest.raises(UsageError) as refused:
        regressed([asked])
    assert str(refused.value).startswith(f"--fail-on {asked}: {says}")


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
