from itertools import permutations

import pytest

from schedtrace.compare.comparability import fairness_notes, taken_in_turn
from schedtrace.compare.compare import compare
from schedtrace.errors import InputError
from schedtrace.model.causes import Cause
from schedtrace.model.comparison import Sample
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests.makers import STEP_EVERY_US, arrival, finish, manifest, result, run_folder, step, workload
from tests.unit.recorded_words import texts


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


def test_a_comparison_names_both_runs_and_has_their_settings_metrics_and_findings(run_of, recorded_words):
    base = run_of("a", *trials(1, 1), about=results(2.0, 4.0))
    new = run_of("b", *trials(1, 1, waiting=1, ended=Cause.KV_BLOCKS), about=results(1.0, 1.5), model="new")
    comparison = compare(base=base, new=new)
    assert (comparison.base_label, comparison.new_label) == ("a", "b")
    assert (comparison.base_path, comparison.new_path) == (str(base.path), str(new.path))
    assert [change.name for change in comparison.config] == ["model"]
    assert metrics_of(comparison)["output"].change_frac == pytest.approx((40 + 40 / 1.5) / 30 - 1)
    assert ("blocked-budget", "kv_blocks") in {
        (finding.code, finding.cause) for finding in comparison.findings
    }
    recorded_words(comparison.verdict)


def test_a_run_does_not_differ_from_itself(run_of, recorded_words):
    run = run_of("a", *trials(1, 1), about=results(1.0, 2.0))
    comparison = compare(base=run, new=run)
    assert (comparison.notes, comparison.config) == ([], [])
    recorded_words(comparison.verdict)


def test_one_trial_on_a_side_is_noted_and_so_are_different_numbers_of_them(run_of, recorded_words):
    one, two = run_of("one", *trials(1)), run_of("two", *trials(1, 1))
    recorded_words(compare(base=one, new=two).notes)
    assert compare(base=two, new=two).notes == []


def test_problems_are_noted_with_the_side_that_has_them(run_of, recorded_words):
    base, new = run_of("a", step(0), step(2)), run_of("b", step(0), about=manifest(status="interrupted"))
    notes = texts(compare(base=base, new=new).notes[:2])
    recorded_words(note.replace(str(base.path), "BASE") for note in notes)


def test_throughput_of_different_sources_is_noted(run_of, recorded_words):
    done = finish("t1-0", arrived_us=0, first_token_us=1, last_token_us=900)
    lines = trials(1, finished=[done])
    front_end, trace = run_of("a", *lines, about=results(2.0)), run_of("b", *lines)
    unknown = run_of("c", *trials(1))
    for base, new in permutations((front_end, trace, unknown), 2):
        recorded_words(compare(base=base, new=new).notes)


@pytest.mark.parametrize(
    "load",
    [
        {"num_prompts": 9},
        {"num_prompts": 1},
        {"input_tokens": 4000},
        {"output_tokens": 50},
        {"dataset": "x.json", "input_tokens": None},
        {"request_rate": 2.0},
    ],
    ids=str,
)
def test_different_workloads_are_noted_and_come_first_in_the_verdict(run_of, load, recorded_words):
    base = run_of("a", step(0), about=manifest(workload=workload()))
    new = run_of("b", step(0), about=manifest(workload=workload(**load)))
    comparison = compare(base=base, new=new)
    recorded_words(comparison.notes[0], comparison.verdict)


@pytest.mark.parametrize(
    "load", [{"prequeue": True}, {"warmup_requests": 3}, {"keep_prefix_cache": True}, None]
)
def test_the_same_requests_or_unknown_ones_are_the_same_work_however_handed_over(
    run_of, load, recorded_words
):
    base = run_of("a", step(0), about=manifest(workload=workload()))
    new = run_of("b", step(0), about=None if load is None else manifest(workload=workload(**load)))
    recorded_words(compare(base=base, new=new).notes)


