"""Data-parallel ranks in ``simulate``, ``sweep`` and ``advise``."""

import json
from functools import partial

import polars as pl
import pytest

pytest.importorskip("vllm")

from schedtrace.cli.main import main
from schedtrace.model.message import plain
from schedtrace.read.run import read_run
from schedtrace.step_times.constants import Constants, HostTimes
from schedtrace.step_times.roofline import gpu
from schedtrace.step_times.shapes import shape
from schedtrace.whatif.replays import ModelledEngine, Work
from schedtrace.whatif.sweep import SweepLog, replay_configurations
from schedtrace.workloads import LoadRequest
from schedtrace.workloads.workload import make_workload
from tests.contract.whatif.conftest import Here

pytestmark = pytest.mark.vllm

MADE = {
    "max_model_len": 64,
    "async_scheduling": False,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 100,
}


def test_a_simulation_of_two_ranks_routes_in_turn_and_they_step_together(tmp_path, capsys):
    model = ["--model", "DeepSeek-V3", "--gpu", "h100", "--max-model-len", "4096"]
    model += ["--num-gpu-blocks-override", "1000"]
    load = ["--num-prompts", "6", "--input-len", "200", "--output-len", "8", "--range-ratio", "0.5"]
    ranks = ["--data-parallel-size", "2", "--router", "round-robin", "--dp-sync-interval", "1"]
    ranks += ["--balance-ranks"]
    assert main(["simulate", *model, *load, *ranks, "--output", str(tmp_path), "--label", "two"]) == 0
    assert "what gathering the ranks' counts costs is not known" in capsys.readouterr().out
    traces = read_run(tmp_path / "two").traces
    came = [trace.arrivals["request_id"].to_list() for trace in traces]
    assert came == [["t1-0", "t1-2", "t1-4"], ["t1-1", "t1-3", "t1-5"]]
    ends = [
        dict(trace.steps.filter(pl.col("total_requests") > 0).select("step_counter", "output_us").iter_rows())
        for trace in traces
    ]
    both = ends[0].keys() & ends[1].keys()
    assert len(both) >= 8
    assert all(ends[0][one] == ends[1][one] for one in both)


@pytest.mark.parametrize(
    ("gathering_us", "told"), [(100.0, "takes 0.10 ms in every loop"), (None, "not known")]
)
def test_a_sweep_over_ranks_and_balance_scheduling(tmp_path, gathering_us, told):
    """Four requests of 60 + 3 tokens in a seat a rank: 1.6 ms and twice 1.05 ms each."""
    load = [
        LoadRequest(request_id=f"r{number}", arrived_us=0, prompt_tokens=60, output_tokens=3)
        for number in range(4)
    ]
    times = Constants(1000, 10, 50, host=HostTimes(0, 0, 0, 0, 0, 0, gathering_us=gathering_us))
    engine = ModelledEngine(shape("DeepSeek-V3"), gpu("h100"), times)
    work = Work([make_workload("load", "jsonl", partial(iter, load))], engine)
    changes = [
        {**MADE, "data_parallel_size": ranks, "dp_sync_interval": 1, "balance_ranks": balance}
        for ranks, balance in ((1, False), (2, False), (2, True))
    ]
    answer = replay_configurations(work, changes, SweepLog(tmp_path), Here)
    took_ms = {
        (row.changes["data_parallel_size"], row.changes["balance_ranks"]): 12e3 / row.figure("output").value
        for row in answer.configurations
    }
    gathered = 5 * (gathering_us or 0) / 1e3  # between six passes; a rank without a request may always admit
    assert took_ms == pytest.approx({(1, False): 14.8, (2, False): 7.4, (2, True): 7.4 + gathered})
    assert told in plain(answer.notes[-1])


def test_advice_with_two_ranks_has_them_in_every_proposal(seats, monkeypatch, capsys):
    """More goodput from two ranks of a dense model than from one engine, with whatever else."""
    monkeypatch.setattr("schedtrace.whatif.sweep.local_replays", lambda work, _: Here(work))
    monkeypatch.setattr("schedtrace.whatif.latency_targets.candidates", lambda *_: [{"max_num_seqs": 8}])
    monkeypatch.setattr("schedtrace.whatif.latency_targets.RESAMPLES", 0)
    command = [
        "advise",
        str(seats.run.path),
        "--slo",
        "ttft_p99=60ms",
        "--data-parallel-size",
        "2",
        "--format",
        "json",
    ]
    assert main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = answer["configurations"]
    assert len(rows) == 3  # as recorded, two ranks, two ranks with more seats
    assert answer["settings"]["data_parallel_size"] == 1
    proposals = [row for row in rows if row["place"]]
    assert proposals
    for proposal in proposals:
        assert proposal["changes"]["data_parallel_size"] == 2
        assert proposal["goodput_requests_per_s"] > 1.5 * rows[0]["goodput_requests_per_s"]
    assert "--data-parallel-size 2" in answer["commands"][0]
