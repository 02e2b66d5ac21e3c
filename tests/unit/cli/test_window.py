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
        (["--last", "0.5ms"], "--last 0.0005s"),
        (["--from", "2s", "--to", "1s"], "--from 2s --to 1s"),
        (["--from", "11ms", "--to", "12ms"], "--from 0.011s --to 0.012s"),
        (["--to", "0"], "--to 0s"),
    ],
)
@pytest.mark.parametrize("command", ["analyze", "report"])
def test_a_window_without_a_step_is_refused_with_the_span_of_the_trace(
    cli, four_steps, command, options, named
):
    says = f"no step began in {named}; its 4 steps began in the first 0.03 s of 0.031 s"
    assert cli(command, four_steps, *options) == (2, "", f"schedtrace: {four_steps}: {says}\n")
    assert not (four_steps / "report.html").exists()


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
    assert "does not tell" in err
    assert "which --last 1s needs" in err
