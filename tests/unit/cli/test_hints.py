"""What a person is told beside the answer: what was left out, and what was probably meant."""

from tests.makers import manifest, run_folder, step


def test_runs_that_recorded_nothing_are_named_on_stderr(cli, tmp_path):
    run_folder(tmp_path / "good", step(0, got={"a": 1}))
    run_folder(tmp_path / "failed", about=manifest(status="failed"))
    (tmp_path / "failed" / "engine-0.jsonl").unlink()
    code, out, err = cli("analyze", tmp_path)
    assert code == 0
    assert out.startswith("good")
    assert err == f"schedtrace: skipped {tmp_path / 'failed'}: it contains no trace\n"


def test_a_run_whose_command_was_killed_is_told(cli, tmp_path):
    run_folder(tmp_path / "r", step(0, trial=1, got={"a": 1}), about=manifest(status="running"))
    _, out, _ = cli("analyze", tmp_path / "r")
    assert "! The run's command ended without a result, or is still running." in out


def test_configurations_without_run_get_the_hint(cli, tmp_path):
    code, _, err = cli("diff", tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert (code, err) == (
        2,
        "schedtrace: these are configurations, not runs: add --run to run and compare them\n",
    )


def test_without_vllm_run_says_what_to_install(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    code, _, err = cli("run", "--model", "tiny", "--output", tmp_path / "logs")
    assert code == 2
    assert err.startswith("schedtrace: vLLM is not installed here: pip install 'schedtrace[vllm]'")
    assert not (tmp_path / "logs").exists()
