"""Every kind of file by what only it has; ``tests/data/files`` are public samples, details replaced."""

import gzip
import json
from pathlib import Path

import pytest

from schedtrace.errors import InputError
from schedtrace.read import file_sample
from schedtrace.read.file_sample import first_sample
from schedtrace.read.kinds import KINDS, kind_of
from schedtrace.read.records import READERS
from schedtrace.read.run import find_runs, look_for_runs, read_record, skipped_lines
from tests.console_logs import periodic
from tests.makers import manifest, run_folder, step

FILES = Path(__file__).parents[2] / "data" / "files"
ITERATION = (
    "Iteration({}): 1 context requests, 5 context tokens, 0 generation requests, 0 generation tokens, "
    "iteration elapsed time: 2.0 ms\n"
)
RECORD = (
    "2025-07-28 10:25:09.014 | DEBUG | vllm.v1.core.sched.scheduler:schedule:562 - {'token_budget': 100, "
    "'remaining_budget': 90, 'requests': [{'request_id': '0', 'computed_tokens': 0, "
    "'scheduled_tokens': 10}]}\n"
)
V0_LINE = (
    "INFO 08-22 20:52:46 metrics.py:406] Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 "
    "tokens/s, Running: 1 reqs, Swapped: 0 reqs, Pending: 0 reqs, GPU KV cache usage: 0.0%, CPU KV cache "
    "usage: 0.0%.\n"
)
V0_START = (
    "INFO 08-18 07:17:16 [api_server.py:1042] vLLM API server version 0.7.2\n"
    "INFO 08-18 07:17:30 [llm_engine.py:234] Initializing a V0 LLM engine (v0.7.2) with config: x\n"
)
PY_SPY = (
    "Process 42: python3 -m vllm\nPython v3.12.3 (/usr/bin/python3.12)\n\n"
    'Thread 42 (idle): "MainThread"\n    wait (threading.py:327)\n'
)
WRAPPED = "".join(
    f"2025-10-15T00:02:{second}Z INFO 10-14 17:02:{second} [loggers.py:123] Engine 000: Avg prompt "
    "throughput: 0.0 tokens/s, Avg generation throughpu\nt: 843.6 tokens/s, Running: 38 reqs, "
    "Waiting: 0 reqs, GPU KV cache usage: 88.5%\n"
    for second in (38, 48)
)
"""Lines of a console log as a narrow terminal shows them."""
BY_HAND = (
    "The log in the steady state:\n\n```\nEngine 000: Avg prompt throughput: 91.0 tokens/s, Avg generation "
    "throughput: 46.1 tokens/s,\n    Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 27.7%,\nPrefix "
    "cache hit rate: 43.4%\n```\n"
)
"""A line of a console log that somebody broke between words."""
TRACEBACK = (
    "WARNING 02-28 20:57:36 _core_ext.py:180] Failed to import from vllm._core_C\n"
    "Traceback (most recent call last):\n"
    '  File "/usr/lib/python3.10/site-packages/vllm/__init__.py", line 3, in <module>\n'
    "    from vllm.engine.arg_utils import EngineArgs\n"
    "RuntimeError: it does not exist\n"
)
SERVE = {
    "date": "20261101-101010",
    "backend": "vllm",
    "model_id": "m",
    "num_prompts": 2,
    "duration": 3.1,
    "completed": 2,
    "total_input_tokens": 20,
    "total_output_tokens": 8,
    "request_throughput": 0.6,
}


