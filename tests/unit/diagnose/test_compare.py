import inspect

import pytest

from schedtrace.diagnose.compare import METRICS, compare
from schedtrace.errors import InputError
from tests.makers import arrival, finish, manifest, result, step, workload

OUTPUT = METRICS[0][0]


def trials(*first_steps, **fields):
    """One trial each: its first step schedules so many requests of 10 tokens."""
    return [
        step(
            at,
            trial=at + 1,
            got=dict.fromkeys((names := [f"t{at + 1}-{n}" for n in range(count)]), 10),
            new=names,
            arrived=[arrival(name, 0, queued=0) for name in names],
            **fields,
        )
        for at, count in enumerate(first_steps)
    ]


def results(*seconds):
    """Front-end figures of one trial each: 40 output tokens in so many seconds."""
    return manifest(trials=[result(at, elapsed) for at, elapsed in enumerate(seconds, start=1)])


def metrics_of(comparison):
    return {metric.name: metric for metric in comparison.metrics}


def test_base_and_new_cannot_be_swapped_by_their_place(run_of):
    run = run_of("a", step(0))
    kinds = {parameter.kind for parameter in inspect.signature(compare).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError):
        compare(run, run)


def test_metrics_are_means_and_ranges_over_trials(run_of):
    comparison = compare(
        base=run_of("a", *trials(1, 1), about=results(2.0, 4.0)),
        new=run_of("b", *trials(1, 1), about=results(1.0, 2.0)),
    )
    output = metrics_of(comparison)[OUTPUT]
    assert (output.base.count, output.base.mean, output.base.min, output.base.max) == (2, 15, 10, 20)
    assert (output.new.mean, output.change_frac, output.higher_is_better) == (30, 1.0, True)


@pytest.mark.parametrize(
    ("base", "new", "beyond"),
    [
        ((2.0, 4.0), (1.0, 1.5), True),
        ((1.0, 1.5), (2.0, 4.0), True),
        ((2.0, 4.0), (1.0, 2.0), False),
        ((2.0, 4.0), (3.0, 3.5), False),
        ((2.0, 2.0), (1.0, 1.0), True),
        ((2.0, 2.0), (2.0, 2.0), False),
        ((2.0,), (1.0, 1.5), None),
        ((2.0, 4.0), (1.0,), None),
    ],
)
def test_a_change_is_beyond_the_spread_only_if_the_ranges_do_not_touch(run_of, base, new, beyond):
    comparison = compare(
        base=run_of("a", *trials(*[1] * len(base)), about=results(*base)),
        new=run_of("b", *trials(*[1] * len(new)), about=results(*new)),
    )
    assert metrics_of(comparison)[OUTPUT].beyond_spread is beyond


def test_one_trial_on_a_side_is_noted_and_so_are_different_numbers_of_them(run_of):
    one, two = run_of("one", *trials(1)), run_of("two", *trials(1, 1))
    told = " / ".join(compare(base=one, new=two).notes)
    assert "one trial on a side" in told
    assert "base has 1 trial, new has 2" in told
    assert compare(base=two, new=two).notes == []


def test_problems_of_both_traces_are_noted(run_of):
    comparison = compare(base=run_of("a", step(0), step(2)), new=run_of("b", step(0), step(3)))
    assert [note.partition(":")[0].rpartition("/")[2] for note in comparison.notes[:2]] == [
        "engine-0.jsonl"
    ] * 2
    assert "1 steps" in comparison.notes[0]
    assert "2 steps" in comparison.notes[1]


def test_a_metric_that_one_side_lacks_is_left_out(run_of):
    done = step(1, trial=1, finished=[finish("t1-0", arrived_us=0, first_token_us=5000, last_token_us=9000)])
    comparison = compare(base=run_of("a", *trials(1), done), new=run_of("b", *trials(1)))
    assert "steps" in metrics_of(comparison)
    assert not {"TTFT p50", OUTPUT} & set(metrics_of(comparison))


def test_without_a_value_to_start_from_there_is_no_percentage(run_of):
    comparison = compare(base=run_of("a", *trials(1)), new=run_of("b", *trials(1)))
    assert metrics_of(comparison)["preemptions"].change_frac is None


@pytest.mark.parametrize(
    ("base", "new", "says"),
    [
        ((1, 4), (4, 4), "first-step requests now 4 in every trial (were 1 to 4)"),
        ((4, 4), (1, 4), "first-step requests now vary from 1 to 4 (were 4)"),
    ],
)
def test_the_verdict_says_that_the_first_step_has_become_steady_or_no_longer_is(run_of, base, new, says):
    verdict = compare(base=run_of("a", *trials(*base)), new=run_of("b", *trials(*new))).verdict
    assert says in verdict


@pytest.mark.parametrize(
    ("base", "new", "says"),
    [
        ((2.0, 4.0), (1.0, 1.5), "output +122.2 %"),
        ((2.0, 4.0), (2.0, 3.5), "within the spread"),
        ((2.0,), (1.0,), "output +100.0 %, one trial only"),
    ],
)
def test_the_verdict_weighs_the_change_by_the_spread_of_the_trials(run_of, base, new, says):
    comparison = compare(
        base=run_of("a", *trials(*[1] * len(base)), about=results(*base)),
        new=run_of("b", *trials(*[1] * len(new)), about=results(*new)),
    )
    assert says in comparison.verdict


def test_different_models_on_different_workloads_have_nothing_in_common(run_of):
    base = run_of("a", step(0), about=manifest(workload=workload(num_prompts=4)), model="small")
    new = run_of("b", step(0), about=manifest(workload=workload(num_prompts=9)), model="large")
    with pytest.raises(InputError, match=r"nothing in common.*small on 4 prompts.*large on 9 prompts"):
        compare(base=base, new=new)


def test_different_models_on_the_same_workload_can_be_compared(run_of):
    told = manifest(workload=workload())
    base, new = (run_of(name, step(0), about=told, model=name) for name in ("small", "large"))
    assert [change.name for change in compare(base=base, new=new).config] == ["model"]


@pytest.mark.parametrize("empty", ["base", "new"])
def test_a_run_without_a_step_cannot_be_compared(run_of, empty):
    runs = {"base": run_of("a", step(0)), "new": run_of("b", step(0))} | {empty: run_of("none")}
    with pytest.raises(InputError, match="none: no step in it to compare"):
        compare(**runs)
