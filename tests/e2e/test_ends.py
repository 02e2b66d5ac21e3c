"""How runs end badly: killed, interrupted, not started. What was recorded stays readable."""

import json
import os
import signal
import time
from itertools import pairwise

import pytest

from schedtrace.model.manifest import read_manifest
from schedtrace.read.trace import read_trace
from tests.e2e.conftest import Command, run_options, schedtrace
from tools.bench.run_kills import KINDS, Run

SHORT = {"input_len": 64, "output_len": 4}
LONG = {"input_len": 64, "output_len": 30_000, "num_prompts": 4, "max-model-len": 32_000, "warmup": 0}


def start(workplace, label):
    """A run that would take minutes, once it is in its first trial."""
    command = Command("schedtrace", "run", *run_options(label=label, **LONG), cwd=workplace)
    trace = workplace / "logs" / label / "engine-0.jsonl"
    until = time.monotonic() + 120
    while time.monotonic() < until and command.process.poll() is None:
        if trace.exists() and trace.read_bytes().count(b"\n") > 50:
            return command, trace
        time.sleep(0.05)
    command.process.send_signal(signal.SIGTERM)
    pytest.fail(f"the run did not get going: {command.ended()}")


def longest_between_writes_s(path, writes=4):
    """Return the longest time between writes of a recorder, which is to write once a second."""
    sizes, until = [(path.stat().st_size, time.time())], time.monotonic() + 60
    while len(sizes) <= writes and time.monotonic() < until:
        if (size := path.stat().st_size) != sizes[-1][0]:
            sizes.append((size, time.time()))
        time.sleep(0.01)
    return max(now - before for (_, before), (_, now) in pairwise(sizes))


def wall_clock_of_the_last_step(trace):
    """Unix time of the end of the last recorded schedule() call."""
    row = trace.steps.row(-1, named=True)
    return (trace.header.wall_anchor_us + row["start_us"] + row["schedule_us"]) / 1e6


def test_sigkill_of_the_engine_loses_at_most_a_second_and_says_so(workplace):
    command, path = start(workplace, "killed")
    engine = json.loads(path.read_text().split("\n")[0])["pid"]
    second = max(1.0, longest_between_writes_s(path))
    killed_at = time.time()
    os.kill(engine, signal.SIGKILL)
    ended = command.ended()
    assert ended.code == 4
    assert "full log:" in ended.err
    trace = read_trace(path)
    assert trace.problems.unclosed
    assert trace.problems.garbled_lines == []
    assert trace.problems.missing_steps == 0
    assert 0 <= killed_at - wall_clock_of_the_last_step(trace) <= second
    ended = schedtrace("analyze", path.parent, "--format", "json", cwd=workplace)
    assert ended.code == 0
    problems = " ".join(problem["text"] for problem in ended.json()["runs"][0]["problems"])
    assert "not closed" in problems
    assert "4 requests" in problems
    assert "The run failed: vLLM's engine core was killed" in problems


def test_no_process_of_a_run_is_left_when_the_command_is_killed(workplace):
    """Of a killed guard or engine process without vLLM: ``tests/unit/engine/test_guard.py``."""
    run = Run(workplace, "kill-command")
    trace = run.folder / "engine-0.jsonl"
    until = time.monotonic() + 120
    while not (trace.exists() and trace.read_bytes().count(b"\n") > 20) and time.monotonic() < until:
        time.sleep(0.1)
    line = run.look()
    assert len(line) == len(KINDS), "command, guards, engine process, engine core, worker"
    os.kill(line[KINDS.index("command")], signal.SIGKILL)
    assert run.gone_after(60) is not None, run.left()
    run.command.wait()
    manifest = read_manifest(run.folder)
    assert (manifest.status, manifest.error) == ("failed", "the schedtrace command was killed")
    assert read_trace(trace).problems.garbled_lines == []
    steps = trace.read_bytes()
    time.sleep(1)
    assert trace.read_bytes() == steps


def test_ctrl_c_ends_the_engine_in_order_and_keeps_the_trace(workplace):
    """A hangup and SIGTERM become the same exception (``tests/unit/cli/test_faults.py``)."""
    command, path = start(workplace, "interrupted")
    engine = json.loads(path.read_text().split("\n")[0])["pid"]
    command.process.send_signal(signal.SIGINT)
    ended = command.ended()
    assert ended.code == 130
    assert "Traceback" not in ended.err
    trace = read_trace(path)
    assert not trace.problems.unclosed
    assert trace.steps.height == trace.end.steps
    assert set(trace.finishes["status"]) == {"ABORTED"}
    assert json.loads((path.parent / "run.json").read_text())["status"] == "interrupted"
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_the_scheduler_class_path_records_where_plugins_are_off(workplace, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    options = {"num_prompts": 4, "scheduler-cls": "schedtrace.record.traced.traced_scheduler"}
    ended = schedtrace("run", *run_options(label="by-class", **SHORT, **options), cwd=workplace)
    assert ended.code == 0, ended.err
    trace = read_trace(workplace / "logs" / "by-class" / "engine-0.jsonl")
    assert trace.header.scheduler_class == "vllm.v1.core.sched.scheduler.Scheduler"
    assert trace.finishes.height == 5  # four and the warm-up


def test_a_kv_cache_too_small_to_start_is_told_with_vllms_reason(workplace):
    unforeseen = {"kv-cache-memory-bytes": "1M", "hf-overrides": '{"rms_norm_eps": 1e-6}'}
    options = run_options(label="tiny-kv", **unforeseen)
    ended = schedtrace("run", *options, cwd=workplace)
    assert ended.code == 4
    (reason,) = [line for line in ended.err.splitlines() if line.startswith("schedtrace: ")]
    assert "KV cache" in reason
    assert "Traceback" not in reason
    again = schedtrace("analyze", workplace / "logs" / "tiny-kv", cwd=workplace)
    assert again.code == 3
    assert "no trace in this run" in again.err
