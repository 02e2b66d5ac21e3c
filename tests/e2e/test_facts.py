"""The facts that need vLLM's real engine: its input thread, its workers, its front end."""

import json

import polars as pl
import pytest

from schedtrace.read.run import read_run


def lines(folder, pattern="engine-0.jsonl"):
    return [json.loads(line) for file in folder.glob(pattern) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("overlapped", [False, True])
def test_requests_come_in_order_through_the_engine_and_batches_end_before_they_are_back(shared, overlapped):
    [trace] = read_run(shared("async" if overlapped else "default")).traces
    came = trace.arrivals.select("arrived_us", "received_us", "input_queue_us", "queued_us")
    assert came.null_count().row(0) == (0, 0, 0, 0)
    assert came.select((pl.col("received_us") >= pl.col("arrived_us")).all()).item()
    assert came.select((pl.col("input_queue_us") >= pl.col("received_us")).all()).item()
    assert came.select((pl.col("queued_us") >= pl.col("input_queue_us")).all()).item()
    scheduled = trace.steps.filter(pl.col("total_requests") > 0)
    began = pl.col("start_us") + pl.col("execute_after_us")
    assert scheduled["execute_us"].null_count() == 0
    assert scheduled.select((pl.col("execute_after_us") >= pl.col("schedule_us")).all()).item()
    assert scheduled.select((began + pl.col("execute_us") <= pl.col("output_us")).all()).item()
    assert scheduled["execute_us"].min() > 100  # a forward pass of a model
    one_after_the_other = scheduled.select((began >= (began + pl.col("execute_us")).shift(1)).all()).item()
    assert one_after_the_other or overlapped
    assert trace.header.batches_in_flight == (2 if overlapped else 1)
    assert [group.kind for group in trace.header.cache_groups] == ["FullAttention"]


def test_threads_of_engine_worker_and_front_end(shared):
    told = [line["threads"] for line in lines(shared("default")) if line["type"] == "cpu"]
    assert {one["role"] for threads in told for one in threads} >= {"engine", "front_end"}
    engine = [one["ran_us"] for threads in told for one in threads if one["role"] == "engine"]
    assert engine == sorted(engine)


def test_what_was_given_and_derived(shared):
    folder = shared("default")
    configured = [line for line in lines(folder, "front-end-*.jsonl") if line["type"] == "configured"]
    last = configured[-1]
    assert last["given"]["load_format"] == "dummy"
    assert last["given"]["max_num_batched_tokens"] == 16384
    [trace] = read_run(folder).traces
    assert last["derived"]["max_num_seqs"] == trace.header.max_num_running_reqs
