import json

import pytest

from schedtrace.model.comparison import COMPARISON_SCHEMA_VERSION, Comparison


def test_the_verdict_is_the_first_line_of_stdout(cli, quiet, warned):
    code, out, err = cli("diff", quiet, warned)
    assert (code, err) == (0, "")
    assert out.startswith("Verdict: new: blocked-budget kv_blocks")


def test_base_comes_first(cli, quiet, warned):
    _, out, _ = cli("diff", warned, quiet)
    assert out.startswith("Verdict: gone: blocked-budget kv_blocks")


def test_json_is_one_object_with_the_keys_of_the_comparison_and_nothing_else(cli, quiet, warned):
    code, out, err = cli("diff", quiet, warned, "--format", "json")
    comparison = json.loads(out)
    assert (code, err) == (0, "")
    assert list(comparison) == list(Comparison.__struct_fields__)
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


def test_two_configurations_of_one_name_are_refused(cli, plans, files, tmp_path):
    code, out, err = cli("diff", "--run", files[0], files[0], "--output", tmp_path / "logs")
    assert (code, out, plans) == (2, "", [])
    assert "both runs would be called base" in err
