"""A server has no trials, and may have finished nothing yet."""

import pytest

from schedtrace.diagnose.analyze import analyze
from schedtrace.present.pages.report import report_page
from schedtrace.read.run import read_run
from tests.makers import arrival, finish, header, step, write_trace
from tests.unit.present.test_goldens import text_of


@pytest.fixture
def shown(tmp_path):
    """``shown(finished="ab", full=True)``: the report of three requests, a, b and c."""

    def show(*, finished="", trial=None, full=False):
        arrived = [arrival(name, trial) for name in "abc"]
        lines = [
            step(0, got=dict.fromkeys("abc", 10), new="abc", arrived=arrived, trial=trial),
            step(1, finished=[finish(name) for name in finished], trial=trial),
        ]
        about = header(trial_ids=trial is not None)
        write_trace(tmp_path / "engine-0.jsonl", about, *lines)
        return text_of(report_page(analyze([read_run(tmp_path)]), full=full))

    return show


@pytest.mark.parametrize(
    ("finished", "trial", "says"),
    [
        ("abc", None, "3 requests, "),
        ("", None, "0 of 3 requests finished, "),
        ("ab", None, "2 of 3 requests finished, "),
        ("abc", 1, "3 requests in 1 trial, "),
    ],
)
def test_the_first_line_says_how_many_requests_came_and_finished(shown, finished, trial, says):
    assert f"\n  {says}" in shown(finished=finished, trial=trial)


def test_the_table_of_a_server_has_no_trial_and_no_first_step(shown):
    of_server, of_trial = shown(finished="abc", full=True), shown(finished="abc", trial=1, full=True)
    assert all(word in of_trial for word in ("first step", "new requests", "trial"))
    assert not any(word in of_server for word in ("first step", "new requests", "trial"))
