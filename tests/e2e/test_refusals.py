"""Every refusal that a configuration can force on the real engine, told by its cause."""

import json

import pytest

from tests.e2e.conftest import MODEL, findings, schedtrace


@pytest.fixture(scope="session")
def compared(workplace):
    """Two YAML configurations run with their trials in turn, and compared: 16 seats and 4."""
    common = f"model: {MODEL}\nload-format: dummy\nprequeue: true\n"
    common += "input-len: 256\noutput_len: 16\nnum-prompts: 16\n"
    (workplace / "many.yaml").write_text(common + "trials: 2\nmax-num-seqs: 16\n")
    (workplace / "few.yaml").write_text(common + "trials: 2\nmax_num_seqs: 4\n")
    ended = schedtrace("diff", "--run", "many.yaml", "few.yaml", "--format", "json", cwd=workplace)
    assert ended.code == 0, ended.err
    return ended.json()


def test_diff_run_makes_both_runs_and_compares_them(compared, workplace):
    changed = {change["name"]: (change["base"], change["new"]) for change in compared["config"]}
    assert changed["scheduler_config.max_num_seqs"] == (16, 4)
    for code in ("blocked-budget", "max-num-seqs-bound"):  # a busy machine may have interruptions that lead
        (found,) = [change for change in compared["findings"] if change["code"] == code]
        assert (found["cause"], found["state"]) == ("max_num_seqs", "appeared")
    for label in ("many", "few"):
        manifest = json.loads((workplace / "logs" / label / "run.json").read_text())
        assert [trial["trial"] for trial in manifest["trials"]] == [1, 2]


def test_four_seats_block_sixteen_prompts_until_the_last_four_run(compared, workplace, analyzed):
    del compared
    run = analyzed(workplace / "logs" / "few")
    (blocked,) = findings(run, "blocked-budget")
    assert blocked["cause"] == "max_num_seqs"
    assert blocked["trials"] == [1, 2]
    assert blocked["count"] == 2 * 3 * 16  # three groups of four wait while the one before decodes
    assert [trial["new_per_step"] for trial in run["trials"]] == [[4, 4, 4, 4]] * 2
    assert findings(run, "arrival-limited") == []
