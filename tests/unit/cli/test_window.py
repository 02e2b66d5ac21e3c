"""``analyze --from --to --last``: four steps, 10 ms apart, the last one of 1 ms."""

import json

import pytest

from tests.makers import run_folder, step


@pytest.fixture
def four_steps(tmp_path):
    return run_folder(tmp_path / "r", *(step(number, got={"a": 1}) for number in range(4)))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ([], 4),
        (["--from", "10ms"], 3),
        (["--from", "0.011"], 2),
        (["--to", "20 ms"], 2),
        (["--from", "10ms", "--to", "0.02s"], 1),
        (["--last", "11ms"], 2),
        (["--last", "10.9ms"], 1),
        (["--last", "1h"], 4),
        (["--from", "0m"], 4),
    ],
)
def test_a_window_of_a_trace(cli, four_steps, options, steps):
    code, out, err = cli("analyze", four_steps, "--format", "json", *options)
    assert (code, err) == (0, "")
    assert json.loads(out)["runs"][0]["trials"][0]["steps"] == steps


def test_a_window_after_the_trace_has_nothing_to_judge(cli, four_steps):
    code, out, err = cli("analyze", four_steps, "--from", "1h")
    assert (code, err) == (0, "")
    assert "No step was recorded: nothing to judge." in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--from", "soon"], "--from soon: expected a time such as 90s, 5m or 1h"),
        (["--to", "-1s"], "--to -1s: expected a time such as 90s, 5m or 1h"),
        (["--from", "1s", "--last", "1s"], "--from and --last cannot be given together"),
        (["--from", "2s", "--to", "2s"], "--from 2s --to 2s: the window is empty"),
        (["--to", "0"], "--from 0 --to 0: the window is empty"),
    ],
)
def test_what_is_no_window_is_refused(cli, four_steps, options, says):
    assert cli("analyze", four_steps, *options) == (2, "", f"schedtrace: {says}\n")
