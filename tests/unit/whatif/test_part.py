"""Of a long load so much is replayed as takes a few seconds."""

import pytest

from schedtrace.diagnose.trials import pooled_reports
from schedtrace.read.run import read_run
from schedtrace.whatif.baseline import REQUEST_US, STEP_US, first_part, replay_s
from schedtrace.whatif.prediction import recorded
from tests import makers
from tests.unit.whatif.conftest import a_fit

STEP_S = (STEP_US + REQUEST_US) / 1e6
"""Of a step with one request."""


@pytest.fixture
def base(tmp_path):
    """``base(trials)``: 120 requests one after the other, each a step of its own."""

    def made(trials=0):
        def named(number):
            return f"t{1 + number * trials // 120}-{number}" if trials else f"r{number}"

        lines = [
            makers.step(
                number,
                got={named(number): 10},
                new=[named(number)],
                arrived=[makers.arrival(named(number), number * makers.STEP_EVERY_US)],
                finished=[makers.finish(named(number), finished_us=number * makers.STEP_EVERY_US + 1000)],
                trial=1 + number * trials // 120 if trials else None,
            )
            for number in range(120)
        ]
        return recorded(read_run(makers.run_folder(tmp_path / "run", *lines)), a_fit())

    return made


def test_a_short_load_is_replayed_as_a_whole(base):
    whole = base()
    assert replay_s(whole.timelines) == pytest.approx(120 * STEP_S)
    assert first_part(whole, 120.5 * STEP_S) is whole


def test_of_a_long_load_the_first_requests(base):
    part = first_part(base(), 70.5 * STEP_S)
    assert (part.requests, part.whole_requests) == (69, 120)  # the 70th is answered after its step
    assert [request.request_id for request in part.loads[0]] == [f"r{number}" for number in range(69)]
    [timeline] = part.timelines
    assert (timeline.arrivals.height, timeline.finishes.height, timeline.steps.height) == (69, 69, 69)
    [trial] = pooled_reports(part.timelines, None)
    assert (trial.requests_finished, trial.steps) == (69, 69)


def test_never_fewer_than_show_something(base):
    assert first_part(base(), STEP_S).requests == 50


def test_of_several_trials_the_first_ones(base):
    part = first_part(base(trials=3), 80.5 * STEP_S)
    assert (len(part.loads), part.requests, part.whole_requests) == (2, 80, 120)
    assert [timeline.trials() for timeline in part.timelines] == [[1, 2]]
    assert [trial.requests_finished for trial in pooled_reports(part.timelines, None)] == [40, 40]
    assert part.timelines[0].whole_trials
