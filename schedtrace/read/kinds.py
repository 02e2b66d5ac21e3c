"""Table of the kinds of files that people pass to schedtrace, and how to recognize each.

Files of a kind with a reader are read as traces, files of a kind with a ``record`` as records that contain
less than a trace. Other files are refused, with the name of their kind and advice. The kind is recognized
from a sample of the file: the first block as text, JSON and CSV, or a later block with a marker.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from schedtrace.errors import InputError
from schedtrace.model.manifest import is_in_parts
from schedtrace.model.safe_files import opened
from schedtrace.read import iteration_log, loguru_log
from schedtrace.read.decompress import GZIP, ZSTD
from schedtrace.read.file_sample import FileSample, RecordReader, first_sample, later_samples
from schedtrace.read.foreign import quoted_from
from schedtrace.read.iteration_log import iteration_in, read_iteration_log
from schedtrace.read.lines import reading
from schedtrace.read.loguru_log import has_records, read_loguru_log
from schedtrace.read.records import READERS, benchmark_result, metrics, vllm_log
from schedtrace.read.records.console_lines import snapshot_in
from schedtrace.read.trace import Trace

Reader = Callable[[Path], list[Trace]]
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
"""Names of BurstGPT's columns: time, prompt tokens and output tokens."""
TRACE_LINES = frozenset({"header", "step", "delta", "output", "events", "cpu", "notice", "end"})
"""Values of ``type`` in the lines of a trace."""


@dataclass(frozen=True)
class FileKind:
    """Kind of a file, with its check and reader."""

    name: str
    """Noun phrase for such a file."""
    matches: Callable[[FileSample], bool]
    advice: str = ""
    """Advice for users with such a file, in the imperative."""
    reader: Reader | None = None
    record: RecordReader | None = None
    """Reader of this kind, if it is a record that contains less than a trace."""


TO_RECORD = "record with schedtrace, or restart vLLM with --enable-logging-iteration-details"
TO_REPLAY = "replay it with schedtrace simulate --dataset, or send it with schedtrace run --dataset"
TO_NAME_THE_RUN = "name the run that it was made of"
TO_UNPACK = "unpack it first"


def _fields(*names: str) -> Callable[[FileSample], bool]:
    """Return a check that a JSON object, possibly the first of several, has these fields."""
    return lambda sample: sample.has(*names)


def _matches_row(check: Callable[[Mapping[str, Any]], bool], sample: FileSample) -> bool:
    return check(sample.row)


def _own(*names: str) -> Callable[[FileSample], bool]:
    return lambda sample: sample.has("schema_version", *names) and "type" not in sample.row


def _text(pattern: str, least: int = 1) -> Callable[[FileSample], bool]:
    """Return a check that a text other than JSON has at least ``least`` matches of a pattern."""
    compiled = re.compile(pattern, re.MULTILINE)

    def matches(sample: FileSample) -> bool:
        if sample.is_binary or sample.is_json:
            return False
        places = compiled.finditer(sample.text)
        return all(next(places, None) is not None for _ in range(least))

    return matches


def _begins(*magic: bytes) -> Callable[[FileSample], bool]:
    return lambda sample: sample.content.startswith(magic)


def _columns(names: Sequence[str]) -> Callable[[FileSample], bool]:
    return lambda sample: not sample.is_json and sample.first_cells.issuperset(names)


def _is_trace(sample: FileSample) -> bool:
    return sample.first_line.startswith("{") and sample.row.get("type") in TRACE_LINES


def _is_aiperf_request(sample: FileSample) -> bool:
    metrics = sample.row.get("metrics")
    return (
        sample.has("metadata")
        and isinstance(metrics, dict)
        and any(isinstance(value, dict) and "value" in value for value in metrics.values())
    )


