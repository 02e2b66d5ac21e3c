"""Asynchronous scheduling, data-parallel ranks and a real server."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import polars as pl
import pytest

from schedtrace.engine.running_engines import running_engines
from schedtrace.read.lines import WholeLines
from schedtrace.read.run import read_run
from schedtrace.record.processes import above
from schedtrace.timeline.timeline import make_timeline
from tests.e2e.conftest import REPO, started
from tests.e2e.test_attach import SAID_S, START_S
from tests.ports import reserved_port


def test_async_scheduling_is_kept_and_two_steps_are_in_flight(shared, analyzed):
    folder = shared("async")
    (trace,) = read_run(folder).traces
    assert trace.header.scheduler_class == "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
    assert trace.header.async_scheduling is True
    steps = trace.steps.select("start_us", "output_us").to_dicts()
    overlapping = [
        after["start_us"] < before["output_us"]
        for before, after in itertools.pairwise(steps)
        if before["output_us"] is not None
    ]
    assert sum(overlapping) > len(overlapping) / 2
    assert trace.steps["output_us"].null_count() == 0
    assert "output_in_flight" in trace.exits().collect()["cause"].to_list()
    assert analyzed(folder)["trials"][0]["requests_finished"] == 8


def test_every_data_parallel_rank_has_its_trace(record, analyzed):
    options = {"executor": "simulated", "gpu": "h100", "data-parallel-size": 2}  # test_ranks.py has workers
    folder = record("dp", input_len=64, output_len=8, num_prompts=8, **options)
    run = read_run(folder)
    assert [trace.header.engine_rank for trace in run.traces] == [0, 1]
    for trace in run.traces:  # of a dense model: nobody waits for anybody
        assert trace.header.data_parallel_size == 1
        assert (trace.dummies.height, trace.syncs.height) == (0, 0)
        assert trace.steps["wave"].null_count() == trace.steps.height
    report = analyzed(folder)
    assert [trial["engine_rank"] for trial in report["trials"]] == [0, 1]
    assert sum(trial["requests_finished"] for trial in report["trials"]) == 8
    assert {trial["throughput_from"] for trial in report["trials"]} == {"trace"}


@pytest.fixture(scope="module")
def port():
    with reserved_port() as port:
        yield port


@pytest.fixture(scope="module")
def collector():
    """An OTLP receiver and its endpoint; None without OpenTelemetry, which vLLM does not need either."""
    if any(find_spec(package) is None for package in ("opentelemetry", "grpc")):
        yield None
        return
    from tests.otlp_receiver import receiver

    with receiver() as started_receiver:
        yield started_receiver


@pytest.fixture(scope="module")
def server(workplace, port, collector):
    """A real ``vllm serve`` with a tokenizer made on the spot, recorded through the environment alone.

    vLLM spawns its engine core, and that its worker: both import vLLM and load the plugin by themselves.
    """
    subprocess.run(
        [sys.executable, REPO / "examples" / "tiny_model.py", workplace / "model"],
        check=True,
        capture_output=True,
    )
    options = ["--load-format", "dummy", "--enforce-eager", "--kv-cache-memory-bytes", "64M"]
    options += ["--max-model-len", "4096", "--port", port]
    options += ["--shutdown-timeout", "20"]  # with its default of 0 vLLM kills the engine core at once
    variables = {"SCHEDTRACE_DIR": "served"}
    if collector is not None:
        options += ["--otlp-traces-endpoint", collector[1]]
        variables |= {"SCHEDTRACE_METRICS": "otlp,spans=all", "OTEL_EXPORTER_OTLP_ENDPOINT": collector[1]}
        variables |= {"OTEL_METRIC_EXPORT_INTERVAL": "1000", "OTEL_BSP_SCHEDULE_DELAY": "500"}
    with (workplace / "server.log").open("wb") as log:
        process = started(
            REPO / "examples" / "vllm_cpu.py", "serve", "model", *options,
            cwd=workplace, files=(log, log), **variables,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_S
        while not _answers(f"{url}/health"):
            assert process.poll() is None, (workplace / "server.log").read_text()[-3000:]
            assert time.monotonic() < until
            time.sleep(0.5)
        yield process, url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # an engine core outlives a front end that is killed
        process.wait()


def _answers(url):
    try:
        return urllib.request.urlopen(url, timeout=1).status == 200
    except OSError:
        return False


def complete(url, prompt, max_tokens, timeout, **headers):
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json", **headers}
    )
    return urllib.request.urlopen(request, timeout=timeout)


def recorded_timeline(folder, request_id, until):
    """Return the timeline of the trace once it has the end of a request: frames are up to 0.8 s late."""
    while True:
        (trace,) = read_run(folder).traces
        ended = list(trace.finishes["request_id"])
        if request_id in ended:
            return make_timeline(trace, None)
        assert time.monotonic() < until, ended
        time.sleep(0.2)


def test_a_clients_trace_contains_vllms_span_and_below_it_the_states_of_the_request(
    server, collector, workplace
):
    if collector is None:
        pytest.skip("OpenTelemetry is not installed")
    from tests.otlp_receiver import attribute_values

    got, _ = collector
    trace_id, client = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    answer = complete(server[1], "a " * 50, 8, timeout=120, traceparent=f"00-{trace_id}-{client}-01")
    assert answer.status == 200

    def spans():
        ours = [span for span in got.spans if span.trace_id.hex() == trace_id]
        return {span.name: span for span in ours}

    until = time.monotonic() + SAID_S
    in_order = ["front_end", "waiting", "prefill", "decode"]
    names = {"llm_request", "schedtrace.request", *(f"schedtrace.{state}" for state in in_order)}
    while not (names <= spans().keys() and sum(got.values_of("schedtrace_steps", "engine").values()) > 0):
        assert time.monotonic() < until, (spans().keys(), got.values.keys())
        time.sleep(0.2)
    vllms, whole = spans()["llm_request"], spans()["schedtrace.request"]
    assert vllms.parent_span_id.hex() == client
    assert whole.parent_span_id == vllms.span_id
    about = attribute_values(whole.attributes)
    assert about["gen_ai.request.id"] == attribute_values(vllms.attributes)["gen_ai.request.id"]
    (folder,) = (workplace / "served").iterdir()
    timeline = recorded_timeline(folder, about["schedtrace.request_id"], until)
    states = timeline.request_states.filter(
        (pl.col("request_id") == about["schedtrace.request_id"]) & (pl.col("end_us") > pl.col("begin_us"))
    )
    anchor_us = timeline.header.wall_anchor_us
    assert list(states["state"]) == in_order
    for begin_us, end_us, state in states.select("begin_us", "end_us", "state").iter_rows():
        span = spans()[f"schedtrace.{state}"]
        assert span.parent_span_id == whole.span_id
        assert abs(span.start_time_unix_nano / 1000 - anchor_us - begin_us) < 1000
        assert abs(span.end_time_unix_nano / 1000 - anchor_us - end_us) < 1000


def test_a_served_model_is_recorded_with_finished_and_aborted_requests(server, workplace, analyzed):
    process, url = server
    with ThreadPoolExecutor(20) as clients:
        answers = clients.map(lambda number: complete(url, f"{number} " * 50, 8, timeout=120), range(20))
        assert [answer.status for answer in answers] == [200] * 20
    metrics = urllib.request.urlopen(f"{url}/metrics", timeout=5).read().decode()
    listening = [engine.status.pid for engine in running_engines()]
    assert sum(process.pid in above(pid) for pid in listening) == 1  # its plugin was loaded in a spawned core
    with pytest.raises((TimeoutError, urllib.error.URLError)):
        complete(url, "abc", 3900, timeout=3)  # the engine has it by then
    time.sleep(1)
    os.kill(process.pid, signal.SIGTERM)
    process.wait(60)
    (folder,) = (workplace / "served").iterdir()
    run = analyzed(folder)
    assert run["problems"] == []
    (trial,) = run["trials"]
    assert trial["trial"] is None
    assert trial["requests_finished"] >= 20
    assert trial["requests_aborted"] == 1
    assert run["config"]["status"] == "attached"
    text = b"\n".join(line for _, lines in WholeLines(folder / "engine-0.*.jsonl.zst") for line in lines)
    assert b'"type":"step"' in text
    assert b'"abc"' not in text
    assert b"prompt_token_ids" not in text
    assert_times_are_vllms(read_run(folder).traces[0], metrics)


def assert_times_are_vllms(trace, metrics):
    """The states of finished requests add up to vLLM's own histograms.

    vLLM reads its clock a few lines before or after the recorder: a millisecond a request, and more where
    the machine is busy.
    """
    finished = trace.finishes.filter(pl.col("status") != "ABORTED").select("request_id")
    states = make_timeline(trace).request_states.join(finished, on="request_id", how="semi")
    of_state = states.group_by("state").agg((pl.col("end_us") - pl.col("begin_us")).sum() / 1e6)
    seconds = dict(of_state.rows())
    for state, name in {"waiting": "queue", "prefill": "prefill", "decode": "decode"}.items():
        told = re.search(rf"^vllm:request_{name}_time_seconds_sum{{.*}} (\S+)$", metrics, re.MULTILINE)
        count = re.search(rf"^vllm:request_{name}_time_seconds_count{{.*}} (\S+)$", metrics, re.MULTILINE)
        assert float(count[1]) == finished.height
        assert seconds[state] == pytest.approx(float(told[1]), rel=0.1, abs=1e-3 * finished.height)
