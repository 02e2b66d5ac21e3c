"""On the real engine, too: what is rebuilt from deltas is what an observer within the engine has seen."""

import json

import pytest

from schedtrace.read.run import read_run
from tests.contract.rebuilt import steps_of
from tests.e2e.conftest import REPO, recorded

LOAD = {
    "input_len": 200, "output_len": 60, "num_prompts": 16, "trials": 2,
    "max_num_seqs": 16, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 40,
    "max_model_len": 512, "block_size": 32, "scheduling_policy": "priority",
    "request_rate": 30, "seed": 3, "scheduler_cls": "tests.e2e.witness.Witness",
}  # fmt: skip


@pytest.fixture(scope="module")
def witnessed(workplace):
    """The folder of such a run, with what the witness wrote in ``seen``."""
    seen = workplace / "tight.seen"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WITNESS", str(seen))
        patch.setenv("PYTHONPATH", str(REPO))
        return recorded(workplace, "tight", LOAD), seen


def test_a_witness_within_the_engine_agrees_on_every_step(witnessed):
    folder, told = witnessed
    trace = folder / "engine-0.jsonl"
    seen = [json.loads(line) for line in told.read_text().splitlines()]
    steps = steps_of(trace)
    assert list(steps) == list(range(len(seen)))
    for step, one in zip(steps.values(), seen, strict=True):
        rows = [
            [row["request_id"], row["computed_tokens"], row["scheduled_tokens"]] for row in step["requests"]
        ]
        assert rows == one["requests"]
        assert [step["num_running_before"], step["num_running_after"]] == one["running"]
        assert (step["num_waiting_after"], step["kv_blocks_free_after"]) == (one["waiting"], one["free"])


def test_a_request_rate_goes_through_the_online_front_end_and_a_small_cache_preempts(witnessed, analyzed):
    folder, told = witnessed
    run = analyzed(folder)
    steps = len(told.read_text().splitlines())
    assert (folder / "engine-0.jsonl").read_text().count('"type":"delta"') > steps * 0.9
    assert run["config"]["front_end"] == "AsyncLLM"
    assert [trial["requests_finished"] for trial in run["trials"]] == [16, 16]
    assert all(trial["preemptions"] > 0 for trial in run["trials"])
    (trace,) = read_run(folder).traces
    arrived = trace.arrivals.filter(trace.arrivals["trial"] == 1)["arrived_us"].sort()
    assert 0.2 < (arrived[-1] - arrived[0]) / 1e6 < 1.5  # 15 gaps of 33 ms on average
