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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--from", "5h"], "--from 18000s"),
        (["--last", "0"], "--last 0s"),
        (["--from", "2s", "--to", "1s"], "--from 2s --to 1s"),
        (["--to", "0"], "--to 0s"),
    ],
)
@pytest.mark.parametrize("command", ["analyze", "report"])
def test_a_window_without_a_step_is_refused_with_the_span_of_the_trace(
    cli, four_steps, command, options, named
):
    says = (
        f"no step began in {named}, and no request was there; its 4 steps lie between 0 s and 0.031 s into "
        "the recording"
    )
    assert cli(command, four_steps, *options) == (2, "", f"schedtrace: {four_steps}: {says}\n")
    assert not (four_steps / "report.html").exists()


def test_a_window_between_two_steps_has_the_request_that_was_there(cli, four_steps):
    code, out, err = cli("analyze", four_steps, "--from", "11ms", "--to", "12ms", "--format", "json")
    assert (code, err) == (0, "")
    [run] = json.loads(out)["runs"]
    assert [(one["state"], one["time_ms"]) for one in run["request_time"]] == [("decode", 1.0)]


def test_times_count_from_the_beginning_of_the_recording_not_from_the_first_step(cli, tmp_path):
    later = run_folder(
        tmp_path / "later", *(step(number, start=5_000_000 + 10_000 * number) for number in range(4))
    )
    code, out, _ = cli("analyze", later, "--from", "5.01s", "--to", "5.03s", "--format", "json")
    assert (code, json.loads(out)["runs"][0]["trials"][0]["steps"]) == (0, 2)
    assert "5.010 s into the recording" in cli("step", later, "1")[1]


def test_a_window_with_steps_of_one_engine_only_is_judged(cli, four_steps):
    run_folder(four_steps, step(0, got={"b": 1}), engine_rank=1)
    code, out, err = cli("analyze", four_steps, "--from", "15ms", "--format", "json")
    assert (code, err) == (0, "")
    assert [trial["steps"] for trial in json.loads(out)["runs"][0]["trials"]][:1] == [2]


def test_a_run_without_steps_has_nothing_to_judge_in_any_window(cli, tmp_path):
    code, out, err = cli("analyze", run_folder(tmp_path / "none"), "--last", "1s")
    assert (code, err) == (0, "")
    assert "No step was recorded: nothing to judge." in out


def test_a_log_without_times_has_no_window(cli, tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(
        "Iteration(0): 1 context requests, 7 context tokens, 0 generation requests, 0 generation tokens, "
        "iteration elapsed time: 1.0 ms\n"
    )
    code, out, err = cli("analyze", log, "--last", "1s")
    assert (code, out) == (2, "")
    assert "does not record" in err
    assert "which --last 1s needs" in err
