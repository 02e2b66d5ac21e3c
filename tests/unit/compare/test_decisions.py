import pytest

from schedtrace.compare.decisions import compare_decisions
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Preemption
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, step


@pytest.fixture
def compared(run_of):
    """``compared([step(0), ...], [step(0), ...])``: the decisions of both sides."""

    def compare(base, new, trial_ids=True, **of_new):
        headers = {"trial_ids": trial_ids}, {"trial_ids": trial_ids, **of_new}
        runs = run_of("a", *base, **headers[0]), run_of("b", *new, **headers[1])
        views = [make_timeline(run.traces[0], run.manifest) for run in runs]
        return compare_decisions(base=views[0], new=views[1])

    return compare


def side(of, trials, *, tokens=100):
    """Two steps a trial: two requests come and get so many tokens in the last one, then one each."""
    lines = []
    for trial in trials:
        names = [f"t{trial}-{n}-{of}" for n in range(2)]
        arrivals = [arrival(name, 10_000 * len(lines) - 50) for name in names]
        got = dict.fromkeys(names, tokens if trial == trials[-1] else 100)
        lines.append(step(len(lines), trial=trial, got=got, new=names, arrived=arrivals))
        lines.append(step(len(lines), trial=trial, got=dict.fromkeys(names, 1)))
    return lines


def test_other_ids_and_step_numbers_are_the_same_decisions(compared):
    base = side("aaaa", [1, 2])
    new = [step(0, trial=0, got={"t0-0-b": 5}), *shifted(side("bbbb", [1, 2]), by=1)]
    told = compared(base, new)
    assert (told.trials_compared, told.trials_alike, told.common_steps, told.first) == (2, 2, [2, 2], None)


def shifted(lines, by):
    for line in lines:
        line.step += by
        line.start_us += by * 10_000
        for came in line.arrived:
            came.queued_us += by * 10_000
    return lines


def test_the_first_step_that_differs_is_told_with_both_sides(compared):
    told = compared(side("a", [1, 2]), side("b", [1, 2], tokens=70))
    first = told.first
    assert (told.trials_alike, told.common_steps) == (1, [2, 0])
    assert (first.trial, first.at, first.decided, first.given) == (2, 0, ["scheduled"], [])
    assert (first.base.step, first.base.requests, first.base.tokens, first.base.arrived) == (2, 2, 200, 2)
    assert (first.base.first_different, first.new.first_different) == ("0: 100 tokens", "0: 70 tokens")
    assert first.base.causes == ["waiting: queue_empty"]


def one(of, *, got, **fields):
    names = ["t1-0-" + of, "t1-1-" + of]
    return step(0, trial=1, got={names[n]: tokens for n, tokens in got.items()}, **fields)


def test_what_was_preempted_and_why_the_step_ended_are_decisions_too(compared):
    came = {of: [arrival(f"t1-{n}-{of}", -50) for n in range(2)] for of in "ab"}
    base = one("a", got={0: 5}, arrived=came["a"], preempted=[Preemption("t1-1-a", 3)], waiting=1)
    new = one("b", got={0: 5}, arrived=came["b"], ended=Cause.KV_BLOCKS, waiting=1)
    first = compared([base], [new]).first
    assert (first.decided, first.base.preempted, first.new.preempted) == (["preempted", "causes"], [1], [])
    assert first.new.causes == ["waiting: kv_blocks"]


def test_what_it_was_decided_from_and_differs_is_named(compared):
    base = one("a", got={0: 5}, arrived=[arrival("t1-0-a", -50)], budget=500)
    new = one("b", got={0: 5, 1: 5}, arrived=[arrival(f"t1-{n}-b", -50) for n in range(2)], waiting=3)
    first = compared([base], [new]).first
    assert first.given == ["arrived", "num_running_before", "num_waiting_before", "token_budget"]
    assert (first.base.first_different, first.new.first_different) == (None, "1: 5 tokens")


def test_causes_known_in_different_ways_are_not_compared(compared):
    base, new = one("a", got={}, waiting=1), one("b", got={}, waiting=1, ended=Cause.KV_BLOCKS)
    assert compared([base], [new], exits_via="source").first is None
    assert compared([base], [new]).first.decided == ["causes"]


def test_steps_in_which_nothing_could_be_decided_are_left_out(compared):
    base = side("a", [1])
    idle = step(0, trial=1, start=-5000)
    assert compared(base, [idle, *shifted(side("b", [1]), by=1)]).first is None


def test_a_side_that_ends_sooner_has_no_step_there(compared):
    told = compared(side("a", [1])[:1], side("b", [1]))
    assert (told.common_steps, told.first.at, told.first.base) == ([1], 1, None)
    assert (told.first.new.step, told.first.decided, told.first.given) == (1, [], [])


def test_without_trial_ids_requests_are_numbered_by_arrival(compared):
    def untold(first, second, tokens):
        came = [arrival(second, -20), arrival(first, -50)]
        return [step(0, got={first: tokens, second: 5}, arrived=came)]

    assert compared(untold("x", "y", 9), untold("p", "q", 9), trial_ids=False).trials_alike == 1
    first = compared(untold("x", "y", 9), untold("p", "q", 8), trial_ids=False).first
    assert (first.trial, first.new.first_different) == (None, "0: 8 tokens")


def test_runs_without_a_trial_in_common_are_not_compared(compared):
    told = compared(side("a", [1]), side("b", [2]))
    assert (told.trials_compared, told.first) == (0, None)
