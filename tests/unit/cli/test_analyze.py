import json

import pytest

from schedtrace.model.report import REPORT_SCHEMA_VERSION, Finding, Report, RunReport, TrialReport


def test_a_report_goes_to_stdout_and_nothing_to_stderr(cli, quiet):
    code, out, err = cli("analyze", quiet)
    assert (code, err) == (0, "")
    assert out.startswith("quiet  ")
    assert "No findings" in out


def test_a_pipe_gets_plain_text_of_the_width_asked_for(cli, warned, monkeypatch):
    wide = []
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        _, out, _ = cli("analyze", warned)
        assert "\x1b" not in out
        wide.append(max(len(line.rstrip()) for line in out.splitlines()[1:]))
    assert wide[0] <= 80 < wide[1] <= 120


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


@pytest.mark.parametrize("run", ["quiet", "warned", "critical"])
def test_json_is_one_object_with_the_keys_of_the_report_and_nothing_else(cli, request, run):
    code, out, err = cli("analyze", request.getfixturevalue(run), "--format", "json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert list(report) == list(Report.__struct_fields__)
    assert report["schema_version"] == REPORT_SCHEMA_VERSION
    assert list(report["runs"][0]) == list(RunReport.__struct_fields__)
    assert list(report["runs"][0]["trials"][0]) == list(TrialReport.__struct_fields__)
    assert [list(finding) for finding in report["runs"][0]["findings"]] == [
        list(Finding.__struct_fields__) for _ in report["runs"][0]["findings"]
    ]
    assert len(report["runs"][0]["findings"]) == (run != "quiet")


def test_json_of_a_folder_of_runs_is_still_one_object(cli, quiet, warned):
    _, out, _ = cli("analyze", quiet.parent, "--format", "json")
    assert warned.parent == quiet.parent
    assert [run["label"] for run in json.loads(out)["runs"]] == ["quiet", "warned"]


def test_json_and_fail_on_go_together(cli, critical):
    code, out, _ = cli("analyze", critical, "--format", "json", "--fail-on", "warning")
    assert (code, json.loads(out)["runs"][0]["findings"][0]["severity"]) == (1, "critical")
