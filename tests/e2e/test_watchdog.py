"""A real server whose worker stops: its engine says so in its log, and when it goes on."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from schedtrace.engine.running_engines import running_engines
from schedtrace.record.processes import above
from tests.e2e.conftest import REPO, environment, schedtrace

START_S = 420
AFTER_S = 3
STALLED = (
    rf"schedtrace: no step has made progress for {AFTER_S} s: the worker does not answer: a batch is out "
    r"\(1 request running\), and the engine waits in vllm/\S+ \S+ \[worker\]"
)


@pytest.fixture(scope="module")
def server(workplace):
    """``vllm serve`` with a worker in a process of its own; the server's process, its address and its log."""
    made = [sys.executable, REPO / "examples" / "tiny_model.py", workplace / "model"]
    subprocess.run(made, check=True, capture_output=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, REPO / "examples" / "vllm_cpu.py", "serve", "model", "--load-format", "dummy"]
    command += ["--enforce-eager", "--kv-cache-memory-bytes", "64M", "--max-model-len", "4096"]
    command += ["--port", port, "--distributed-executor-backend", "mp"]
    path = workplace / "watched.log"
    url = f"http://127.0.0.1:{port}"
    with path.open("wb") as log:
        process = subprocess.Popen(
            list(map(str, command)), cwd=workplace, stdout=log, stderr=subprocess.STDOUT,
            env=environment(SCHEDTRACE_WATCHDOG=f"{AFTER_S}s", VLLM_SERVER_DEV_MODE="1"),
            start_new_session=True,
        )  # fmt: skip
        try:
            until = time.monotonic() + START_S
            while not answers(f"{url}/health"):
                assert process.poll() is None, path.read_text()[-3000:]
                assert time.monotonic() < until
                time.sleep(0.5)
            yield process, url, path
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=1).status == 200
    except OSError:
        return False


def post(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=120).read()


@pytest.fixture
def asked(server):
    """A request that takes some seconds, and its answer in the end."""
    _, url, _ = server
    told = []
    body = {"model": "model", "prompt": "abc", "max_tokens": 3000, "ignore_eos": True}
    thread = threading.Thread(target=lambda: told.append(json.loads(post(f"{url}/v1/completions", **body))))
    thread.start()
    time.sleep(1)
    yield
    thread.join(120)
    assert told[0]["usage"]["completion_tokens"] == 3000


def lines(path):
    """What the watchdog has said."""
    marked = path.read_text().splitlines()
    return [line.partition("] ")[2] for line in marked if "[watchdog.py:" in line]


def child(pid):
    """The engine's worker."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [one for task in tasks for one in task.read_text().split()]
    return next(int(one) for one in children if b"Worker" in Path(f"/proc/{one}/cmdline").read_bytes())


def waited_for(path, text, seconds):
    until = time.monotonic() + seconds
    while not any(text in line for line in lines(path)):
        assert time.monotonic() < until, lines(path)
        time.sleep(0.1)


@pytest.mark.usefixtures("asked")
def test_a_worker_that_is_stopped_and_goes_on(server, workplace):
    process, _, path = server
    pid = next(one.status.pid for one in running_engines() if process.pid in above(one.status.pid))
    worker = child(pid)
    os.kill(worker, signal.SIGSTOP)
    try:
        waited_for(path, "does not answer: timed out", AFTER_S + 4)
        listed = schedtrace("engines", process.pid, cwd=workplace).out
    finally:
        os.kill(worker, signal.SIGCONT)
    waited_for(path, "the engine goes on after", 5)
    said = lines(path)
    assert re.fullmatch(STALLED, said[0])
    assert re.fullmatch(r"  running: 1 of \d+ seats: cmpl-\S+", said[1])
    assert any("in run_busy_loop" in line for line in said)
    assert f"  worker with pid {worker} (stopped by a signal) does not answer: timed out" in said
    assert re.search(r"no step has made progress for \d+ s: the worker does not answer", listed)


@pytest.mark.usefixtures("asked")
def test_a_pause_is_said_quietly(server):
    _, url, path = server
    before = len(lines(path))
    post(f"{url}/pause?mode=keep")
    time.sleep(AFTER_S + 2)
    post(f"{url}/resume")
    waited_for(path, "[paused]", 5)
    first, second = lines(path)[before:]
    assert first.endswith("the scheduler is paused (PAUSED_ALL): requests wait until somebody resumes it")
    assert re.fullmatch(r"schedtrace: the engine goes on after \d+ s \[paused\]", second)
    assert not any("WARNING" in line and "[paused]" in line for line in path.read_text().splitlines())
