import pytest

from schedtrace.compare.metric_changes import METRICS, metric_changes, trials_used
from schedtrace.model.report import RunReport, TrialReport
from schedtrace.model.statistics import Percentiles

LATENCIES = ["TTFT p50", "TTFT p99", "TPOT p50", "E2E p50", "E2E p99"]


def trial(number, rank=0, *, complete=True, **figures):
    """One trial on one engine of which nothing is known but ``figures``."""
    unknown = dict.fromkeys(TrialReport.__struct_fields__)
    counts = {"steps": 0, "new_per_step": [], "requests_finished": 0, "requests_aborted": 0}
    which = {"trial": number, "engine_rank": rank, "complete": complete}
    return TrialReport(**{**unknown, **counts, **which, **figures})


def run(*trials):
    empty = {"path": "", "label": "", "config": {}, "problems": [], "findings": [], "strip": []}
    empty |= {"verdict": [], "time_split": []}
    empty |= {"causes": [], "caps": [], "not_judged": [], "request_time": [], "engine_time": []}
    return RunReport(**empty, trials=list(trials), warmup_steps=0)


def outputs(*values):
    """A run with so many output tokens/s in each trial."""
    return run(*(trial(at, output_tokens_per_s=value) for at, value in enumerate(values, start=1)))


def milliseconds(p50, p99=0.0):
    return Percentiles(count=1, mean=p50, p50=p50, p90=p50, p99=p99)


def changes(base, new):
    return {change.name: change for change in metric_changes(base=base, new=new)}


def means(report):
    return {name: change.new.mean for name, change in changes(report, report).items()}


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
    report = run(
        trial(
            1,
            output_tokens_per_s=1,
            total_tokens_per_s=2,
            requests_per_s=3,
            ttft_ms=milliseconds(4, 5),
            tpot_ms=milliseconds(6, 7),
            e2e_ms=milliseconds(8, 9),
            steps=10,
            first_step_requests=11,
            first_step_tokens=12,
            new_per_step=[1, 2, 3],
            preemptions=14,
        )
    )
    assert means(report) == {
        "output": 1,
        "total": 2,
        "requests": 3,
        "TTFT p50": 4,
        "TTFT p99": 5,
        "TPOT p50": 6,
        "E2E p50": 8,
        "E2E p99": 9,
        "steps": 10,
        "first-step requests": 11,
        "first-step tokens": 12,
        "steps that admit": 3,
        "preemptions": 14,
    }


@pytest.mark.parametrize(
    ("better", "names"),
    [
        (True, ["output", "total", "requests"]),
        (False, [*LATENCIES, "preemptions"]),
        (None, ["steps", "first-step requests", "first-step tokens", "steps that admit"]),
    ],
)
def test_what_is_better_is_known_of_what_is_no_shape(better, names):
    assert [metric.name for metric in METRICS if metric.higher_is_better is better] == names


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
    doubled = {**figures, "output_tokens_per_s": 30, "ttft_ms": milliseconds(300, 500), "steps": 6}
    told = means(run(trial(1, 0, **figures), trial(1, 1, **doubled)))
    assert (told["output"], told["steps"], told["first-step requests"]) == (40, 11, 2)
    assert (told["steps that admit"], told["preemptions"]) == (2, 2)
    assert [told[name] for name in LATENCIES] == [200, 300, 100, 100, 100]


def test_engines_are_no_trials():
    told = changes(outputs(5), run(*(trial(1, rank, output_tokens_per_s=5) for rank in range(4))))
    assert (told["output"].new.count, told["output"].new.mean, told["output"].beyond_spread) == (1, 20, None)


def test_engines_of_a_trace_without_trials_are_one():
    assert len(trials_used(run(trial(None, 0), trial(None, 1)))) == 1


def test_an_engine_that_lacks_a_figure_leaves_it_to_the_others():
    report = run(trial(1, 0, ttft_ms=milliseconds(100)), trial(1, 1))
    assert means(report)["TTFT p50"] == 100


def test_a_trial_that_lacks_a_figure_is_not_taken_for_0():
    assert changes(outputs(10, None), outputs(10))["output"].base.count == 1


def test_a_metric_that_one_side_lacks_is_left_out():
    named = changes(outputs(10), run(trial(1)))
    assert list(named) == ["steps", "steps that admit"]


def test_cut_trials_are_left_out_unless_there_are_no_others():
    whole, cut = trial(1, output_tokens_per_s=10), trial(2, complete=False, output_tokens_per_s=90)
    assert trials_used(run(whole, cut)) == [[whole]]
    assert trials_used(run(cut)) == [[cut]]
    assert means(run(whole, cut))["output"] == 10


def test_without_a_value_to_start_from_there_is_no_percentage():
    assert changes(outputs(0), outputs(5))["output"].change_frac is None
    assert changes(outputs(5), outputs(0))["output"].change_frac == -1
