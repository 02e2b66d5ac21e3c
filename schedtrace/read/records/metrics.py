"""Reader of vLLM's Prometheus metrics, from a saved ``/metrics`` page or from a running server.

Gauges are momentary values; all other values are totals since the server started. The names are those of all
V1 releases, including those that only older ones use, such as ``gpu_cache_usage_perc``.
"""

import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from schedtrace.errors import InputError
from schedtrace.model.records import ServerStart
from schedtrace.read.file_sample import FileSample, RecordReader
from schedtrace.read.http import fetched, server_address, why_not
from schedtrace.read.text_stream import text_lines

NAME = "vLLM's metrics"
_SAMPLE = re.compile(
    r"\s*vllm:(?P<name>\w{1,200})(?:\{(?P<labels>.{0,20000})\})?\s+"
    r"(?P<value>[+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d{1,3})?|Inf|NaN))(?:\s+\d{1,20})?\s*"
)
_LABEL = re.compile(r'(\w{1,200})="((?:[^"\\]|\\.){0,2000})"')
_V0 = frozenset({"num_requests_swapped", "cpu_cache_usage_perc"})
"""Metrics that only V0 exports."""
_WANTED = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
        "num_preemptions_total",
        "prompt_tokens_total",
        "prompt_tokens_created",
        "generation_tokens_total",
        *(
            f"{cache}_{what}_total"
            for cache in ("prefix_cache", "gpu_prefix_cache")
            for what in ("queries", "hits")
        ),
        *(
            f"{name}_{part}"
            for name in (
                "time_to_first_token_seconds",
                "request_time_per_output_token_seconds",
                "e2e_request_latency_seconds",
                "request_queue_time_seconds",
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
                "iteration_tokens_total",
            )
            for part in ("sum", "count")
        ),
    }
)
_NO_IDENTITY = frozenset(
    {"engine", "model", "model_name", "reason", "finished_reason", "source", "stage", "le", "pid", "version"}
)
"""Labels that do not identify a server; the engine and the model are identified separately."""
MOST_ENGINES, MOST_DUMPS = 10_000, 1000
"""Maximum number of engines in a dump, and of dumps in a file."""
MOST_BYTES = 64 * 2**20
"""Maximum bytes of a server's answer."""
TIMEOUT_S = 10.0
"""Time limit in seconds for a server's answer."""


@dataclass
class EngineValues:
    """Metrics of one engine of one model at one moment."""

    engine: str
    model: str | None
    values: dict[str, float] = field(default_factory=dict)
    """Value by metric name without ``vllm:``; waiting requests also by reason (``waiting_capacity``)."""


@dataclass
class MetricsDump:
    """All engines of a dump."""

    engines: list[EngineValues]
    server: ServerStart
    at_s: float | None = None
    """Time in seconds at which a server answered, on a monotonic clock; None for a file."""
    broken: int = 0
    """Number of lines of vLLM's metrics that could not be parsed."""


def read_metrics(path: Path) -> list[MetricsDump]:
    """Read the dumps in a file; a repeated metric begins the next dump.

    Raises:
        InputError: If the file cannot be read, or has no metric of a V1 engine.
    """
    return parsed_metrics(str(path), (line for _, line in text_lines(path)))


def fetched_metrics(url: str, reads: int = 2, pause_s: float = 5.0) -> list[MetricsDump]:
    """Read the metrics of a running server ``reads`` times.

    Args:
        url: Address of the server, or of its ``/metrics``.
        reads: Number of reads.
        pause_s: Seconds between two reads.

    Raises:
        UsageError: If ``url`` is not the address of a server.
        InputError: If the server does not answer with metrics.
    """
    address = f"{server_address(url, '/metrics')}/metrics"
    dumps = []
    for turn in range(reads):
        if turn:
            time.sleep(pause_s)
        try:
            content = fetched(address, timeout_s=TIMEOUT_S, most_bytes=MOST_BYTES)
        except (OSError, ValueError) as error:
            msg = f"--url {url}: {address} does not answer ({why_not(error)})"
            raise InputError(msg) from error
        at_s = time.monotonic()
        dump = parsed_metrics(address, content.decode(errors="replace").split("\n"))[-1]
        dump.at_s = at_s
        dumps.append(dump)
    return dumps


def parsed_metrics(name: str, lines: Iterable[str]) -> list[MetricsDump]:
    """Return the dumps in lines of Prometheus's text format.

    Raises:
        InputError: If the lines contain no metric of a V1 engine.
    """
    reading = _Reading()
    for line in lines:
        if "vllm:" in line and not line.lstrip().startswith("#"):
            reading.take(line)
    reading.end_dump()
    if reading.has_v0:
        msg = f"{name}: metrics of vLLM's V0 engine, which schedtrace does not read; upgrade vLLM"
        raise InputError(msg)
    if not reading.dumps:
        why = (
            "labels are left out, which name the engine: give the lines as /metrics prints them"
            if reading.elided
            else "no metrics of an engine in it (vllm:num_requests_running)"
        )
        msg = f"{name}: {why}"
        raise InputError(msg)
    reading.dumps[-1].broken = reading.broken
    return reading.dumps


