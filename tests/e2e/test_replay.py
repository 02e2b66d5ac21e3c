"""What the real engine decided is decided again without it, and what another setting would change."""

import pytest

from tests.e2e.conftest import schedtrace


@pytest.mark.parametrize("label", ["default", "async", "prequeued"])
def test_a_replay_decides_every_step_as_the_engine_did(shared, workplace, label):
    ended = schedtrace_json("replay", shared(label), cwd=workplace)
    assert ended["compared_steps"] > 30
    assert ended["same_steps"] == ended["compared_steps"]


def test_half_the_budget_makes_two_steps_more(shared, workplace):
    """Half the budget takes 8 of 16 prompts first; then 8 decodes leave the last one 8 tokens short."""
    ended = schedtrace_json(
        "replay", shared("prequeued"), "--set", "max_num_batched_tokens=8192", cwd=workplace
    )
    [steps] = [figure for figure in ended["decided"] if figure["name"] == "steps"]
    assert steps["recorded"] == steps["replayed"]
    assert steps["changed"] == steps["replayed"] + 2


def test_a_simulation_of_a_gpu_is_a_run_like_any_other(workplace):
    ended = schedtrace(
        *("simulate", "--model", "Qwen3-8B", "--gpu", "h100", "--num-prompts", 40, "--output-len", 30),
        *("--request-rate", 40, "--max-num-seqs", 4, "--output", workplace, "--label", "simulated"),
        cwd=workplace,
    )
    assert (ended.code, ended.err) == (0, "")
    assert "budget 8,192, 4 seats" in ended.out
    report = schedtrace("analyze", workplace / "simulated", "--predict", "--format", "json", cwd=workplace)
    assert (report.code, report.err) == (0, "")
    (run,) = report.json()["runs"]
    first = run["findings"][0]
    assert (first["code"], first["gain"]["method"]) == ("max-num-seqs-bound", "replay")
    assert first["advice"][0]["tested"]["text"].startswith("Replayed on this load: steps ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--gpu", "h1000"), "h1000"),
        (("--gpu", "h100", "--max-num-seq", 4), "--max-num-seq"),
        (("--gpu", "h100", "--max-model-len", 100_000), "max-model-len"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(workplace, arguments, told):
    ended = schedtrace("simulate", "--model", "Qwen3-32B", *arguments, "--num-prompts", 2, cwd=workplace)
    assert ended.code == 2
    [line] = ended.err.splitlines()
    assert told in line


def schedtrace_json(*arguments, cwd):
    ended = schedtrace(*arguments, "--format", "json", cwd=cwd)
    assert (ended.code, ended.err) == (0, "")
    return ended.json()
