"""Results of benchmarks: the latencies of each program, and what is no number."""

import json
from pathlib import Path

import pytest

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.records import compare_with_trace, described
from schedtrace.errors import InputError
from schedtrace.model.records import ClientLatency
from schedtrace.read.kinds import kind_of
from schedtrace.read.records.benchmark_result import READER, read_benchmark_result
from schedtrace.read.run import read_run

DATA = Path(__file__).parents[2] / "data"
SERVE = {
    "model_id": "m",
    "completed": 2,
    "total_input_tokens": 20,
    "request_throughput": 0.6,
    "mean_ttft_ms": 30.0,
    "median_ttft_ms": 20.0,
    "p99_ttft_ms": 90.0,
    "mean_e2el_ms": True,
    "median_e2el_ms": "fast",
    "p99_e2el_ms": -1,
}
AIPERF = {
    "input_config": {},
    "request_latency": {"unit": "sec", "avg": 1.0, "p50": 0.5, "p99": 2.0},
    "time_to_first_token": {"unit": "furlong", "avg": 1.0, "p50": 1.0},
    "inter_token_latency": {"unit": "ms", "avg": 7.0},
    "request_count": {"unit": "requests", "avg": 50.0},
}
RUN = {
    "metrics": {
        "time_to_first_token_ms": {"successful": {"mean": 3.0, "median": 2.0, "percentiles": {"p99": 9.0}}},
        "request_latency": {"successful": {"mean": 1.5}},
        "request_totals": {"successful": 10, "errored": 1},
    }
}


@pytest.fixture
def result(tmp_path):
    def read(fields):
        path = tmp_path / "x.json"
        path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
        assert kind_of(path).record is READER
        [shown] = read_benchmark_result(path)
        return shown

    return read


E2E_0_7 = {"successful": {"mean": 1.2, "percentiles": {"p50": 1.0, "p99": 3.0}}}
RUN_0_7 = {"config": {"strategy": {"kind": "concurrent"}}, "metrics": {"request_latency": E2E_0_7}}
RESULTS = {
    "vllm bench serve": (
        SERVE,
        ("vllm bench serve", 2),
        [ClientLatency(metric="ttft", mean_ms=30.0, p50_ms=20.0, p99_ms=90.0)],
    ),
    # Other clients write some of its fields; the names of latencies tell.
    "a fork of it without its model": (
        {"completed": 10, "failed": 0, "mean_ttft_ms": 100.0, "mean_tpot_ms": 10.0},
        ("a serving benchmark", 10),
        [ClientLatency(metric="ttft", mean_ms=100.0), ClientLatency(metric="tpot", mean_ms=10.0)],
    ),
    "AIPerf, in the unit that stands there": (
        AIPERF,
        ("AIPerf", 50),
        [
            ClientLatency(metric="tpot", mean_ms=7.0),
            ClientLatency(metric="e2e", mean_ms=1000.0, p50_ms=500.0, p99_ms=2000.0),
        ],
    ),
    "an early export of AIPerf, with units beside its metrics": (
        {name: AIPERF[name] for name in ("request_latency", "request_count")},
        ("AIPerf", 50),
        [ClientLatency(metric="e2e", mean_ms=1000.0, p50_ms=500.0, p99_ms=2000.0)],
    ),
    "an export of AIPerf without its input": (
        {
            "aiperf_version": "0.8.0",
            "time_to_first_token": {"unit": "ms", "p50": 3.0},
            "request_count": {"avg": 2.0},
        },
        ("AIPerf", 2),
        [ClientLatency(metric="ttft", p50_ms=3.0)],
    ),
    "GuideLLM": (
        {"metadata": {}, "benchmarks": [{"type_": "generative_benchmark", **RUN}]},
        ("GuideLLM", 10),
        [
            ClientLatency(metric="ttft", mean_ms=3.0, p50_ms=2.0, p99_ms=9.0),
            ClientLatency(metric="e2e", mean_ms=1500.0),
        ],
    ),
    "GuideLLM 0.7, with its medians among the percentiles": (
        {"metadata": {"guidellm_version": "0.7.0"}, "benchmarks": [RUN_0_7]},
        ("GuideLLM", None),
        [ClientLatency(metric="e2e", mean_ms=1200.0, p50_ms=1000.0, p99_ms=3000.0)],
    ),
}


