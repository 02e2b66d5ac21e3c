"""``schedtrace analyze``: options, exit codes, windows of time, and records that cannot answer a question."""

import json

import pytest

from schedtrace.model.trace_facts import Fact
from tests import makers
from tests.makers import arrival, run_folder, step
from tests.unit.cli.test_records import FIRST, ITERATIONS


def test_a_report_goes_to_stdout_and_nothing_to_stderr(cli, quiet):
    code, out, err = cli("analyze", quiet)
    assert (code, err) == (0, "")
    assert out.split()[:2] == ["quiet", str(quiet)]
    assert "Nothing limits this engine: " in out


def width(out):
    """Of the text; the first line is a path, and commands at the end are never broken."""
    lines = out.splitlines()[1:]
    return max(len(line.rstrip()) for line in lines if not line.startswith("  schedtrace "))


def test_a_pipe_gets_plain_text_of_the_width_asked_for(cli, warned, monkeypatch):
    wide = []
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        _, out, _ = cli("analyze", warned)
        assert "\x1b" not in out
        wide.append(width(out))
    assert wide[0] <= 80 < wide[1] <= 120


@pytest.mark.parametrize("columns", ["wide", "", "0", "-5", "1.5"])
def test_a_width_that_is_none_is_not_taken(cli, warned, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = cli("analyze", warned)
    assert code == 0
    assert 80 < width(out) <= 100


def test_runs_that_recorded_nothing_are_named_on_stderr(cli, quiet):
    failed = makers.run_folder(quiet.parent / "failed", about=makers.manifest(status="failed"))
    (failed / "engine-0.jsonl").unlink()
    code, out, err = cli("analyze", quiet.parent)
    assert (code, out.split()[0]) == (0, "quiet")
    assert err == f"schedtrace: skipped {failed}: it contains no trace\n"


def test_a_trial_that_the_run_was_cut_in_is_told_so(cli, tmp_path):
    lines = [makers.step(at, trial=at + 1, got={"a": 1}) for at in range(2)]
    told = makers.manifest(status="interrupted", trials=[makers.result(1, 1.0, num_requests=0)])
    _, out, _ = cli("analyze", makers.run_folder(tmp_path / "cut", *lines, about=told), "--details")
    assert [line.split()[:3] for line in out.splitlines() if "1 / 1" in line] == [
        ["1", "1", "1"],
        ["2", "cut", "1"],
    ]


@pytest.mark.parametrize(
    ("count", "says"), [(0, ""), (1, "; 1 warm-up step left out"), (2, "; 2 warm-up steps")]
)
def test_the_warm_up_is_told_to_be_left_out(cli, tmp_path, count, says):
    lines = [makers.step(at, trial=0 if at < count else 1) for at in range(3)]
    _, out, _ = cli("analyze", makers.run_folder(tmp_path / "r", *lines), "--details")
    [line] = [line.strip() for line in out.splitlines() if "causes inferred from its state" in line]
    assert line.startswith(f"causes inferred from its state{says}")
    assert ("warm-up" in line) is bool(count)


@pytest.mark.parametrize(
    ("load", "says"),
    [
        ({}, "100 tokens + 10, all at once"),
        ({"request_rate": 0.001}, "100 tokens + 10, 0.001 per second"),
        ({"prequeue": True}, "100 tokens + 10, all queued before the first step"),
        ({"range_ratio": 0.5}, "100 tokens + 10 (lengths within 50 % of these), all at once"),
        ({"dataset": "x.json", "input_len": None, "output_len": None}, "x.json, all at once"),
    ],
)
def test_the_workload_is_told_as_it_was(cli, tmp_path, monkeypatch, load, says):
    monkeypatch.setenv("COLUMNS", "120")
    told = makers.manifest(workload=makers.workload(**load))
    _, out, _ = cli("analyze", makers.run_folder(tmp_path / "r", makers.step(0), about=told), "--details")
    assert f"workload: 4 prompts of {says}" in [line.strip() for line in out.splitlines()]


@pytest.mark.parametrize(
    ("run", "fail_on", "code"),
    [
        ("quiet", "info", 0),
        ("warned", None, 0),
        ("warned", "critical", 0),
        ("warned", "warning", 1),
        ("warned", "info", 1),
        ("critical", "critical", 1),
        ("critical", None, 0),
    ],
)
def test_the_exit_code_is_1_only_for_a_finding_as_severe_as_asked(cli, request, run, fail_on, code):
    asked = [] if fail_on is None else ["--fail-on", fail_on]
    told, out, err = cli("analyze", request.getfixturevalue(run), *asked)
    assert (told, err) == (code, "")
    assert run in out


def test_one_severe_run_of_several_is_enough(cli, quiet, critical):
    assert cli("analyze", quiet, critical, "--fail-on", "critical")[0] == 1


def test_json_of_a_folder_of_runs_is_still_one_object(cli, quiet, warned):
    _, out, _ = cli("analyze", quiet.parent, "--format", "json")
    assert warned.parent == quiet.parent
    assert [run["label"] for run in json.loads(out)["runs"]] == ["quiet", "warned"]


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


WORKS = [
    step(0, start=0, got={"a": 100}, new="a", arrived=[arrival("a", None, 0)]),
    step(1, start=1000, got={"a": 1}),
]


def test_a_log_without_a_finding_is_no_success(cli):
    code, out, err = cli("analyze", ITERATIONS, "--fail-on", "warning")
    assert code == 3
    assert "Nothing limits" not in out
    assert "This record cannot tell what limits the engine: it lacks" in " ".join(out.split())
    assert err.startswith(f"schedtrace: --fail-on warning cannot be judged: {ITERATIONS} does not record ")
    assert err.count("\n") == 1


def test_a_finding_that_the_record_can_show_is_judged(cli):
    only = ["--only", "budget-underused"]
    assert cli("analyze", FIRST, "--fail-on", "info", *only)[0] == 1
    assert cli("analyze", FIRST, "--fail-on", "warning", *only)[0] == 0


def test_a_severe_finding_counts_though_others_cannot_be_judged(cli):
    assert cli("analyze", FIRST, "--fail-on", "info")[0] == 1


def test_a_trace_is_judged_and_one_without_steps_is_not(cli, tmp_path):
    assert cli("analyze", run_folder(tmp_path / "run", *WORKS), "--fail-on", "critical")[0] == 0
    code, _, err = cli("analyze", run_folder(tmp_path / "empty"), "--fail-on", "critical")
    assert (code, err.count("has no step")) == (3, 1)


def test_preemptions_that_nobody_sees_are_not_judged(cli, tmp_path):
    run = run_folder(tmp_path / "run", *WORKS, preemptions_recorded=False)
    code, _, err = cli("analyze", run, "--fail-on", "critical")
    assert code == 3
    assert str(Fact.PREEMPTIONS) in err
    ignored = ["never-fits", "no-progress", "preemption", "prefix-cache"]
    options = [word for code in ignored for word in ("--ignore", code)]
    assert cli("analyze", run, "--fail-on", "critical", *options)[0] == 0


def test_a_metric_that_two_records_do_not_have_is_no_regression_and_no_success(cli, tmp_path):
    for asked, what in (("regression", "a metric that can be worse"), ("regression:ttft-p50", "TTFT p50")):
        code, _, err = cli("diff", ITERATIONS, ITERATIONS, "--fail-on", asked)
        assert (code, err.count(f"do not both record {what}")) == (3, 1)
    run = run_folder(tmp_path / "run", *WORKS)
    assert cli("diff", run, run, "--fail-on", "regression")[0] == 0


def test_two_logs_are_alike_in_what_both_record(cli):
    said = " ".join(cli("diff", ITERATIONS, ITERATIONS)[1].split())
    assert "no difference found in what both record" in said
    assert "No setting that both records have differs." in said
    assert "No finding that both records can show on either side." in said
    assert "One side does not record who was refused." in said


def test_step_and_request_say_what_the_record_lacks(cli):
    for command, fact in (("step", Fact.TIMES), ("request", Fact.REQUESTS)):
        code, _, err = cli(command, ITERATIONS, "3")
        assert (code, err.count(f"does not record {fact}, which {command} needs")) == (2, 1)


def test_a_log_that_begins_later_has_no_first_step(cli, tmp_path):
    """Its first request has computed tokens: whether it is new is not known."""
    log = tmp_path / "later.log"
    request = {"request_id": "a", "scheduled_tokens": 1}
    records = [
        {"token_budget": 64, "total_requests": 1, "requests": [request | {"computed_tokens": computed}]}
        for computed in (40, 41)
    ]
    log.write_text("".join(f"{record}\n" for record in records))
    out = " ".join(cli("analyze", log)[1].split())
    assert "It shows 2 steps of 1 request and 1 token." in out
    assert "all 2 - / - - " in out
    assert "New requests" not in out


def test_a_table_that_a_record_cannot_fill_is_not_written(cli, tmp_path):
    """An empty table of arrivals would mean that none came."""
    assert cli("export", FIRST, "--to", "csv", "--output", tmp_path / "out")[0] == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"steps.csv", "requests.csv"}