def _is_spans(sample: FileSample) -> bool:
    """Return whether the sample has spans in the format of OTLP, of a console exporter or of Jaeger."""
    row = sample.row
    context, data = row.get("context"), row.get("data")
    return (
        sample.has("resourceSpans")
        or sample.has("trace_id", "span_id")
        or (isinstance(context, dict) and context.keys() >= {"trace_id", "span_id"})
        or (isinstance(data, list) and any(isinstance(each, dict) and "spans" in each for each in data))
    )


def _has_block_ids(sample: FileSample) -> bool:
    requests = sample.row.get("requests")
    return sample.has("hash_ids") or (
        isinstance(requests, list) and any(isinstance(each, dict) and "hash_ids" in each for each in requests)
    )


def _has_broken_lines(sample: FileSample) -> bool:
    """Return whether removing line breaks, within or between words, restores lines of vLLM."""
    if sample.is_binary or sample.is_json or not _MAY_BREAK.search(sample.content):
        return False
    lines = [line[: quoted_from(line)] for line in sample.sample_lines]
    joined = ("".join(lines), " ".join(" ".join(lines).split()))
    return any(snapshot_in(text) is not None or iteration_in(text) is not None for text in joined)


_TRACEBACK = _text(
    r'^Traceback \(most recent call last\):\n(?:  [^\n]*\n){0,500}? +File "[^"\n]*/vllm/[^"\n]*", line \d'
)
_STEP_FRAME = _text(r", in (?:run_busy_loop|_process_engine_step|step_with_batch_queue)$")


_MAY_BREAK = re.compile(rb"throughput: \d|Iteration\(\d")
_SUMMARY = {"successful_requests", "failed_requests", "completed_requests", "num_successful_requests"}
_RATES = {"duration_s", "duration", "requests_per_second", "request_throughput", "total_time"}


_OF_A_PROMPT = {"prompt", "output_len", "output_tokens", "priority", "data_parallel_rank", "request_id", "id"}


def _is_empty(sample: FileSample) -> bool:
    return sample.whole and not sample.text.strip()