def name_of(path):
    kind = kind_of(path)
    return None if kind is None else kind.name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("01-iteration-kv-full.log", "vLLM's log with iteration details"),
        ("02-forum-first-step.log", "a log of a patched schedule(), one dict a call"),
        ("04-bench-summary-total_requests.json", "a benchmark's summary"),
        ("05-inference-perf-one-line.json", "a result of inference-perf"),
        ("07-timed-trace-seconds.jsonl", "a timed trace (Mooncake, Qwen-Bailian or vLLM's timed_trace)"),
        ("08-vllm-custom.jsonl", "a workload in JSON Lines"),
        ("10-burstgpt-failed-row.csv", "a trace of BurstGPT"),
        ("11-azure-20-rows.csv", "a trace of Azure's LLM inference"),
        ("12-console-v1.log", "vLLM's console log"),
        ("14-scheduler-dump-k8s.log", "vLLM's console log"),
        ("16-metrics.txt", "vLLM's metrics"),
        ("18-mooncake-float-lengths.jsonl", "a timed trace (Mooncake, Qwen-Bailian or vLLM's timed_trace)"),
        ("23-iteration-with-logged-prompt.log", "vLLM's log with iteration details"),
    ],
)
def test_a_public_sample_is_recognized(name, kind):
    assert name_of(FILES / name) == kind


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (json.dumps(SERVE), "a result of vllm bench serve"),
        (json.dumps(SERVE, indent=2), "a result of vllm bench serve"),
        (json.dumps({**SERVE, "model_id": None} | {"x": 1}), "a result of vllm bench serve"),
        (
            '{"completed": 2, "total_input_tokens": 20, "request_throughput": 1}',
            "a serving benchmark's result",
        ),
        (json.dumps({**SERVE, "itls": [[0.01] * 200_000]}), "a result of vllm bench serve"),
        (
            '{"elapsed_time": 1.0, "num_requests": 4, "total_num_tokens": 9, "requests_per_second": 4.0}',
            "a result of vllm bench throughput",
        ),
        ('{"avg_latency": 1.0, "latencies": [1.0], "percentiles": {}}', "a result of vllm bench latency"),
        ('{"input_config": {}, "request_latency": {"unit": "ms", "avg": 1.0}}', "a result of AIPerf"),
        ('{"schema_version": "1.1", "aiperf_version": "0.8", "request_count": {}}', "a result of AIPerf"),
        (
            '{"metadata": {"x_request_id": "a"}, "metrics": {"ttft": {"value": 1}}}\n' * 2,
            "a result of AIPerf",
        ),
        (
            '{"metadata": {}, "args": {}, "benchmarks": [{"type_": "generative_benchmark"}]}',
            "a result of GuideLLM",
        ),
        (
            '{"metadata": {"guidellm_version": "0.7"}, "benchmarks": [{"metrics": {}}]}',
            "a result of GuideLLM",
        ),
        (
            "============ Serving Benchmark Result ============\nSuccessful requests: 5\n",
            "what vllm bench serve prints",
        ),
        ("   NVIDIA AIPerf | LLM Metrics   \n\u2503 Metric \u2503 avg \u2503\n", "what AIPerf prints"),
        ("Benchmarks Info:\n=====\nBenchmarks Stats:\n=====\n", "what GuideLLM prints"),
        ("\u2502 Tokens Data by Benchmark   \u2502\n", "what GuideLLM prints"),
        (f"I ran:\n\n```json\n{json.dumps(SERVE, indent=2)}\n```\n", "JSON amid other text"),
        ('{"traceEvents": []}', "a trace for a viewer (Trace Event Format)"),
        ('[{"conversations": [{"value": "a"}, {"value": "b"}]}]', "a list of conversations (ShareGPT)"),
        ('{"custom_id": "1", "method": "POST", "url": "/v1/x", "body": {}}\n', "a batch of OpenAI requests"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', "chat messages"),
        ('{"session_id": "a", "timestamp": 0, "input_length": 5}\n', "sessions of AIPerf or Dynamo"),
        ('{"text_input": "a", "output_length": 5}\n', "sessions of AIPerf or Dynamo"),
        ('{"timestamp": 1.5, "hash_ids": [1, 2]}\n', "requests in a format that is not read"),
        (
            '{"block_size": 64, "requests": [{"t": 0, "hash_ids": [1]}]}',
            "requests in a format that is not read",
        ),
        ('{"total_requests": 5, "servers": ["a"]}', "JSON of another program"),
        (
            '{"schema_version": "1", "metrics": {"mean_ttft_ms": 0}, "metadata": {}}',
            "JSON of another program",
        ),
        ('{"requests": [{"request_id": "a"}]}', "JSON of another program"),
        ("{}", "JSON of another program"),
        ("# HELP up x\n# TYPE up gauge\nup 1\n", "a dump of Prometheus metrics"),
        ("# HELP sglang:a x\n# TYPE sglang:a gauge\nsglang:a 1\n", "a dump of Prometheus metrics"),
        (
            "(APIServer pid=1) INFO 11-25 12:27:00 [api_server.py:9] Started\n",
            "vLLM's log without iteration lines",
        ),
        (WRAPPED, "vLLM's console log with broken lines"),
        (BY_HAND, "vLLM's console log with broken lines"),
        (
            ITERATION.format(1).replace(" context tokens", "\n    context tokens"),
            "vLLM's console log with broken lines",
        ),
        (
            "64, 8], num_output_tokens=[12, 1]), num_scheduled_tokens={c-1: 1, c-2: 48}, total_num_sch\n",
            "a part of a step that vLLM dumped",
        ),
        (TRACEBACK, "a Python error in vLLM, without any line of an engine"),
        (
            '(EngineCore) ERROR 07-16 08:23:49 [core.py:12]   File "/x/vllm/v1/a.py", line 95, in _wait\n',
            "a part of a traceback from vLLM",
        ),
        ('    File "vllm/v1/executor/x.py", line 3, in get_response\n', "a part of a traceback from vLLM"),
        (
            "WARNING 06-10 11:11:19 [loggers.py:1] api_server_count more than 1; disabling stats logging\n",
            "vLLM's log of several front ends",
        ),
        (b"BZh91AY", "a compressed file"),
        (b"\x1f\x8b\x08\x00", "a compressed file"),
        (
            gzip.compress(b'{"timestamp": 0, "input_length": 16, "output_length": 4}\n', mtime=0),
            "a compressed file",
        ),
        (gzip.compress(b'{"type": "header", "schema_version": 3}\n', mtime=0), "a compressed file"),
        (V0_LINE, "a log of vLLM's V0 engine"),
        (V0_START, "a log of vLLM's V0 engine"),
        (PY_SPY, "stacks dumped by py-spy"),
        ('{"resourceSpans": [{"scopeSpans": []}]}', "OpenTelemetry spans"),
        ('{"name": "llm_request", "context": {"trace_id": "0x1", "span_id": "0x2"}}', "OpenTelemetry spans"),
        ('{"data": [{"traceID": "1", "spans": [{"operationName": "q"}]}]}', "OpenTelemetry spans"),
        (
            "[2025-02-27 04:46:39 TP0] Decode batch. #running-req: 8, #token: 62531, #queue-req: 0\n",
            "a log of SGLang",
        ),
        ('{"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}', "a profile of PyTorch"),
        (b"PAR1\x15", "a Parquet file"),
        (b"\xef\xbb\xbf \r\n", "an empty file"),
        (b"\x00\x01", None),
        ("To whom it may concern\n", None),
        ('"text"', None),
        ("[1, 2]", None),
        ('{"a":' * 50_000, "JSON of another program"),
    ],
)
def test_a_file_of_another_program_is_recognized_and_never_read(file, content, kind):
    path = file("x", content)
    assert name_of(path) == kind
    looks = (
        "empty" if kind == "an empty file" else f"looks like {kind}: " if kind else "not understood; expected"
    )
    with pytest.raises(InputError) as refused:
        read_record(path)
    assert str(refused.value).startswith(f"{path}: {looks}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not (kind.reader or kind.record)], ids=lambda kind: kind.name
)
def test_a_kind_that_is_not_read_says_what_to_do(kind):
    assert kind.advice or kind.name in {"an empty file", "a trace of schedtrace"}