class _Reading:
    """Parser's state: the dumps that are being read."""

    def __init__(self) -> None:
        self.dumps: list[MetricsDump] = []
        self.broken = 0
        self.elided = 0
        """Number of lines whose labels somebody has shortened with an ellipsis."""
        self.has_v0 = False
        self._engines: dict[tuple[str, str | None], EngineValues] = {}
        self._caches: list[ServerStart] = []
        self._seen: set[str] = set()

    def take(self, line: str) -> None:
        """Parse a line with one of vLLM's metrics."""
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            self.broken += 1
            return
        name, written = sample["name"], sample["labels"] or ""
        labels = dict(_LABEL.findall(written))
        self.has_v0 |= name in _V0
        if name == "cache_config_info":
            self._caches.append(_cache(labels))
            return
        if _LABEL.sub("", written).strip(", "):  # somebody has left out labels, perhaps the engine's
            self.elided += 1
            self.broken += 1
            return
        value = float(sample["value"])
        if name.startswith("num_requests_") and value % 1:
            self.broken += 1  # an average over time, as a recording rule writes it, is no number of requests
        elif name == "num_requests_waiting_by_reason":
            self._store(line, f"waiting_{labels.get('reason', '')}", labels, value)
        elif name in _WANTED:
            self._store(line, name, labels, value)

    def _store(self, line: str, name: str, labels: dict[str, str], value: float) -> None:
        """Store a value; add up values that differ only in ignored labels."""
        series = line[: line.rindex("}") + 1] if "}" in line else name
        if series in self._seen:
            self.end_dump()
        self._seen.add(series)
        key = _identity(labels)
        if (
            not math.isfinite(value)
            or value < 0
            or (key not in self._engines and len(self._engines) >= MOST_ENGINES)
        ):
            return
        values = self._engines.setdefault(key, EngineValues(*key)).values
        values[name] = values.get(name, 0.0) + value

    def end_dump(self) -> None:
        """Store the dump so far, and begin the next one.

        Every engine exports its number of running requests, so an engine without it occurs only in a partial
        dump.
        """
        engines = [engine for engine in self._engines.values() if engine.values]
        running = [engine for engine in engines if "num_requests_running" in engine.values]
        engines = running or engines
        if engines and len(self.dumps) < MOST_DUMPS:
            self.dumps.append(MetricsDump(engines, _common(self._caches)))
        self._engines, self._caches, self._seen = {}, [], set()


def _identity(labels: dict[str, str]) -> tuple[str, str | None]:
    """Return the name and the model of the engine that a metric belongs to.

    A router or a Prometheus federation adds labels for the server, which distinguish engines with the same
    number.
    """
    servers = [value for name, value in sorted(labels.items()) if name not in _NO_IDENTITY]
    engine = labels.get("engine", "0")
    return f"{engine} ({', '.join(servers)})" if servers else engine, labels.get(
        "model_name", labels.get("model")
    )


def _common(caches: list[ServerStart]) -> ServerStart:
    """Return the cache sizes that are equal on all engines; all others count as unknown."""
    shared = ServerStart()
    for name in ("kv_blocks", "kv_cache_tokens", "max_concurrency"):
        sizes = {getattr(cache, name) for cache in caches}
        if len(sizes) == 1:
            setattr(shared, name, sizes.pop())
    return shared


def _cache(labels: dict[str, str]) -> ServerStart:
    server = ServerStart()
    blocks = labels.get("num_gpu_blocks", "")
    if blocks.isdecimal():
        server.kv_blocks = int(blocks)
    tokens, concurrency = labels.get("kv_cache_size_tokens", ""), labels.get("kv_cache_max_concurrency", "")
    if tokens.isdecimal():
        server.kv_cache_tokens = int(tokens)
    if re.fullmatch(r"\d{1,12}(\.\d{1,12})?", concurrency):
        server.max_concurrency = float(concurrency)
    return server


def is_metrics(sample: FileSample) -> bool:
    """Return whether a block has several lines with vLLM's metrics."""
    if sample.is_binary or sample.is_json or "vllm:" not in sample.text:
        return False
    lines = (line for line in sample.sample_lines if "vllm:" in line)
    matching = sum(_SAMPLE.fullmatch(line) is not None for _, line in zip(range(1000), lines, strict=False))
    return matching > 2  # noqa: PLR2004  # one or two may be quoted


READER = RecordReader(
    name=NAME,
    reads="its /metrics (vllm:num_requests_running{...} 64.0)",
    matches=is_metrics,
    read=read_metrics,
    samples=("16-metrics.txt",),
)