KINDS: tuple[FileKind, ...] = (
    FileKind("an empty file", _is_empty),
    FileKind(
        "a compressed file",
        _begins(GZIP, ZSTD, b"\xfd7zXZ", b"PK\x03\x04", b"BZh"),
        TO_UNPACK,
    ),
    FileKind("a Parquet file", _begins(b"PAR1"), "name the run folder that it was exported from"),
    FileKind("a trace of schedtrace", _is_trace),
    # what schedtrace prints
    FileKind("the output of schedtrace analyze --format json", _own("runs"), TO_NAME_THE_RUN),
    FileKind("the output of schedtrace step --format json", _own("step", "scheduled"), TO_NAME_THE_RUN),
    FileKind("the output of schedtrace request --format json", _own("request_id", "states"), TO_NAME_THE_RUN),
    FileKind("the output of schedtrace diff --format json", _own("base_path", "metrics"), TO_NAME_THE_RUN),
    FileKind("the output of schedtrace sweep --format json", _own("loads", "rows"), TO_NAME_THE_RUN),
    FileKind("the output of schedtrace findings --format json", _own("findings"), TO_NAME_THE_RUN),
    FileKind(
        "the output of schedtrace queue --format json",
        lambda sample: sample.row.keys() == {"engines"} and isinstance(sample.row["engines"], list),
        "ask the engine again with schedtrace queue",
    ),
    FileKind(
        "the manifest of a run", _fields("schedtrace_version", "status", "started_at"), "name its folder"
    ),
    FileKind(
        "what the front end of a run wrote",
        lambda sample: sample.has("type", "at_unix_us") and sample.row["type"] in {"configured", "refused"},
        "name its folder",
    ),
    # results of benchmarks
    *(
        FileKind(
            program.result,
            partial(_matches_row, program.matches),
            f"it has latencies and no steps; {TO_RECORD}",
            record=benchmark_result.READER,
        )
        for program in benchmark_result.PROGRAMS
    ),
    FileKind(
        "a result of vllm bench throughput",
        _fields("elapsed_time", "num_requests", "total_num_tokens"),
        f"it has totals and no steps; {TO_RECORD}",
    ),
    FileKind(
        "a result of vllm bench latency",
        _fields("avg_latency", "latencies"),
        f"it has latencies and no steps; {TO_RECORD}",
    ),
    FileKind(
        "a result of AIPerf",
        _is_aiperf_request,
        f"it has latencies of single requests and no steps; {TO_RECORD}",
    ),
    FileKind(
        "a benchmark's summary",
        lambda sample: not (sample.row.keys().isdisjoint(_SUMMARY) or sample.row.keys().isdisjoint(_RATES)),
        f"it has totals and no steps; {TO_RECORD}",
    ),
    FileKind(
        "a profile of PyTorch",
        lambda sample: (
            sample.has("schemaVersion", "deviceProperties") or sample.has("schemaVersion", "traceEvents")
        ),
        "open it in ui.perfetto.dev; it has kernels and no scheduler steps",
    ),
    FileKind(
        "a trace for a viewer (Trace Event Format)",
        _fields("traceEvents"),
        "open it in ui.perfetto.dev",
    ),
    # workloads
    FileKind("a trace of Azure's LLM inference", _columns(AZURE_COLUMNS), TO_REPLAY),
    FileKind("a trace of BurstGPT", _columns(BURSTGPT_COLUMNS), TO_REPLAY),
    FileKind(
        "sessions of AIPerf or Dynamo",
        lambda sample: (
            isinstance(sample.row.get("turns"), list)
            or sample.has("text_input")
            or (sample.has("input_length") and (sample.has("session_id") or not sample.has("timestamp")))
        ),
        TO_REPLAY,
    ),
    FileKind(
        "a timed trace (Mooncake, Qwen-Bailian or vLLM's timed_trace)",
        _fields("timestamp", "input_length"),
        TO_REPLAY,
    ),
    FileKind(
        "a list of conversations (ShareGPT)",
        _fields("conversations"),
        TO_REPLAY,
    ),
    FileKind(
        "a workload in JSON Lines",
        lambda sample: (
            "input_len" in sample.row or ("prompt" in sample.row and sample.row.keys() <= _OF_A_PROMPT)
        ),
        TO_REPLAY,
    ),
    FileKind(
        "a batch of OpenAI requests",
        _fields("custom_id", "url", "body"),
        TO_REPLAY,
    ),
    FileKind(
        "chat messages",
        lambda sample: isinstance(sample.row.get("messages"), list),
        TO_REPLAY,
    ),
    FileKind(
        "requests in a format that is not read",
        _has_block_ids,
        "convert them to JSON Lines of a timed trace (docs/workloads.md)",
    ),
    FileKind(
        "ServeGen's rates of a client",
        _text(r"\A\d+(?:\.\d+)?,[\d.e+-]*,[\d.e+-]*,(?:Gamma|Weibull|Exponential)?,"),
        "it has no requests: generate a workload with ServeGen and name its CSV",
    ),
    # logs
    FileKind(
        f"a {loguru_log.RECORD}",
        lambda sample: (
            any(key in sample.text for key in loguru_log.KEYS) and has_records(sample.sample_lines)
        ),
        reader=read_loguru_log,
    ),
    FileKind(
        iteration_log.RECORD,
        lambda sample: any(iteration_in(line) is not None for line in sample.sample_lines),
        reader=read_iteration_log,
    ),
    FileKind(
        "a log of vLLM's V0 engine",
        _text(
            r"Running: \d+ reqs, Swapped: \d+ reqs, Pending: \d+ reqs"
            r"|\bInitializing (?:a V0|an) LLM engine \(v\d"
        ),
        "schedtrace knows the V1 scheduler only: upgrade vLLM",
    ),
    FileKind(vllm_log.NAME, vllm_log.has_snapshots, record=vllm_log.READER),
    FileKind(
        "what vllm bench serve prints",
        _text(r"={3,} Serving Benchmark Result ={3,}"),
        f"it has latencies and no steps; {TO_RECORD}",
    ),
    FileKind(
        "what AIPerf prints",
        _text(r"\bNVIDIA AIPerf \| .{0,60}\bMetrics\b"),
        f"it has latencies and no steps: analyze its profile_export_aiperf.json beside a trace; {TO_RECORD}",
    ),
    FileKind(
        "what GuideLLM prints",
        _text(r"^Benchmarks (?:Info|Stats):$|\b(?:Requests|Tokens) Data by Benchmark\b"),
        f"it has latencies and no steps: analyze its benchmarks.json beside a trace; {TO_RECORD}",
    ),
    FileKind(
        "stacks dumped by py-spy",
        _text(r"^Process \d+: [^\n]*\n(?:Python v[\d.]+[^\n]*\n)?\s*Thread (?:0x)?[0-9A-Fa-f]+ \("),
        "it has stacks and no steps; see what the engine waits for with schedtrace queue",
    ),
    FileKind("OpenTelemetry spans", _is_spans, f"vLLM's spans have latencies and no steps; {TO_RECORD}"),
    FileKind(
        "a log of SGLang",
        _text(r"\b(?:Decode|Prefill) batch[.,] #(?:running-req|new-seq): \d"),
        "schedtrace knows vLLM's V1 scheduler only",
    ),
    FileKind(vllm_log.NAME, vllm_log.READER.matches, record=vllm_log.READER),
    FileKind(metrics.NAME, metrics.READER.matches, record=metrics.READER),
    FileKind(
        "vLLM's console log with broken lines",
        _has_broken_lines,
        "its lines are broken: take the log from its file or docker logs, not from a terminal or a page",
    ),
    FileKind(
        "a part of a step that vLLM dumped",
        _text(
            r"\bnum_(?:computed|output)_tokens=\[[\d, ]*\]\)?, num_scheduled_tokens=\{"
            r"|\}, total_num_scheduled_tokens=\d"
        ),
        "its beginning is cut off: give the whole lines of Dumping scheduler output and of scheduler stats",
    ),
    FileKind(
        "a Python error in vLLM, without any line of an engine",
        lambda sample: _TRACEBACK(sample) and not _STEP_FRAME(sample),
        "no engine ran: the last line of the traceback says why",
    ),
    FileKind(
        "a part of a traceback from vLLM",
        _text(r'\bFile "(?:[^"\n]*/)?vllm/[^"\n]*\.py", line \d+, in \w'),
        "it does not show whether an engine failed, nor why: give the complete log, which names the error",
    ),
    FileKind("a dump of Prometheus metrics", _text(r"^# (?:HELP|TYPE) [\w:]+ ", least=2), TO_RECORD),
    FileKind(
        "vLLM's log of several front ends",
        _text(r"\bapi_server_count more than 1; disabling stats logging"),
        "they print no periodic lines: start vLLM with --api-server-count 1, or analyze its /metrics",
    ),
    FileKind(
        "vLLM's log without iteration lines",
        _text(
            r"\b(?:INFO|WARNING|ERROR|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[\w/]+\.py:\d+\]|\w+\.py:\d+\])"
        ),
        TO_RECORD,
    ),
    FileKind("JSON of another program", lambda sample: bool(sample.rows), TO_RECORD),
    FileKind(
        "JSON amid other text",
        _text(r'^[ \t]*\{\s*"[^"\n]{1,200}"\s*:'),
        "save the JSON alone in a file, and analyze that",
    ),
)
TRACE = next(kind for kind in KINDS if kind.matches is _is_trace)
EMPTY = next(kind for kind in KINDS if kind.matches is _is_empty)
OTHER_REQUESTS = next(kind for kind in KINDS if kind.matches is _has_block_ids)
OTHER_JSON = next(kind for kind in KINDS if kind.name == "JSON of another program")
EXPECTED = (
    "expected a trace of schedtrace (engine-<rank>.jsonl), a log of a patched schedule() "
    "({'token_budget': ..., 'requests': [...]}), vLLM's log (with Iteration(N) lines or "
    f"{READERS[0].reads}), {', '.join(reader.reads for reader in READERS[1:-1])}, or {READERS[-1].reads}"
)
PACKED = next(kind for kind in KINDS if kind.name == "a compressed file")
READ = tuple(kind for kind in KINDS if kind.reader)
RECORDS = tuple(kind for kind in KINDS if kind.record)
_LOGS = KINDS[KINDS.index(READ[-1]) + 1 :]
"""Kinds of logs whose identifying lines may come after the first block."""
_MARKERS = (*loguru_log.MARKERS, *iteration_log.MARKERS)
_RECORD_MARKERS = tuple(marker for reader in READERS for marker in reader.markers)
_SEARCHED = tuple(dict.fromkeys((*_MARKERS, *_RECORD_MARKERS, *vllm_log.MARKERS)))
"""Strings to search for in one pass: those that identify a kind, and those that log readers need."""