@pytest.mark.parametrize("command", ["analyze {}", "step {} 0", "request {} a", "diff {} {}", "findings"])
def test_what_schedtrace_prints_is_no_log(cli, tmp_path, command):
    run = run_folder(tmp_path / "run", step(0, got={"a": 10}, new="a"))
    out = cli(*command.format(run, run).split(), "--format", "json")[1]
    path = tmp_path / "out.json"
    path.write_text(out)
    code, out, err = cli("analyze", path)
    said = f"looks like the output of schedtrace {command.split()[0]} --format json: name the run that it was"
    assert (code, out) == (3, "")
    assert said in err


def test_the_manifest_of_a_run_is_no_log(cli, tmp_path):
    run_folder(tmp_path / "run", step(0), about=manifest())
    code, _, err = cli("analyze", tmp_path / "run" / "run.json")
    assert (code, "looks like the manifest of a run: name its folder" in err) == (3, True)


def test_a_logged_prompt_hides_no_iteration():
    [trace] = read_record(FILES / "23-iteration-with-logged-prompt.log")
    assert trace.steps.height == 17


def test_a_prompt_that_quotes_a_log_is_no_log(file):
    prompt = (
        f"INFO 11-25 12:00:00 [logger.py:49] Received request a: prompt: {RECORD + ITERATION.format(7)!r}\n"
    )
    [trace] = read_record(file("a.log", prompt + ITERATION.format(0) + ITERATION.format(1)))
    assert (trace.steps.height, trace.notices, trace.problems.garbled_lines) == (2, [], [])
    [trace] = read_record(file("b.log", RECORD + prompt))
    assert (trace.steps["total_requests"].to_list(), trace.problems.garbled_lines) == ([1], [])
    assert name_of(file("c.log", prompt)) == "vLLM's log without iteration lines"


