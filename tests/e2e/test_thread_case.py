"""The forum thread's case: 16 prompts of 1,024 + 64 tokens that fit the budget of 16,384 exactly."""

import json

from tests.e2e.conftest import findings, schedtrace


def test_first_steps_are_arrival_limited_or_full_and_never_blocked(shared, analyzed):
    run = analyzed(shared("default"))
    assert len(run["trials"]) == 3
    for trial in run["trials"]:
        assert sum(trial["new_per_step"]) == 16
        assert trial["first_step_tokens"] == 1024 * trial["first_step_requests"]
        assert trial["requests_finished"] == 16
        assert trial["preemptions"] == 0
    short = [trial["trial"] for trial in run["trials"] if trial["first_step_requests"] < 16]
    assert findings(run, "blocked-budget") == []
    late = findings(run, "arrival-limited")
    assert (late[0]["trials"] if late else []) == short
    assert sum(finding["evidence"]["late_requests"] for finding in late) == sum(
        16 - trial["first_step_requests"] for trial in run["trials"]
    )


def test_prequeueing_fills_the_first_step_in_every_trial(shared, analyzed):
    run = analyzed(shared("prequeued"))
    assert [trial["new_per_step"] for trial in run["trials"]] == [[16]] * 3
    assert "arrival-limited" not in {finding["code"] for finding in run["findings"]}
    assert run["config"]["exits_via"] == "source"


def test_the_throughput_is_the_front_ends(shared, analyzed):
    folder = shared("default")
    manifest = json.loads((folder / "run.json").read_text())
    assert manifest["status"] == "finished"
    for told, trial in zip(manifest["trials"], analyzed(folder)["trials"], strict=True):
        assert told["num_requests"] == 16
        assert told["input_tokens"] == 16 * 1024
        assert told["output_tokens"] == 16 * 64
        assert trial["throughput_from"] == "front_end"
        assert trial["output_tokens_per_s"] == 16 * 64 / told["elapsed_s"]
        assert trial["ttft_ms"]["count"] == 16
        assert trial["ttft_ms"]["p99"] < trial["e2e_ms"]["p50"] < told["elapsed_s"] * 1e3


def test_diff_says_that_prequeueing_removes_it(shared, workplace):
    base, new = shared("default"), shared("prequeued")
    ended = schedtrace("diff", base, new, "--format", "json", cwd=workplace)
    assert ended.code == 0, ended.err
    comparison = ended.json()
    changed = {change["name"]: (change["base"], change["new"]) for change in comparison["config"]}
    assert changed == {"workload.prequeue": (False, True)}
    left = {change["code"]: change["new_count"] for change in comparison["findings"]}
    assert left.get("arrival-limited", 0) == 0
    (first,) = [metric for metric in comparison["metrics"] if metric["name"] == "first-step requests"]
    assert (first["new"]["min"], first["new"]["max"]) == (16, 16)


def test_the_manifest_tells_versions_command_and_resolved_settings(shared):
    manifest = json.loads((shared("default") / "run.json").read_text())
    assert "cpu" in manifest["vllm_version"]
    assert manifest["command"][:2] == ["schedtrace", "run"]
    assert manifest["engine_args_given"]["max_num_batched_tokens"] == 16384
    assert manifest["config_resolved"]["scheduler_config"]["max_num_batched_tokens"] == 16384
    assert manifest["engine_args_chosen"]["skip_tokenizer_init"] is True
    assert manifest["front_end"] == "LLMEngine"


def test_nothing_is_overwritten_without_force(shared):
    folder = shared("default")
    before = (folder / "engine-0.jsonl").read_bytes()
    ended = schedtrace("run", "--model", "anything", "--label", folder.name, cwd=folder.parents[1])
    assert ended.code == 2
    assert "--force" in ended.err
    assert (folder / "engine-0.jsonl").read_bytes() == before
