"""Reader of results of benchmarks: the latencies that a client measured.

It reads the results of ``vllm bench serve --save-result`` (flat, in milliseconds), of AIPerf
(``profile_export_aiperf.json``, with a unit beside each metric), of GuideLLM (with ``successful`` below each
metric of each benchmark) and of inference-perf (in seconds).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from schedtrace.errors import InputError
from schedtrace.model.printable import shortened
from schedtrace.model.records import ClientLatency
from schedtrace.read.decompress import opened_text
from schedtrace.read.file_sample import FileSample, RecordReader
from schedtrace.read.lines import UNREADABLE, reading

LARGEST = 2**28
"""Maximum bytes of a result, which is read at once; results with the latency of every token are large."""
LARGEST_VALUE = 1e9
"""Largest plausible latency, in the result's own unit."""
MOST_BENCHMARKS = 1000
"""Maximum number of benchmarks that are read from a file."""
LONGEST_NAME = 40
Fields = Mapping[str, Any]


@dataclass
class BenchmarkResult:
    """Figures that a benchmark's client measured."""

    program: str
    """Name of the program and, if the file has several benchmarks, of this benchmark."""
    requests: int | None
    """Number of finished requests."""
    latencies: list[ClientLatency] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def read_benchmark_result(path: Path) -> list[BenchmarkResult]:
    """Read a result; return the figures of each benchmark in it.

    Raises:
        InputError: If the file cannot be read, is cut off or is too large.
    """
    with reading(path), opened_text(path) as file:
        content = file.read(LARGEST)
    try:
        fields = msgspec.json.decode(content.removeprefix(b"\xef\xbb\xbf"))
    except UNREADABLE as error:
        msg = f"{path}: the benchmark's result is cut off or broken ({error})"
        raise InputError(msg) from error
    claims = (program for program in PROGRAMS if isinstance(fields, dict) and program.matches(fields))
    if (program := next(claims, None)) is None:
        msg = f"{path}: expected one result of a benchmark"
        raise InputError(msg)
    results = program.read(fields)
    if not any(result.latencies for result in results):
        msg = f"{path}: looks like {program.result}, but has no latency that schedtrace reads"
        raise InputError(msg)
    return results


def _bench_serve(fields: Fields) -> list[BenchmarkResult]:
    latencies = [
        _latency(metric, fields, mean=f"mean_{name}_ms", p50=f"median_{name}_ms", p99=f"p99_{name}_ms")
        for metric, name in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el"))
    ]
    program = "vllm bench serve" if "model_id" in fields else "a serving benchmark"
    return [BenchmarkResult(program, _count(fields.get("completed")), _known(latencies))]


def _inference_perf(fields: Fields) -> list[BenchmarkResult]:
    successes = _fields(fields.get("successes"))
    latency = _fields(successes.get("latency"))
    names = {"ttft": "time_to_first_token", "tpot": "time_per_output_token", "e2e": "request_latency"}
    latencies = [
        _latency(metric, _fields(latency.get(name)), mean="mean", p50="median", p99="p99", to_ms=1e3)
        for metric, name in names.items()
    ]
    return [BenchmarkResult("inference-perf", _count(successes.get("count")), _known(latencies))]


def _aiperf(fields: Fields) -> list[BenchmarkResult]:
    names = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}
    latencies = []
    for metric, name in names.items():
        statistics = _fields(fields.get(name))
        to_ms = {"ms": 1.0, "s": 1e3, "sec": 1e3, "us": 1e-3}.get(str(statistics.get("unit")))
        if to_ms is not None:
            latencies.append(_latency(metric, statistics, mean="avg", p50="p50", p99="p99", to_ms=to_ms))
    requests = _count(_fields(fields.get("request_count")).get("avg"))
    return [BenchmarkResult("AIPerf", requests, _known(latencies))]


def _guidellm(fields: Fields) -> list[BenchmarkResult]:
    runs = [run for run in fields["benchmarks"] if isinstance(run, dict)]
    if len(runs) <= 1:
        return [_guidellm_run(run, "GuideLLM") for run in runs]
    return [
        _guidellm_run(run, f"GuideLLM, benchmark {place} of {len(runs)}{_strategy(run)}")
        for place, run in enumerate(runs[:MOST_BENCHMARKS], start=1)
    ]


