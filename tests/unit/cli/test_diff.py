import json
from copy import deepcopy

import pytest

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.model.comparison import COMPARISON_SCHEMA_VERSION
from schedtrace.read.run import read_run
from tests import makers
from tests.makers import step

pytestmark = pytest.mark.vllm  # commands that look for vLLM before they begin


def test_the_verdict_is_the_first_line_of_stdout(cli, quiet, warned):
    code, out, err = cli("diff", quiet, warned)
    assert (code, err) == (0, "")
    assert out.startswith("Verdict: new: kv-bound, blocked-budget kv_blocks")


def test_base_comes_first(cli, quiet, warned):
    _, out, _ = cli("diff", warned, quiet)
    assert out.startswith("Verdict: gone: kv-bound, blocked-budget kv_blocks")
    comparison = json.loads(cli("diff", quiet, warned, "--format", "json")[1])
    assert comparison["schema_version"] == COMPARISON_SCHEMA_VERSION
    assert (comparison["base_label"], comparison["new_label"]) == ("quiet", "warned")


@pytest.fixture
def files(tmp_path):
    """Two configurations that differ in one engine option."""
    base, new = tmp_path / "base.yaml", tmp_path / "new.yaml"
    base.write_text("model: tiny\nmax-num-seqs: 8\n")
    new.write_text("model: tiny\nmax-num-seqs: 4\ntrials: 2\n")
    return base, new


def test_run_makes_both_configurations_into_folders_named_like_the_files(cli, plans, files, tmp_path):
    code, out, _ = cli("diff", "--run", *files, "--output", tmp_path / "logs")
    assert code == 0
    assert [plan.folder for plan in plans] == [tmp_path / "logs" / "base", tmp_path / "logs" / "new"]
    assert [plan.spec.engine_args[-2:] for plan in plans] == [
        ["--max-num-seqs", "8"],
        ["--max-num-seqs", "4"],
    ]
    assert [plan.spec.trials for plan in plans] == [1, 2]
    assert out.startswith("Verdict: ")


def test_what_stands_behind_the_files_goes_to_both_and_wins(cli, plans, files, tmp_path):
    cli("diff", "--run", *files, "--output", tmp_path / "logs", "--trials", "5", "--enforce-eager")
    assert [plan.spec.trials for plan in plans] == [5, 5]
    assert [plan.spec.engine_args[-1] for plan in plans] == ["--enforce-eager"] * 2


@pytest.mark.parametrize(("asked", "interleave"), [("--interleave", True), ("--no-interleave", False)])
def test_trials_are_interleaved_as_asked(cli, plans, files, tmp_path, asked, interleave):
    cli("diff", "--run", *files, "--output", tmp_path / "logs", asked)
    assert [plan.how for plan in plans] == [{"interleave": interleave}] * 2


@pytest.mark.parametrize(("fits", "interleave"), [(True, True), (False, False)])
def test_unless_asked_trials_are_interleaved_if_both_engines_fit(
    cli, plans, files, tmp_path, monkeypatch, fits, interleave
):
    monkeypatch.setattr("schedtrace.engine.plan.both_fit", lambda _: fits)
    cli("diff", "--run", *files, "--output", tmp_path / "logs")
    assert plans[0].how == {"interleave": interleave}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Eight trials each; the slow ones take twice as long. And their reports, each made once."""
    folder = tmp_path_factory.mktemp("runs")

    def made(name, seconds):
        trials = [step(at, trial=at + 1, got={"a": 10}, new="a") for at in range(8)]
        results = [makers.result(at + 1, seconds + at * 3 % 8 / 100) for at in range(8)]
        return makers.run_folder(folder / name, *trials, about=makers.manifest(trials=results))

    folders = made("slow", 2.0), made("fast", 1.0)
    return folders, {folder: analyze_run(read_run(folder)) for folder in folders}


@pytest.fixture
def slow_and_fast(runs, monkeypatch):
    """The two folders, which ``diff`` compares by reports that are there already."""
    folders, reports = runs
    monkeypatch.setattr("schedtrace.compare.compare.analyze_run", lambda run: deepcopy(reports[run.path]))
    return folders


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ([], 0),
        (["regression:output:40"], 1),
        (["regression:output:60"], 0),
        (["regression:output:60", "regression:requests:10"], 1),
    ],
)
def test_a_regression_as_large_as_asked_ends_with_1(cli, slow_and_fast, asked, code):
    slow, fast = slow_and_fast
    options = [word for one in asked for word in ("--fail-on", one)]
    assert cli("diff", fast, slow, *options)[0] == code
    assert cli("diff", slow, fast, *options)[0] == 0


def test_a_regression_of_what_neither_run_has_cannot_be_judged(cli, slow_and_fast):
    assert cli("diff", *slow_and_fast, "--fail-on", "regression:ttft-p50")[0] == 3


def test_a_regression_that_cannot_be_told_is_no_failure_but_said(cli, tmp_path):
    folders = [
        makers.run_folder(
            tmp_path / name, step(0, trial=1), about=makers.manifest(trials=[makers.result(1, s)])
        )
        for name, s in (("a", 1.0), ("b", 9.0))
    ]
    code, _, err = cli("diff", *folders, "--fail-on", "regression")
    assert (code, err) == (0, "schedtrace: --fail-on: too few trials to tell; 5 a side are needed\n")


def test_markdown_goes_with_fail_on_and_has_no_terminal_codes(cli, slow_and_fast):
    slow, fast = slow_and_fast
    code, out, err = cli("diff", fast, slow, "--format", "markdown", "--fail-on", "regression")
    assert (code, err) == (1, "")
    assert out.startswith("**Verdict: output ")
    assert "| **worse** |" in out
    assert "\x1b" not in out