def test_lines_behind_the_first_block_are_found(file, monkeypatch):
    monkeypatch.setattr(file_sample, "HEAD", 1000)
    other = "INFO 11-25 12:00:00 [api_server.py:9] GET /health\n" * 100
    [trace] = read_record(file("a.log", other + ITERATION.format(0) + other + ITERATION.format(1)))
    assert trace.steps.height == 2
    [trace] = read_record(file("b.log", other + RECORD))
    assert trace.steps.height == 1
    assert name_of(file("c.log", other)) == "vLLM's log without iteration lines"


def test_a_log_that_a_container_runtime_wrapped_in_json_is_read(file):
    lines = [
        json.dumps({"log": text, "stream": "stdout"}) for text in (ITERATION.format(0), ITERATION.format(1))
    ]
    [trace] = read_record(file("a.log", "\n".join(lines)))
    assert trace.steps.height == 2
    [trace] = read_record(file("b.log", json.dumps({"log": RECORD, "stream": "stdout"}) + "\n"))
    assert trace.steps.height == 1


def test_a_log_of_two_kinds_is_refused(file):
    with pytest.raises(
        InputError, match=r"x: looks like a log of a patched .* and like vLLM's log with iter"
    ):
        read_record(file("x", RECORD + ITERATION.format(0)))


def test_a_file_of_a_folder_that_is_refused_is_skipped_with_the_reason(tmp_path):
    run_folder(tmp_path / "run", step(0))
    (tmp_path / "x.log").write_text(RECORD + ITERATION.format(0))
    found = look_for_runs([tmp_path])
    assert [path.name for path in found.runs] == ["run"]
    [line] = skipped_lines(found.skipped)
    assert line.startswith(
        "skipped x.log: looks like a log of a patched schedule(), one dict a call, and like"
    )


def test_a_record_is_found_as_such_whether_it_or_its_folder_is_named(tmp_path):
    path = tmp_path / "metrics.txt"
    path.write_bytes((FILES / "16-metrics.txt").read_bytes())
    for named in (path, tmp_path):
        found = look_for_runs([named])
        assert (found.runs, {file: reader.name for file, reader in found.records.items()}) == (
            [],
            {path: "vLLM's metrics"},
        )


def test_a_text_that_quotes_a_few_lines_says_so(file):
    prose = "We saw this in production,\nafter an upgrade of the driver:\n\n"
    [trace] = read_record(file("a.md", prose + ITERATION.format(5) + "What is wrong?\n"))
    notice = (
        "only 1 iterations stand among 3 lines that are no log lines: if the file merely quotes a log, give "
        "the log itself"
    )
    assert trace.notices == [notice]
    [trace] = read_record(file("b.md", prose + RECORD))
    assert trace.notices[0].startswith("only 1 records stand among 2 lines that are no log lines")


def test_the_other_files_of_a_folder_are_named_with_what_they_look_like(tmp_path, cli):
    for number in range(5):
        (tmp_path / f"b{number}.json").write_text('{"successful_requests": 5, "duration_s": 1.0}')
    (tmp_path / "notes.md").write_text("hello\n")
    (tmp_path / "vllm.log").write_text(ITERATION.format(0))
    found = look_for_runs([tmp_path])
    assert [path.name for path in found.runs] == ["vllm.log"]
    assert skipped_lines(found.skipped) == [
        "skipped b0.json, b1.json, b2.json and 2 more: looks like a benchmark's summary",
        "skipped notes.md: not understood",
    ]
    code, _, err = cli("analyze", tmp_path)
    assert (code, err.count("schedtrace: skipped")) == (0, 2)
    (tmp_path / "vllm.log").unlink()
    with pytest.raises(InputError, match="no traces in it") as refused:
        find_runs([tmp_path])
    assert refused.value.details[1] == "skipped notes.md: not understood"


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_every_reader_of_a_record_has_samples_that_only_it_claims(reader):
    for name in reader.samples:
        sample = first_sample(FILES / name)
        assert [other.name for other in READERS if other.matches(sample)] == [reader.name]


def test_only_analyze_reads_a_record_without_steps(cli):
    code, out, err = cli("step", FILES / "12-console-v1.log", "0")
    assert (code, out) == (3, "")
    assert "looks like vLLM's console log: it has no steps, only schedtrace analyze reads it" in err


@pytest.mark.parametrize(
    "other",
    [
        "============ Serving Benchmark Result ============\nSuccessful requests: 5\n",
        PY_SPY,
        "[TP0] Decode batch. #running-req: 8\n",
    ],
    ids=["printed benchmark", "py-spy", "SGLang"],
)
def test_periodic_lines_count_for_more_than_what_is_not_read(file, other):
    assert name_of(file("x", other + periodic() + "\n")) == "vLLM's console log"
