"""``late-arrivals``: steps that ran while requests of their trial had not come."""

import pytest

from schedtrace.diagnose.rules import RULES
from tests.makers import arrival, step

CODE = "late-arrivals"


@pytest.fixture
def found(view_of):
    def find(*lines, closed=True, **header):
        view = view_of(*lines, **header)
        view.closed_workload = closed
        return RULES[CODE](view)

    return find


def run(last_came, *, waiting=0, running=1, used=1):
    """Requests a and b at 0, c when told; steps of 1 ms each 10 ms, the third one has all."""
    return [
        step(
            0,
            got={"a": used},
            running=running,
            waiting=waiting,
            arrived=[arrival("a", 0, 0), arrival("b", 0, 0)],
        ),
        step(1, got={"a": 1, "b": 1}, running=2),
        step(2, got={"a": 1, "b": 1, "c": 9}, arrived=[arrival("c", 0, last_came)]),
    ]


def test_steps_before_the_last_request_came_are_told(found):
    [finding] = found(*run(15_000))
    assert (finding.count, finding.steps) == (2, [0, 1])
    assert finding.evidence.spent_ms == 2.0
    assert finding.evidence.spent_frac == 2000 / 21_000
    assert finding.evidence.handed_over_ms == 15.0


def test_a_request_that_came_before_schedule_was_done_was_not_late(found):
    assert found(*run(100)) == []


@pytest.mark.parametrize("limited", [{"waiting": 1}, {"running": 8}, {"used": 1000}])
def test_steps_that_something_else_limited_were_not_short_of_requests(found, limited):
    [finding] = found(*run(15_000, **limited))
    assert finding.steps == [1]


def test_requests_that_come_by_themselves_are_not_late(found):
    assert found(*run(15_000), closed=False) == []


def test_the_requests_of_the_next_trial_are_not_awaited(found):
    lines = [
        step(0, trial=1, got={"a": 1}, arrived=[arrival("t1-a", 0, 0)]),
        step(1, trial=2, got={"b": 1}, arrived=[arrival("t2-b", 9000, 9000)]),
    ]
    assert found(*lines) == []


def test_a_hundredth_of_the_run_is_too_little(found):
    rest = [step(n, got={"a": 1}, back=10_000) for n in range(3, 40)]
    assert found(*run(15_000), *rest) == []
