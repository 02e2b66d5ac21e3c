import numpy as np
import pytest

from schedtrace.compare.metric_changes import metric_changes, number_of_tests
from schedtrace.model.comparison import Outcome
from schedtrace.model.report import RunReport, TrialReport
from schedtrace.model.statistics import Percentiles


def run(**figures):
    """A run whose trials have these figures, one value a trial each."""
    unknown = {name: {} if name == "config" else [] for name in RunReport.__struct_fields__}
    trials = [
        trial(number, **dict(zip(figures, values, strict=True)))
        for number, values in enumerate(zip(*figures.values(), strict=True), start=1)
    ]
    return RunReport(**{**unknown, "path": "", "label": "", "warmup_steps": 0, "trials": trials})


def trial(number, **figures):
    unknown = dict.fromkeys(TrialReport.__struct_fields__)
    counts = {"steps": 3, "new_per_step": [1], "requests_finished": 0, "requests_aborted": 0}
    return TrialReport(
        **{**unknown, **counts, "trial": number, "engine_rank": 0, "complete": True, **figures}
    )


def changed(name, base, new):
    field = {"output": "output_tokens_per_s", "preemptions": "preemptions", "steps": "steps"}[name]
    changes = metric_changes(base=run(**{field: base}), new=run(**{field: new}))
    return next(change for change in changes if change.name == name)


LOW, HIGH = (10, 13, 11, 12), (20, 23, 21, 22)


@pytest.mark.parametrize(
    ("name", "base", "new", "outcome", "significant"),
    [
        ("output", LOW, HIGH, Outcome.BETTER, True),
        ("output", HIGH, LOW, Outcome.WORSE, True),
        ("preemptions", LOW, HIGH, Outcome.WORSE, True),
        ("preemptions", HIGH, LOW, Outcome.BETTER, True),
        ("steps", LOW, HIGH, Outcome.DIFFERS, True),
        ("output", LOW, (11, 12, 13, 12), Outcome.NONE_FOUND, False),
        ("output", LOW, LOW, Outcome.SAME, False),
        ("output", (10, 11, 12), (20, 21, 22), Outcome.TOO_FEW, None),
        ("output", (10,), (20,), Outcome.TOO_FEW, None),
        ("output", (10,), (20, 21, 22, 23), Outcome.TOO_FEW, None),
        ("preemptions", (0, 0), (5, 5), Outcome.EXACT, True),
        ("preemptions", (0,), (5,), Outcome.TOO_FEW, None),
        ("preemptions", (0,), (0,), Outcome.SAME, None),
        ("preemptions", (0, 0), (0, 0), Outcome.SAME, False),
    ],
)
def test_the_outcome_follows_the_test(name, base, new, outcome, significant):
    change = changed(name, base, new)
    assert (change.outcome, change.significant) == (outcome, significant)


def test_means_and_ranks_that_disagree_are_neither_better_nor_worse():
    change = changed("output", (10, 17, 12, 15, 14, 13, 16, 11), (20, 26, 22, -500, 24, 23, 25, 21))
    assert change.p_corrected <= 0.05
    assert (change.outcome, change.worsened) == (Outcome.DIFFERS, False)


@pytest.mark.parametrize(
    ("name", "base", "new", "worsened"),
    [
        ("preemptions", (0, 0), (5, 5), True),
        ("preemptions", (5, 5), (0, 0), False),
        ("steps", (5, 5), (9, 9), False),
        ("output", HIGH, LOW, True),
        ("output", LOW, HIGH, False),
        ("output", (20, 21, 22), (10, 11, 12), False),
    ],
)
def test_worse_is_what_is_certain_and_has_a_good_side(name, base, new, worsened):
    assert changed(name, base, new).worsened is worsened


def test_one_figure_in_other_units_is_one_test():
    def in_units(values):
        return run(
            output_tokens_per_s=values,
            total_tokens_per_s=[9 * value for value in values],
            requests_per_s=[value / 32 for value in values],
            preemptions=[1, 2, 1, 2],
        )

    changes = metric_changes(base=in_units(LOW), new=in_units(HIGH))
    assert number_of_tests(changes) == 2
    told = {change.name: change for change in changes}
    assert told["output"].p == told["total"].p == told["requests"].p == pytest.approx(2 / 70)
    assert told["output"].p_corrected == told["requests"].p_corrected == pytest.approx(4 / 70)
    assert told["output"].outcome is Outcome.TOO_FEW
    assert told["steps"].p is None


SPREAD = 0.04
METRICS = {"ttft_ms": 100.0, "tpot_ms": 5.0, "e2e_ms": 900.0}


def measured(draw, trials, slower=1.0):
    """Trials that vary by a few percent as a whole and in each figure; slower by a factor."""
    whole = draw.lognormal(0, SPREAD, trials) * slower
    own = {name: mean * whole * draw.lognormal(0, SPREAD, trials) for name, mean in METRICS.items()}
    latencies = {name: [percentiles(value) for value in values] for name, values in own.items()}
    return run(output_tokens_per_s=list(2000 / whole), **latencies)


def percentiles(value):
    return Percentiles(count=1, mean=value, p50=value, p90=value, p99=1.1 * value)


def share_found(slower, comparisons=200, trials=20):
    """Share of comparisons that find anything, and that find the output to be worse."""
    draw = np.random.default_rng(7)
    found = [
        metric_changes(base=measured(draw, trials), new=measured(draw, trials, slower))
        for _ in range(comparisons)
    ]
    anything = np.mean([any(change.significant for change in changes) for changes in found])
    worse = np.mean([changes[0].outcome is Outcome.WORSE for changes in found])
    return anything, worse


@pytest.fixture
def without_intervals(monkeypatch):
    """They take most of the time and decide nothing."""
    monkeypatch.setattr("schedtrace.compare.significance.change_interval", lambda *_: None)


@pytest.mark.usefixtures("without_intervals")
def test_two_sets_of_20_equal_trials_differ_at_most_at_the_nominal_rate():
    anything, _ = share_found(1.0)
    assert anything <= 0.05


@pytest.mark.usefixtures("without_intervals")
def test_a_tenth_slower_is_found_by_20_trials():
    _, worse = share_found(1.1, comparisons=40)
    assert worse == 1.0