def _guidellm_run(run: Fields, program: str) -> BenchmarkResult:
    metrics = _fields(run.get("metrics"))
    names = {
        "ttft": ("time_to_first_token_ms", 1.0),
        "tpot": ("inter_token_latency_ms", 1.0),
        "e2e": ("request_latency", 1e3),
    }
    latencies = []
    for metric, (name, to_ms) in names.items():
        successful = _fields(_fields(metrics.get(name)).get("successful"))
        percentiles = _fields(successful.get("percentiles"))
        statistics = {"median": percentiles.get("p50"), **successful, "p99": percentiles.get("p99")}
        latencies.append(_latency(metric, statistics, mean="mean", p50="median", p99="p99", to_ms=to_ms))
    totals = _fields(metrics.get("request_totals"))
    return BenchmarkResult(program, _count(totals.get("successful")), _known(latencies))


def _strategy(run: Fields) -> str:
    """Return the pattern in which a benchmark sent its requests, in parentheses: `` (constant, 5)``."""
    strategy = _fields(_fields(run.get("config")).get("strategy") or _fields(run.get("args")).get("strategy"))
    kind = strategy.get("type_", strategy.get("kind"))
    if not isinstance(kind, str):
        return ""
    numbers = (strategy.get(name) for name in ("rate", "streams", "max_concurrency"))
    amount = next((number for number in numbers if _milliseconds(number, 1.0) is not None), None)
    return f" ({shortened(kind, LONGEST_NAME)}{'' if amount is None else f', {amount:.3g}'})"


def _latency(
    metric: str, fields: Fields, *, mean: str, p50: str, p99: str, to_ms: float = 1.0
) -> ClientLatency:
    values = [_milliseconds(fields.get(name), to_ms) for name in (mean, p50, p99)]
    return ClientLatency(
        metric=metric,  # type: ignore[arg-type]  # callers name one of the three
        mean_ms=values[0],
        p50_ms=values[1],
        p99_ms=values[2],
    )


def _known(latencies: list[ClientLatency]) -> list[ClientLatency]:
    """Return the latencies that have any statistic; a client that does not stream measures only some."""
    return [
        latency for latency in latencies if (latency.mean_ms, latency.p50_ms, latency.p99_ms) != (None,) * 3
    ]


def _milliseconds(value: object, to_ms: float) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST_VALUE:
        return value * to_ms
    return None


def _count(value: object) -> int | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST_VALUE:
        return int(value)
    return None


def _fields(value: object) -> Fields:
    return value if isinstance(value, dict) else {}


def _is_bench_serve(fields: Fields) -> bool:
    names = {f"{statistic}_{metric}_ms" for statistic in ("mean", "median") for metric in ("ttft", "e2el")}
    return "completed" in fields and (
        fields.keys() >= {"total_input_tokens", "request_throughput"} or not fields.keys().isdisjoint(names)
    )


def _is_aiperf(fields: Fields) -> bool:
    """Return whether the fields are those of AIPerf's summary, which may lack the version and the input."""
    return "aiperf_version" in fields or any(
        _fields(fields.get(name)).keys() >= {"unit", "avg"}
        for name in ("request_latency", "request_throughput")
    )


def _is_guidellm(fields: Fields) -> bool:
    runs = fields.get("benchmarks", ())
    if runs is None:  # cut, as results of a long sweep are
        return True
    return isinstance(runs, list) and (
        "guidellm_version" in _fields(fields.get("metadata"))
        or any(
            isinstance(run, dict) and not run.keys().isdisjoint({"type_", "run_stats", "run_id"})
            for run in runs
        )
    )


@dataclass(frozen=True)
class BenchmarkProgram:
    """Benchmark program, recognized by fields that only it writes."""

    result: str
    """Noun phrase for a result of this program."""
    matches: Callable[[Fields], bool]
    read: Callable[[Fields], list[BenchmarkResult]]


PROGRAMS = (
    BenchmarkProgram(
        "a result of vllm bench serve",
        lambda fields: _is_bench_serve(fields) and "model_id" in fields,
        _bench_serve,
    ),
    BenchmarkProgram("a serving benchmark's result", _is_bench_serve, _bench_serve),
    BenchmarkProgram(
        "a result of inference-perf",
        lambda fields: fields.keys() >= {"load_summary", "successes"},
        _inference_perf,
    ),
    BenchmarkProgram("a result of GuideLLM", _is_guidellm, _guidellm),
    BenchmarkProgram("a result of AIPerf", _is_aiperf, _aiperf),
)


def is_benchmark_result(sample: FileSample) -> bool:
    """Return whether a block begins like a result of one of ``PROGRAMS``."""
    return any(program.matches(sample.row) for program in PROGRAMS)


READER = RecordReader(
    name="a result of a benchmark",
    reads="a result of vllm bench serve, AIPerf, GuideLLM or inference-perf",
    matches=is_benchmark_result,
    read=read_benchmark_result,
    samples=("05-inference-perf-one-line.json",),
)
