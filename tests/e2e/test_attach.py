"""An engine that nobody records is attached to while it works, let go again, and stopped.

Engine and commands are in one session, that of the tests: Linux shares processors among sessions first
("autogroup"), and where an engine is busy another session may wait for minutes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from schedtrace.engine.running_engines import running_engines
from schedtrace.read.lines import WholeLines
from schedtrace.record.processes import above, children
from tests.e2e import vllm_by_fork
from tests.e2e.conftest import REPO, schedtrace, started

START_S = 300
STALL_S = 3
SAID_S = 60
"""Within this the watchdog says what it has to say, on a machine that is busy with other things, too."""
STALLED = (
    r"schedtrace: no step has made progress for (\d+) s: the worker does not answer: a batch is in "
    r"flight \(8 requests running\); the engine waits in vllm/\S+ \S+ \[worker\]"
)
ATTACHED = re.compile(
    r"attached to engine 0 \(pid (\d+)\), .*: ([\d,]+) requests? (?:was|were) there, held up for "
)


def works(pid):
    """Whether requests run in an engine below this process."""
    return any(one.status.running and pid in above(one.status.pid) for one in running_engines())


@pytest.fixture(scope="module")
def working(workplace):
    """An engine with more to do than the tests take; its process."""
    with benchmark(workplace, SCHEDTRACE_WATCHDOG=f"{STALL_S}s") as process:
        yield process


@contextmanager
def benchmark(workplace, **variables):
    """vLLM's own throughput benchmark, once requests run."""
    made = [sys.executable, REPO / "examples" / "tiny_model.py", workplace / "model"]
    subprocess.run(made, check=True, capture_output=True)
    options = [
        "--model",
        "model",
        "--load-format",
        "dummy",
        "--enforce-eager",
        "--kv-cache-memory-bytes",
        "64M",
    ]
    options += ["--max-model-len", 2048, "--max-num-seqs", 8, "--dataset-name", "random"]
    options += ["--random-input-len", 200, "--random-output-len", 800, "--num-prompts", 1000]
    with (workplace / "bench.log").open("wb") as log:
        process = started(
            vllm_by_fork.__file__, "bench", "throughput", *options,
            cwd=workplace, files=(log, log), **variables,
        )  # fmt: skip
    try:
        until = time.monotonic() + START_S
        while not works(process.pid):
            assert process.poll() is None, (workplace / "bench.log").read_text()[-3000:]
            assert time.monotonic() < until
            time.sleep(0.2)
        yield process
    finally:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def asked(workplace, *arguments):
    return schedtrace(*arguments, cwd=workplace)


def test_a_window_of_a_working_engine_is_recorded(working, workplace, analyzed):
    ended = asked(workplace, "attach", working.pid, "--for", "2s", "-o", "window")
    assert ended.code == 0, ended.err
    pid, present = (int(number.replace(",", "")) for number in ATTACHED.search(ended.out).groups())
    assert present > 8  # who waits is there as well
    (folder,) = (workplace / "window").iterdir()
    assert f"next: schedtrace analyze {folder}" in ended.out
    (there,) = (problem["text"] for problem in analyzed(folder)["problems"])
    assert there.startswith(f"{present:,} requests were present when the recording began")
    read = WholeLines(folder / "engine-0.*.jsonl.zst")
    lines = [line for _, chunk in read for line in chunk]
    assert b'"attached":true' in lines[0]
    backs, executed = (sum(name in line for line in lines) for name in (b'"output_us"', b'"execute_us"'))
    assert executed > 0.9 * backs > 0  # the worker was told, too
    assert Path(f"/proc/{pid}").exists()


def test_who_waits_and_runs_is_shown_and_why(working, workplace):
    shown = json.loads(asked(workplace, "queue", working.pid, "--format", "json").out)
    (engine,) = shown["engines"]
    assert (len(engine["running"]), engine["seats"], engine["between_steps"]) == (8, 8, True)
    assert {one["refused_for"] for one in engine["waiting"]} == {"max_num_seqs"}
    assert all(one["blocks"] >= 1 for one in engine["running"])
    text = asked(workplace, "queue", working.pid, "--limit", "3").out
    assert "Waiting, next first" in text
    assert "not recorded" in asked(workplace, "engines", working.pid).out  # nothing of the look is left


def test_one_recording_at_a_time_and_none_to_end_twice(working, workplace):
    assert asked(workplace, "attach", working.pid, "-o", "first").code == 0
    second = asked(workplace, "attach", working.pid, "-o", "second")
    assert (second.code, "it is recorded already, to " in second.err) == (4, True)
    assert not (workplace / "second").exists()
    assert "(attached)" in asked(workplace, "engines", working.pid).out
    ended = asked(workplace, "detach", working.pid)
    assert (ended.code, ended.out.startswith("detached from engine 0")) == (0, True)
    again = asked(workplace, "detach", working.pid)
    assert (again.code, "nothing is attached to it" in again.err) == (4, True)


def test_a_worker_that_is_stopped_and_goes_on_is_said(working, workplace):
    log = workplace / "bench.log"
    before = len(stalls(log))
    pid = next(one.status.pid for one in running_engines() if working.pid in above(one.status.pid))
    commands = {one: Path(f"/proc/{one}/cmdline").read_bytes() for one in children(pid)}
    [worker] = [one for one, command in commands.items() if b"resource_tracker" not in command]
    os.kill(worker, signal.SIGSTOP)
    wait_for_line(log, before, "does not answer: timed out")
    listed = asked(workplace, "engines", working.pid).out
    os.kill(worker, signal.SIGCONT)
    wait_for_line(log, before, "the engine goes on after")
    first, *more = stalls(log)[before:]
    seconds = re.fullmatch(STALLED, first)[1]  # more of them where the watchdog itself had to wait
    assert int(seconds) >= STALL_S
    assert any(re.fullmatch(r"  running: 8 of 8 seats: .*", line) for line in more)
    assert any("in run_busy_loop" in line for line in more)
    assert f"  worker with pid {worker} (stopped by a signal) does not answer: timed out" in more
    assert re.search(r"no step has made progress for \d+ s: the worker does not answer", listed)


def stalls(log):
    """The watchdog's lines."""
    return [line.partition("] ")[2] for line in log.read_text().splitlines() if "[watchdog.py:" in line]


def wait_for_line(log, before, text):
    until = time.monotonic() + SAID_S
    while not any(text in line for line in stalls(log)[before:]):
        assert time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(0.1)


def test_an_engine_that_is_killed_is_not_listed_and_its_trace_can_be_read(working, workplace, analyzed):
    ended = asked(workplace, "attach", working.pid, "-o", "killed")
    pid = int(ATTACHED.search(ended.out)[1])
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
    working.kill()  # vLLM's front end may take its time to notice
    working.wait(60)
    (folder,) = (workplace / "killed").iterdir()
    assert any("killed" in problem["text"] for problem in analyzed(folder)["problems"])
    assert f"pid {pid})" not in asked(workplace, "engines").out
    gone = asked(workplace, "attach", pid)
    assert (gone.code, gone.err.startswith(f"schedtrace: {pid}: ")) == (3, True)  # a zombie, or no process
