"""Configurations replayed by vLLM's real scheduler, and the processes that do it.

``whatif/test_commands.py`` has a sweep in a process of its own.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from schedtrace.errors import UsageError
from schedtrace.step_times.constants import Constants
from schedtrace.step_times.roofline import Roofline, gpu
from schedtrace.step_times.shapes import shape
from schedtrace.whatif.replays import ModelledEngine, Work
from schedtrace.whatif.sweep import SweepLog, base_settings, local_replays, outcome_of, replay_configurations
from schedtrace.workloads import LoadRequest
from schedtrace.workloads.workload import make_workload
from tests.contract.whatif.conftest import Here

pytestmark = pytest.mark.vllm

REQUESTS = [
    LoadRequest(request_id=name, arrived_us=0, prompt_tokens=60, output_tokens=output)
    for name, output in [("a", 3), ("b", 3), ("c", 1), ("too long", 1)]
]
REQUESTS[3] = LoadRequest(request_id="too long", arrived_us=0, prompt_tokens=64, output_tokens=1)
TIMES = Constants(1000, 10, 50)
"""1 ms a step, 10 us a prompt token, 50 us an output token; the host takes no time."""


@pytest.fixture
def work():
    load = make_workload("load", "jsonl", partial(iter, REQUESTS))
    return Work([load], ModelledEngine(shape("Qwen3-8B"), gpu("h100"), TIMES))


@pytest.fixture
def made():
    return {"max_model_len": 64, "async_scheduling": False, "max_num_batched_tokens": 128}


def test_two_configurations(work, made, tmp_path):
    changes = [{**made, "max_num_seqs": seats} for seats in (1, 2)]
    log = SweepLog(tmp_path)
    answer = replay_configurations(work, changes, log, Here)
    two, one = answer.configurations
    assert (two.changes["max_num_seqs"], one.changes["max_num_seqs"]) == (2, 1)
    # One seat: prefill of 60 tokens (1.6 ms) and two decodes (1.05 ms each), twice; then a prefill.
    assert one.figure("output").value == pytest.approx(7 / 9.0e-3)
    [seat] = [outcome for outcome in log.finished.values() if outcome.changes["max_num_seqs"] == 1]
    assert seat.ttft_ms == [1.6, 5.3, 9.0]
    # Two: both prefills in one step (2.2 ms), two decodes of both (1.1 ms each), then c's prefill.
    assert two.figure("output").value == pytest.approx(7 / 6.0e-3)
    assert (two.finished, answer.load.requests, two.too_long) == (3, 4, 1)
    assert (two.pareto, one.pareto, two.kv_blocks == one.kv_blocks > 0) == (True, True, True)
    assert [row.figure("TPOT p50").value for row in (two, one)] == [1.1, 1.05]


def test_a_pool_that_is_closed_early_leaves_no_process_and_no_file(work, made, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(multiprocessing.active_children())
    pool = local_replays(work.portable(), 1)
    assert list(tmp_path.iterdir())
    pool.submit_replay(outcome_of, "k", {**made, "max_num_seqs": 1})
    pool.close()
    assert set(multiprocessing.active_children()) == before
    assert list(tmp_path.iterdir()) == []


KILLED = """
import multiprocessing, os, signal
from schedtrace.whatif import sweep
sweep.import_vllm = os.getpid  # vLLM's import would take most of the time
pool = sweep.local_replays(None, 2)
pool.submit_replay(print).exception()  # they are past their start
print(*[process.pid for process in multiprocessing.active_children()], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_process_of_a_pool_outlives_a_command_that_is_killed(tmp_path):
    said = tmp_path / "said"  # what is left would hold a pipe open
    with said.open("w") as file:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        ended = subprocess.run(
            [sys.executable, "-c", KILLED], env=environment, stdout=file, stderr=file, check=False
        )
    assert ended.returncode == -signal.SIGKILL
    processes = [Path(f"/proc/{pid}") for pid in said.read_text().splitlines()[-1].split()]
    assert len(processes) == 2
    until = time.monotonic() + 60
    while any(process.exists() for process in processes) and time.monotonic() < until:
        time.sleep(0.02)
    assert [process for process in processes if process.exists()] == []


def test_what_vllm_refuses_is_an_outcome_that_says_so(work, made):
    refused = outcome_of(work, "k", {**made, "max_num_batched_tokens": 4, "max_num_seqs": 8})
    assert refused.refused.startswith("vLLM refuses this configuration: max_num_batched_tokens (4)")
    assert (refused.key, refused.steps, refused.ttft_ms) == ("k", 0, [])


def test_a_name_that_vllm_does_not_know_ends_the_sweep(work):
    with pytest.raises(UsageError, match="max_num_sequences: not an argument of vLLM"):
        base_settings(work, ["max_num_seqs", "max_num_sequences"])
    assert base_settings(work, ["max_num_seqs", "gpu_memory_utilization"]) == {
        "max_num_seqs": None,
        "gpu_memory_utilization": None,
    }


def test_a_model_has_the_memory_and_the_step_times_of_its_gpus():
    engine = ModelledEngine(shape("Qwen3-8B"), gpu("h100"))
    options, times = engine.configured({"max_num_seqs": 64, "kv_cache_dtype": "auto"})
    assert times == Roofline(shape("Qwen3-8B"), gpu("h100"))
    less, _ = engine.configured({"max_num_seqs": 64, "gpu_memory_utilization": 0.5})
    assert 0 < less["num_blocks"] < options["num_blocks"]
    given, two = engine.configured({"num_gpu_blocks_override": 3000, "tensor_parallel_size": 2})
    assert given["num_blocks"] == 3000
    assert two == Roofline(shape("Qwen3-8B"), gpu("h100"), 2)
    assert not engine.OWN & given.keys()
