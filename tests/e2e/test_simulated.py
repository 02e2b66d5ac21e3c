"""``run --executor simulated``: vLLM's front end, engine process and scheduler, on a GPU that is not there.

Single steps may be late on a busy machine, so times are compared by their medians.
"""

import json

import polars as pl
import pytest

from schedtrace.read.run import read_run
from schedtrace.step_times.batch import Batch
from schedtrace.step_times.fitted import fit
from schedtrace.step_times.roofline import Roofline, gpu
from schedtrace.step_times.shapes import SHAPES
from schedtrace.timeline.timeline import make_timeline
from tests.e2e.conftest import schedtrace

REQUESTS, PROMPT, OUTPUT = 8, 256, 40
LOAD = ["--num-prompts", REQUESTS, "--input-len", PROMPT, "--output-len", OUTPUT, "--max-model-len", 4096]
DEVICE = "simulated NVIDIA H100 SXM"


@pytest.fixture(scope="module")
def simulated(workplace):
    """Record a run on a simulated device; gives its folder and what the command printed."""

    def record(label, *arguments):
        ended = schedtrace(
            "run", "--executor", "simulated", "--label", label, *LOAD, *arguments, cwd=workplace
        )
        assert ended.code == 0, ended.err
        return workplace / "logs" / label, ended.out

    return record


@pytest.fixture(scope="module")
def qwen(simulated):
    """As vLLM would run Qwen3-32B on an H100: two batches in flight."""
    return simulated("qwen", "--gpu", "h100", "--model", "Qwen3-32B", "--prequeue", "--trials", 2)


def decode_steps(folder):
    """Steps in which all requests decode, with the time since the output before."""
    [trace] = read_run(folder).traces
    output, trial = pl.col("output_us"), pl.col("trial")
    steps = trace.steps.with_columns(
        since_us=output.diff(), before_us=output.shift(), first=trial != trial.shift()
    )
    whole = (pl.col("decode_tokens") == REQUESTS) & (pl.col("prefill_tokens") == 0)
    return trace.header, steps.filter(whole, ~pl.col("first"), trial > 0)


def decode_us(context):
    """What a decode of all requests takes, ``context`` tokens each."""
    tokens = dict.fromkeys("abcdefgh", 1)
    batch = Batch(
        tokens, 0, REQUESTS, REQUESTS * context,
        decode_requests=REQUESTS, decode_context_tokens=REQUESTS * context,
    )  # fmt: skip
    return Roofline(SHAPES["Qwen3-32B"], gpu("h100")).device_us(batch)


def test_steps_take_what_the_roofline_says(qwen):
    header, steps = decode_steps(qwen[0])
    assert header.clock == "monotonic"
    assert steps.height >= 2 * (OUTPUT - 2)
    took = steps["execute_us"]
    assert took.min() >= int(decode_us(PROMPT))
    assert took.max() <= decode_us(PROMPT + OUTPUT) + 1
    assert steps["since_us"].median() == pytest.approx(took.median(), rel=0.05)


def test_the_next_step_is_scheduled_while_one_runs(qwen):
    header, steps = decode_steps(qwen[0])
    assert header.async_scheduling is True
    assert (steps["start_us"] < steps["before_us"]).mean() > 0.9


def test_trace_manifest_and_output_say_what_was_simulated(qwen):
    folder, printed = qwen
    header, _ = decode_steps(folder)
    manifest = json.loads((folder / "run.json").read_text())
    assert header.device == manifest["device"] == DEVICE
    chosen = manifest["engine_args_chosen"]
    assert chosen["simulated_step_times"].startswith("Roofline of Qwen3-32B (bfloat16 weights) on 1 x H100")
    assert (chosen["max_num_batched_tokens"], chosen["max_num_seqs"]) == (16_384, 1024)
    assert (header.token_budget, header.max_num_running_reqs, header.block_size) == (16_384, 1024, 16)
    assert header.kv_blocks_total == 2172
    assert f"device: {DEVICE}. Roofline of Qwen3-32B" in printed
    assert (
        "vLLM's defaults for it: max-num-batched-tokens 16384, max-num-seqs 1024, async-scheduling True, "
        "block-size 16" in printed
    )


def test_saved_step_times_are_followed_without_a_gpu_and_batches_take_turns(qwen, simulated, workplace):
    run = read_run(qwen[0])
    fit([make_timeline(trace, run.manifest) for trace in run.traces], ["qwen"]).save(workplace / "times.json")
    folder, printed = simulated(
        "again", "--step-times", "times.json", "--model", "Qwen3-32B", "--num-gpu-blocks-override", 500,
        "--no-async-scheduling", "--seed", 3,
    )  # fmt: skip
    header, steps = decode_steps(folder)
    assert (header.device, header.kv_blocks_total, header.async_scheduling) == (DEVICE, 500, False)
    assert f"device: {DEVICE}. Fitted to " in printed
    assert steps["execute_us"].median() == pytest.approx(decode_us(PROMPT + OUTPUT / 2), rel=0.05)
    assert (steps["start_us"] > steps["before_us"]).all()


def test_what_cannot_be_simulated_is_one_line(workplace):
    asked = ["--executor", "simulated", "--gpu", "h800", "--model", "Qwen3-32B"]
    ended = schedtrace("run", *asked, cwd=workplace)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "schedtrace: unknown GPU 'h800': known are a100, h100, h200, b200\n"