def test_different_models_on_different_workloads_have_nothing_in_common(run_of):
    base = run_of("a", step(0), about=manifest(workload=workload(num_prompts=4)), model="small")
    new = run_of("b", step(0), about=manifest(workload=workload(num_prompts=9)), model="large")
    with pytest.raises(InputError) as refused:
        compare(base=base, new=new)
    assert str(refused.value) == (
        f"nothing in common to compare: {base.path} ran small, {new.path} ran large, on different workloads"
    )


def test_different_models_on_the_same_workload_can_be_compared(run_of):
    about = manifest(workload=workload())
    base, new = (run_of(name, step(0), about=about, model=name) for name in ("small", "large"))
    assert [change.name for change in compare(base=base, new=new).config] == ["model"]


@pytest.mark.parametrize("empty", ["base", "new"])
def test_a_run_without_a_step_cannot_be_compared(run_of, empty):
    runs = {"base": run_of("a", step(0)), "new": run_of("b", step(0))} | {empty: run_of("none")}
    with pytest.raises(InputError, match=r"none: no step in it to compare$"):
        compare(**runs)


def test_an_engine_without_a_step_leaves_it_to_the_others(tmp_path):
    run_folder(tmp_path, step(0, got={"a": 1}))
    run = read_run(run_folder(tmp_path, engine_rank=1))
    assert metrics_of(compare(base=run, new=run))["steps"].base.mean == 1


def served(count, prompt=100, output=10):
    """A server's trace: so many requests that came and finished."""
    names = [f"r{n}" for n in range(count)]
    arrivals = [arrival(name, 0, prompt_tokens=prompt) for name in names]
    got = dict.fromkeys(names, prompt)
    done = [finish(n, arrived_us=0, first_token_us=1, last_token_us=900, output_tokens=output) for n in names]
    return [step(0, got=got, new=names, arrived=arrivals, budget=100_000), step(1, finished=done)]


@pytest.mark.parametrize(
    "load",
    [
        {"count": 30},
        {"count": 20, "prompt": 106},
        {"count": 20, "output": 20},
        {"count": 21, "prompt": 105},
    ],
    ids=str,
)
def test_loads_of_servers_that_differ_by_more_than_a_twentieth_are_noted(run_of, load, recorded_words):
    recorded_words(compare(base=run_of("a", *served(20)), new=run_of("b", *served(**load))).notes)


def test_where_both_workloads_are_recorded_these_are_compared(run_of, recorded_words):
    about = manifest(workload=workload())
    base, new = run_of("a", *served(20), about=about), run_of("b", *served(30), about=about)
    recorded_words(compare(base=base, new=new).notes)


class Changed:
    """One metric of which only the samples matter."""

    name = "output"

    def __init__(self, base, new):
        self.base, self.new = (
            Sample(values=[], count=20, effective_count=worth, mean=1, min=1, max=1) for worth in (base, new)
        )


@pytest.fixture
def views(run_of):
    """Views of two runs of two steps each, the second made so much later."""

    def made(later_us, **new):
        anchors = {"base": 10**15, "new": 10**15 + later_us}
        runs = {name: run_of(name, step(0), step(1), wall_anchor_us=at) for name, at in anchors.items()}
        if new:
            runs["new"] = run_of("new", step(0), wall_anchor_us=anchors["new"], **new)
        return {name: make_timeline(run.traces[0]) for name, run in runs.items()}

    return made


@pytest.mark.parametrize(
    ("later_us", "in_turn"), [(0, True), (STEP_EVERY_US, True), (STEP_EVERY_US + 1, False), (-20_000, False)]
)
def test_runs_whose_steps_overlap_in_time_were_made_in_turn(views, later_us, in_turn):
    assert taken_in_turn(**views(later_us)) is in_turn


def notes(sides, *metrics):
    return fairness_notes(**sides, metrics=list(metrics))


def test_one_run_after_the_other_and_another_machine_are_noted(views, recorded_words):
    recorded_words(notes(views(10**9)), notes(views(10**9, host="far")))
    assert notes(views(0)) == []


def test_trials_that_hang_together_are_noted_for_their_side(views, recorded_words):
    recorded_words(notes(views(0), Changed(20.0, 5.5)))
