import json

import pytest

from tests import makers


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