def kind_of(path: Path) -> FileKind | None:
    """Return the kind of a file; None if it is unknown.

    The whole file is searched for the lines of a log, because vLLM may log for hours before anybody records.
    A file with both steps and other figures counts as a log of steps. A compressed file is read only if it is
    a log or a record.

    Raises:
        InputError: If the file cannot be read, or matches two kinds that have readers.
    """
    if is_in_parts(path):
        return TRACE
    with reading(path), opened(path) as file:
        packed = file.read(4).startswith((GZIP, ZSTD))
    try:
        kind = _kind_of_text(path)
    except InputError:
        if not packed:
            raise
        kind = None
    is_read = kind is not None and (kind.reader is not None or kind.record is not None)
    return PACKED if packed and not is_read else kind


def _kind_of_text(path: Path) -> FileKind | None:
    sample = first_sample(path)
    kind = _kind_of_sample(path, sample)
    may_be_log = not sample.is_binary and (kind is None or kind in _LOGS)
    if not may_be_log or sample.whole:
        return kind
    is_record = kind in RECORDS
    markers = _MARKERS if is_record else _MARKERS + _RECORD_MARKERS
    for block in later_samples(path, markers, _SEARCHED):
        later = _kind_of_sample(path, block, READ if is_record else READ + RECORDS)
        if later in READ:
            return later
        if later is not None:
            kind, is_record = later, True
    return kind


def _kind_of_sample(path: Path, sample: FileSample, kinds: Sequence[FileKind] = KINDS) -> FileKind | None:
    """Return the first kind that matches.

    Raises:
        InputError: If two kinds of logs match.
    """
    kind = next((kind for kind in kinds if kind.matches(sample)), None)
    if kind is None or kind.reader is None:
        return kind
    both = [kind for kind in READ if kind.matches(sample)]
    if len(both) > 1:
        msg = (
            f"{path}: looks like {both[0].name}, and like {both[1].name}: keep the lines of one of them, "
            "such as those with Iteration("
        )
        raise InputError(msg)
    return kind


def look_of(kind: FileKind | None) -> str:
    """Return a description of a file that schedtrace does not read."""
    if kind is None:
        return "not understood"
    return "empty" if kind is EMPTY else f"looks like {kind.name}"


def refusal(kind: FileKind | None) -> str:
    """Return the reason why schedtrace does not read a file, and advice."""
    if kind is None or kind is EMPTY:
        return f"{look_of(kind)}; {EXPECTED}"
    if kind.record is not None and not kind.advice:
        return f"{look_of(kind)}: it has no steps, only schedtrace analyze reads it"
    return f"{look_of(kind)}: {kind.advice}"
