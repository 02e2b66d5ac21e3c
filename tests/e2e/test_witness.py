"""On the real engine, too: what is rebuilt from deltas is what an observer within the engine has seen."""

import json

import pytest

from tests.contract.rebuilt import steps_of
from tests.e2e.conftest import REPO, run_options, schedtrace

LOADS = {
    "decode": {"input_len": 64, "output_len": 300, "num_prompts": 12, "trials": 2},
    "tight": {
        "input_len": 200, "output_len": 90, "num_prompts": 24, "trials": 2,
        "max_num_seqs": 16, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 40,
        "max_model_len": 512, "block_size": 32, "scheduling_policy": "priority", "request_rate": 60,
    },
}  # fmt: skip


@pytest.mark.parametrize("load", LOADS)
def test_a_witness_within_the_engine_agrees_on_every_step(load, tmp_path, monkeypatch):
    monkeypatch.setenv("WITNESS", str(tmp_path / "seen"))
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    options = run_options(label=load, scheduler_cls="tests.e2e.witness.Witness", **LOADS[load])
    ended = schedtrace("run", *options, cwd=tmp_path)
    assert ended.code == 0, ended.err
    trace = tmp_path / "logs" / load / "engine-0.jsonl"
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    steps = steps_of(trace)
    assert list(steps) == list(range(len(seen)))
    for step, told in zip(steps.values(), seen, strict=True):
        rows = [
            [row["request_id"], row["computed_tokens"], row["scheduled_tokens"]] for row in step["requests"]
        ]
        assert rows == told["requests"]
        assert [step["num_running_before"], step["num_running_after"]] == told["running"]
        assert (step["num_waiting_after"], step["kv_blocks_free_after"]) == (told["waiting"], told["free"])
    assert trace.read_text().count('"type":"delta"') > len(seen) * 0.9
