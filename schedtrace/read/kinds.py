"""The kinds of files that people give to schedtrace: one table, by what only a file of that kind has.

A kind with a reader is read; the others are refused by name, with what to do instead. A reader for one more
kind is a field of its row. What tells them apart is a sample of the file: its first block as text, JSON and
CSV, or a later block with a marker.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from schedtrace.errors import InputError
from schedtrace.model.manifest import is_in_parts
from schedtrace.model.printable import without_colours
from schedtrace.model.safe_files import opened
from schedtrace.read import iteration_log, loguru_log
from schedtrace.read.iteration_log import iteration_in, read_iteration_log
from schedtrace.read.lines import reading
from schedtrace.read.loguru_log import has_records, read_loguru_log
from schedtrace.read.trace import Trace

HEAD = 2**20
"""Bytes of a block from which the kind of a file is recognized."""
MOST_ROWS = 20
"""Maximum number of JSON objects that are examined."""
_BINARY = 4096
"""Number of bytes among which a text has no 0."""
_STEP = json.JSONDecoder()
_TRUNCATED_KEY = re.compile(r'\s*,?\s*"((?:[^"\\]|\\.){1,200})"\s*:\s*')


@dataclass(frozen=True)
class FileSample:
    """A block of a file, by default its first."""

    content: bytes
    whole: bool = True
    """Whether the block is the whole file."""

    @cached_property
    def is_binary(self) -> bool:
        """Return whether the block is not text."""
        return b"\0" in self.content[:_BINARY]

    @cached_property
    def text(self) -> str:
        """Text without terminal colours."""
        return without_colours(self.content.removeprefix(b"\xef\xbb\xbf").decode(errors="replace"))

    @cached_property
    def lines(self) -> list[str]:
        """The text's lines."""
        return self.text.split("\n")

    @cached_property
    def first_line(self) -> str:
        """The first line that is not blank."""
        return next((line.strip() for line in self.lines if line.strip()), "")

    @property
    def is_json(self) -> bool:
        """Return whether it begins like a JSON object or a list of objects."""
        return bool(re.match(r'\s*(?:\[\s*)?\{\s*["}]', self.text))

    @cached_property
    def columns(self) -> frozenset[str]:
        """Cells of the first line, read as CSV."""
        return frozenset(cell.strip().strip('"') for cell in self.first_line.split(","))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The first JSON objects, one per line, in a list or one after the other; empty if it is not JSON.

        An object longer than the block has only the fields within it, of which the last may be None.
        """
        if not self.is_json:
            return []
        objects: list[dict[str, Any]] = []
        text = self.text
        at = re.match(r"\s*(?:\[\s*)?", text).end()  # type: ignore[union-attr]  # it matches everything
        while len(objects) < MOST_ROWS and at < len(text) and text[at] == "{":
            try:
                row, at = _STEP.raw_decode(text, at)
            except (ValueError, RecursionError):
                objects.append(_fields_so_far(text, at))
                break
            objects.append(row)
            at = re.compile(r"[\s,]*").match(text, at).end()  # type: ignore[union-attr]  # likewise
        return objects

    @property
    def is_list(self) -> bool:
        """Return whether it begins like a JSON list."""
        return self.text.lstrip().startswith("[")

    @property
    def row(self) -> dict[str, Any]:
        """The first JSON object."""
        return self.rows[0] if self.rows else {}

    def has(self, *names: str) -> bool:
        """Return whether the first JSON object has all these fields."""
        return bool(names) and self.row.keys() >= set(names)


def _fields_so_far(text: str, at: int) -> dict[str, Any]:
    """Return the readable fields of a cut or broken object."""
    fields: dict[str, Any] = {}
    at += 1
    while key := _TRUNCATED_KEY.match(text, at):
        fields[key[1]] = None
        try:
            fields[key[1]], at = _STEP.raw_decode(text, key.end())
        except (ValueError, RecursionError):
            break
    return fields


def first_sample(path: Path) -> FileSample:
    """Return a file's first block.

    Raises:
        InputError: If it cannot be read.
    """
    with reading(path), opened(path) as file:
        content = file.read(HEAD)
        return FileSample(content, whole=not file.read(1))


def later_samples(path: Path, markers: tuple[bytes, ...]) -> Iterator[FileSample]:
    """Yield the later blocks that contain one of the markers; each begins and ends with a whole line.

    Raises:
        InputError: If the file cannot be read.
    """
    with reading(path), opened(path) as file:
        rest = file.read(HEAD)
        while block := file.read(HEAD):
            rest = rest[rest.rfind(b"\n") + 1 :][-HEAD:]
            whole = rest + block
            if any(marker in whole for marker in markers):
                yield FileSample(whole)
            rest = block


Reader = Callable[[Path], list[Trace]]
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
"""Time, prompt tokens and output tokens."""
TRACE_LINES = frozenset({"header", "step", "delta", "output", "events", "cpu", "notice", "end"})
"""``type`` of the lines of a trace."""


@dataclass(frozen=True)
class FileKind:
    """Kind of file."""

    name: str
    """A noun phrase: what such a file is."""
    matches: Callable[[FileSample], bool]
    advice: str = ""
    """Advice on such a file, in the imperative."""
    reader: Reader | None = None
    is_workload: bool = False
    """Whether ``schedtrace.workloads`` reads it."""


TO_RECORD = "record with schedtrace, or restart vLLM with --enable-logging-iteration-details"
TO_REPLAY = "replay it with schedtrace simulate --dataset, or send it with schedtrace run --dataset"
TO_NAME_THE_RUN = "name the run that it was made of"
TO_UNPACK = "unpack it first"


def _fields(*names: str) -> Callable[[FileSample], bool]:
    """Return a check that a JSON object, possibly the first of several, has these fields."""
    return lambda sample: sample.has(*names)


def _own(*names: str) -> Callable[[FileSample], bool]:
    return lambda sample: sample.has("schema_version", *names) and "type" not in sample.row


def _text(pattern: str, least: int = 1) -> Callable[[FileSample], bool]:
    """Return a check that a text has at least this many matches."""
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
    return lambda sample: not sample.is_json and sample.columns.issuperset(names)


def _is_trace(sample: FileSample) -> bool:
    return sample.first_line.startswith("{") and sample.row.get("type") in TRACE_LINES


def _is_guidellm(sample: FileSample) -> bool:
    runs = sample.row.get("benchmarks", ())
    if runs is None:  # cut, as results of a long sweep are
        return True
    return isinstance(runs, list) and any(
        isinstance(run, dict) and not run.keys().isdisjoint({"type_", "run_stats", "run_id"}) for run in runs
    )


_SUMMARY = {"successful_requests", "failed_requests", "completed_requests", "num_successful_requests"}
_RATES = {"duration_s", "duration", "requests_per_second", "request_throughput", "total_time"}


_OF_A_PROMPT = {"prompt", "output_len", "output_tokens", "priority", "data_parallel_rank", "request_id", "id"}


def _is_empty(sample: FileSample) -> bool:
    return sample.whole and not sample.text.strip()


KINDS: tuple[FileKind, ...] = (
    FileKind("an empty file", _is_empty),
    FileKind(
        "a compressed file",
        _begins(b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PK\x03\x04", b"BZh"),
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
    FileKind(
        "a result of vllm bench serve",
        _fields("model_id", "completed", "total_input_tokens", "request_throughput"),
        f"it has latencies and no steps; {TO_RECORD}",
    ),
    FileKind(
        "a serving benchmark's result",
        _fields("completed", "total_input_tokens", "request_throughput"),
        f"it has latencies and no steps; {TO_RECORD}",
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
        lambda sample: (
            sample.has("input_config", "request_latency")
            or sample.has("input_config", "request_throughput")
            or (sample.has("metadata", "metrics") and isinstance(sample.row["metrics"], dict))
        ),
        f"it has latencies and no steps; {TO_RECORD}",
    ),
    FileKind("a result of GuideLLM", _is_guidellm, f"it has latencies and no steps; {TO_RECORD}"),
    FileKind(
        "a result of inference-perf",
        _fields("load_summary", "successes"),
        f"it has latencies and no steps; {TO_RECORD}",
    ),
    FileKind(
        "a benchmark's summary",
        lambda sample: not (sample.row.keys().isdisjoint(_SUMMARY) or sample.row.keys().isdisjoint(_RATES)),
        f"it has totals and no steps; {TO_RECORD}",
    ),
    FileKind(
        "what vllm bench serve prints",
        _text(r"={3,} Serving Benchmark Result ={3,}"),
        f"it has latencies and no steps; {TO_RECORD}",
    ),
    FileKind(
        "a trace for a viewer (Trace Event Format)",
        _fields("traceEvents"),
        "open it in ui.perfetto.dev",
    ),
    # workloads
    FileKind("a trace of Azure's LLM inference", _columns(AZURE_COLUMNS), TO_REPLAY, is_workload=True),
    FileKind("a trace of BurstGPT", _columns(BURSTGPT_COLUMNS), TO_REPLAY, is_workload=True),
    FileKind(
        "a timed trace (Mooncake, Qwen-Bailian or vLLM's timed_trace)",
        _fields("timestamp", "input_length", "output_length"),
        TO_REPLAY,
        is_workload=True,
    ),
    FileKind(
        "a list of conversations (ShareGPT)",
        _fields("conversations"),
        TO_REPLAY,
        is_workload=True,
    ),
    FileKind(
        "a workload in JSON Lines",
        lambda sample: (
            "input_len" in sample.row or ("prompt" in sample.row and sample.row.keys() <= _OF_A_PROMPT)
        ),
        TO_REPLAY,
        is_workload=True,
    ),
    FileKind(
        "a batch of OpenAI requests",
        _fields("custom_id", "url", "body"),
        TO_REPLAY,
        is_workload=True,
    ),
    FileKind(
        "chat messages",
        lambda sample: isinstance(sample.row.get("messages"), list),
        TO_REPLAY,
        is_workload=True,
    ),
    FileKind(
        "sessions of AIPerf or Dynamo",
        lambda sample: (
            isinstance(sample.row.get("turns"), list)
            or (sample.has("session_id") and not sample.row.keys().isdisjoint({"input_length", "text_input"}))
        ),
        TO_REPLAY,
        is_workload=True,
    ),
    FileKind(
        "ServeGen's rates of a client",
        _text(r"\A\d+(?:\.\d+)?,[\d.e+-]*,[\d.e+-]*,(?:Gamma|Weibull|Exponential)?,"),
        "it has no requests: generate a workload with ServeGen and name its CSV",
    ),
    # logs
    FileKind(
        f"a {loguru_log.RECORD}",
        lambda sample: any(key in sample.text for key in loguru_log.KEYS) and has_records(sample.lines),
        reader=read_loguru_log,
    ),
    FileKind(
        iteration_log.RECORD,
        lambda sample: any(iteration_in(line) is not None for line in sample.lines),
        reader=read_iteration_log,
    ),
    FileKind(
        "vLLM's dump of a SchedulerOutput",
        _text(r"SchedulerOutput\(scheduled_new_reqs="),
        f"it has a single step and no reasons; {TO_RECORD}",
    ),
    FileKind(
        "a dump of vLLM's metrics",
        _text(r"^(?:# (?:HELP|TYPE) )?vllm:\w+(?:\{[^\n]*\})? ", least=3),
        f"it has sums and no steps; {TO_RECORD}",
    ),
    FileKind("a dump of Prometheus metrics", _text(r"^# (?:HELP|TYPE) \w+ ", least=2), TO_RECORD),
    FileKind(
        "vLLM's log with its periodic lines only",
        _text(r"Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: "),
        f"it has a line every 10 s and no steps; {TO_RECORD}",
    ),
    FileKind(
        "vLLM's log without iteration lines",
        _text(
            r"\b(?:INFO|WARNING|ERROR|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[\w/]+\.py:\d+\]|\w+\.py:\d+\])"
        ),
        TO_RECORD,
    ),
    FileKind("JSON of another program", lambda sample: bool(sample.rows), TO_RECORD),
)
TRACE = next(kind for kind in KINDS if kind.matches is _is_trace)
EMPTY = next(kind for kind in KINDS if kind.matches is _is_empty)
OTHER_JSON = next(kind for kind in KINDS if kind.name == "JSON of another program")
EXPECTED = (
    "expected a trace of schedtrace (engine-<rank>.jsonl), a log of a patched schedule() "
    "({'token_budget': ..., 'requests': [...]}), or vLLM's log with --enable-logging-iteration-details"
)
READ = tuple(kind for kind in KINDS if kind.reader)
_LOGS = KINDS[KINDS.index(READ[-1]) + 1 :]
"""Kinds of logs that may precede the lines that are read."""
_MARKERS = (*loguru_log.MARKERS, *iteration_log.MARKERS)


def kind_of(path: Path) -> FileKind | None:
    """Return the kind of a file; None if it is unknown.

    Lines of a log are looked for to the file's end: vLLM may log for hours before somebody records.

    Raises:
        InputError: If it cannot be read, or is of two kinds that are read.
    """
    if is_in_parts(path):
        return TRACE
    sample = first_sample(path)
    kind = _kind_of_sample(path, sample)
    may_be_log = not sample.is_binary and (kind is None or kind in _LOGS)
    if may_be_log and not sample.whole:
        later = (_kind_of_sample(path, block, READ) for block in later_samples(path, _MARKERS))
        return next(filter(None, later), kind)
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
    """Return a description of a file that is not read."""
    if kind is None:
        return "not understood"
    return "empty" if kind is EMPTY else f"looks like {kind.name}"


def refusal(kind: FileKind | None) -> str:
    """Return the reason why a file is not read, and advice."""
    if kind is None or kind is EMPTY:
        return f"{look_of(kind)}; {EXPECTED}"
    return f"{look_of(kind)}: {kind.advice}"