@pytest.mark.parametrize(("fields", "program", "latencies"), RESULTS.values(), ids=RESULTS)
def test_the_latencies_of_each_program_are_read(result, fields, program, latencies):
    shown = result(fields)
    assert ((shown.program, shown.requests), shown.latencies) == (program, latencies)


def test_a_result_without_a_latency_that_is_read_is_refused(result):
    with pytest.raises(InputError, match="no latency that schedtrace reads"):
        result(
            {**{name: SERVE[name] for name in SERVE if "_ms" not in name}, "ttft_description": {"mean": 1}}
        )


def test_inference_perf():
    [shown] = read_benchmark_result(DATA / "files" / "05-inference-perf-one-line.json")
    assert (shown.program, shown.requests) == ("inference-perf", 2278)
    assert [round(latency.p50_ms, 3) for latency in shown.latencies] == [30.647, 4.092, 560.725]
    assert [latency.metric for latency in shown.latencies] == ["ttft", "tpot", "e2e"]


@pytest.fixture(scope="module")
def report():
    return analyze_run(read_run(DATA / "findings" / "kv-bound" / "shows"))


def test_each_benchmark_of_guidellm_is_a_result(tmp_path):
    rates = (
        {"config": {"strategy": {"type_": "constant", "rate": 5.0}}},
        {"args": {"strategy": {"kind": "concurrent", "streams": 16}}},
        {},
    )
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"benchmarks": [{"type_": "x", **RUN, **rate} for rate in rates]}))
    shown = read_benchmark_result(path)
    assert [each.program for each in shown] == [
        "GuideLLM, benchmark 1 of 3 (constant, 5)",
        "GuideLLM, benchmark 2 of 3 (concurrent, 16)",
        "GuideLLM, benchmark 3 of 3",
    ]
    assert {each.requests for each in shown} == {10}
    assert all(len(each.latencies) == 2 for each in shown)


def test_benchmarks_with_as_many_requests_are_not_compared(report, tmp_path, recorded_words):
    requests = report.trials[0].requests_finished
    runs = [
        {**RUN, "metrics": {**RUN["metrics"], "request_totals": {"successful": count}}}
        for count in (requests, requests, requests + 1)
    ]
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"metadata": {"guidellm_version": "0.7.0"}, "benchmarks": runs}))
    records = described("x.json", read_benchmark_result(path))
    for record in records:
        compare_with_trace(record, [report], records)
    assert [bool(record.statements) for record in records] == [False] * 3
    recorded_words(records[0].notices[0])
    compare_with_trace(records[0], [report])
    assert records[0].statements


@pytest.mark.parametrize("content", [json.dumps(SERVE)[:-5], json.dumps(SERVE) + json.dumps(SERVE)])
def test_a_result_that_is_cut_off_or_not_alone_is_refused(result, content):
    with pytest.raises(InputError, match="cut off or broken"):
        result(content)


def test_a_result_with_broken_characters_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(json.dumps(SERVE).encode().replace(b'"m"', b'"\xb6"'))
    with pytest.raises(InputError, match="cut off or broken"):
        read_benchmark_result(path)


@pytest.mark.parametrize(
    ("factor", "code"),
    [
        (2.0, "latency-outside-engine"),
        (1.0, "latency-of-engine"),
        (0.5, "other-requests"),
    ],
)
def test_the_clients_latency_stands_beside_the_engines(result, report, factor, code):
    [trial] = report.trials
    fields = SERVE | {"completed": trial.requests_finished, "median_ttft_ms": factor * trial.ttft_ms.p50}
    [record] = described("x", [result(fields)])
    compare_with_trace(record, [report])
    assert [statement.code for statement in record.statements] == [code]
    assert record.statements[0].certainty == "likely"
    assert record.latencies[0].engine_p50_ms == trial.ttft_ms.p50


def test_another_number_of_requests_is_not_compared(result, report):
    [record] = described("x", [result(SERVE | {"completed": 123_456})])
    compare_with_trace(record, [report])
    assert (record.statements, record.latencies[0].engine_p50_ms, len(record.notices)) == ([], None, 1)
