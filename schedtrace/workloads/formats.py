"""Formats of workload files, recognized by the beginning of a file, and readers of several formats.

* Azure's traces of LLM inference (github.com/Azure/AzurePublicDataset; of 2023, 2024, and the multimodal one
  of 2025) are CSV. ``TIMESTAMP`` is a date and a time with up to seven decimals (digits beyond microseconds
  are cut off) and, in some files, a time zone.
* BurstGPT (github.com/HPMLL/BurstGPT) is also CSV: ``Timestamp`` is seconds since midnight of the first day.
  A request with 0 response tokens failed. ``Session ID`` and ``Elapsed time`` of newer files are not read.
* Mooncake (``FAST25-release/traces`` of github.com/kvcache-ai/Mooncake), Qwen-Bailian
  (github.com/alibaba-edu/qwen-bailian-usagetraces-anon) and vLLM's ``timed_trace`` are JSON with the identity
  of every block of a prompt (``timed_traces.py``).
* Users' own JSON, and vLLM's ``custom`` data set, have a prompt's text or its length, and the number of
  tokens to generate.
* ShareGPT is one JSON list of conversations; OpenAI has formats of its own (``chats.py`` reads both).
* ServeGen (github.com/alibaba/ServeGen) also writes CSV: ``timestamp`` is seconds since the beginning.
* Sessions are those of AIPerf and Dynamo (``sessions.py``).
* Requests of a finished benchmark have the times at which they were sent, and their lengths. ``vllm bench
  serve --save-detailed`` writes an object with a list for each fact: ``input_lens``, ``output_lens`` and, in
  newer releases, ``start_times`` in seconds. AIPerf's ``profile_export.jsonl`` has a line for each request,
  and names its units (``request_start_ns``; ``{"value": 550, "unit": "tokens"}``).

``FORMATS`` is the table of all formats; each entry claims a file by its fields.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import msgspec

from schedtrace.errors import InputError, UsageError
from schedtrace.model.message import Message
from schedtrace.model.say import say
from schedtrace.read.file_sample import FileSample
from schedtrace.read.kinds import (
    AZURE_COLUMNS,
    BURSTGPT_COLUMNS,
    EMPTY,
    OTHER_JSON,
    OTHER_REQUESTS,
    kind_of,
    look_of,
)
from schedtrace.workloads.chats import batch_prompts, chat_prompts, sharegpt_prompts
from schedtrace.workloads.rows import (
    BYTE_ORDER_MARK,
    BrokenValueError,
    CountTokens,
    PromptReader,
    PromptRow,
    Reader,
    Row,
    csv_rows,
    json_rows,
    json_values,
    keys_of,
    measured_rows,
    opened_file,
    token_count,
    unreadable_row,
)
from schedtrace.workloads.sessions import sessions_in
from schedtrace.workloads.timed_traces import TimeUnit, units_of
from schedtrace.workloads.workload import Source

SERVEGEN_COLUMNS = ("timestamp", "input_tokens", "output_tokens")
"""Names of columns: time, prompt tokens and output tokens; with ``request_id``, all columns of such a file.
"""
IMAGES = "NumImages"
"""Name of the additional column of Azure's multimodal trace."""
KNOWN = (
    "Mooncake or Qwen-Bailian (JSON Lines with timestamp, input_length, output_length), "
    f"Azure (CSV with {', '.join(AZURE_COLUMNS)}), "
    f"BurstGPT (CSV with {', '.join(BURSTGPT_COLUMNS)}), "
    "ShareGPT (a JSON list of conversations), JSON Lines with prompt or input_len, chat messages, a batch of "
    "OpenAI requests, sessions of AIPerf or Dynamo, a workload of ServeGen, or a benchmark's requests "
    "(docs/workloads.md)"
)
HEAD_BYTES = 2**16
"""Number of bytes at the beginning of a file by which its format is recognized; if the first object is
longer, the value of its last field counts as None."""
LONGEST_LINE = 2**24
"""Maximum bytes of the first line that are examined; a ShareGPT file is a single line."""


@dataclass(frozen=True)
class WorkloadFormat:
    """Format of a file, and how to read it."""

    source: Source
    reader: Reader
    prefix_block: int | None = None
    timed: bool = True
    """Whether the file's rows have arrival times."""
    images: bool = False
    """Whether the file's rows state that prompts have images."""
    prompts: PromptReader | None = None
    """Reader of prompts with their texts, for a format without times."""
    sessions: bool = False
    """Whether rows are turns, each of which waits for the answer to the turn before."""
    notes: list[Message] = field(default_factory=list)
    """Notes on what was inferred from the file."""


WITHOUT_REQUESTS = {
    "a compressed file": "unpack it first",
    "a trace of schedtrace": "replay it with schedtrace replay",
    "a result of vllm bench serve": "it has no requests; vllm bench serve --save-detailed writes them",
}
"""Advice on files of kinds without requests; for a kind without advice, the message only states that it has
no requests."""


def _read_csv(
    columns: tuple[str, str, str], at_us: Callable[[str], float], path: Path, _counts: Counter[str]
) -> Iterator[Row]:
    """Yield the rows of a trace in CSV.

    Args:
        columns: Names of time, prompt tokens and output tokens.
        at_us: Function that converts a time to microseconds; raises ValueError with the expected form.
        path: Path of the file.
    """
    time, prompt, output = columns
    for number, (at, prompt_tokens, output_tokens) in csv_rows(path, columns):
        try:
            us = at_us(at)
        except ValueError as error:
            raise unreadable_row(path, number, f"{time} {at!r} is not {error}") from error
        yield Row(
            line=number,
            prompt_tokens=token_count(path, number, prompt, prompt_tokens),
            output_tokens=token_count(path, number, output, output_tokens),
            at_us=us,
        )


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)


def _azure_us(text: str) -> int:
    msg = "a date with a time"
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(msg) from error
    if ":" not in text:
        raise ValueError(msg)
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // _US


def _seconds_us(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        msg = "a number of seconds"
        raise ValueError(msg)
    return seconds * 1e6


IGNORED_TIME = "ignored time"
"""Key that counts rows whose time is ignored."""
_LENGTHS = ("input_len", "output_len", "output_tokens")


class _OwnLine(msgspec.Struct, kw_only=True):
    """Line of a user's own file or, in the same form, of vLLM's ``custom`` data set."""

    prompt: str | None = None
    input_len: float | None = None
    output_len: float | None = None
    output_tokens: float | None = None
    """vLLM's name for ``output_len``."""
    priority: int = 0
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    timestamp: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Time, which is ignored because its unit is unknown."""


def own_prompts(path: Path, counts: Counter[str]) -> Iterator[tuple[int, PromptRow]]:
    """Yield every row with its line number, and count rows whose time is ignored."""
    for number, row in json_rows(path, _OwnLine):
        lengths: list[int | None] = []
        for name in _LENGTHS:
            value = getattr(row, name)
            lengths.append(None if value is None else token_count(path, number, name, value))
            if lengths[-1] == 0:
                raise unreadable_row(path, number, f"{name} 0: a length is 1 or more")
        prompt, output, same_output = lengths
        if (row.prompt is None) == (prompt is None):
            what = "give either prompt (a text) or input_len (a number of random tokens)"
            raise unreadable_row(path, number, what)
        if output is not None and same_output not in {None, output}:
            what = f"output_len {output} and output_tokens {same_output} contradict each other"
            raise unreadable_row(path, number, what)
        counts[IGNORED_TIME] += row.timestamp is not msgspec.UNSET
        yield (
            number,
            PromptRow(
                text=row.prompt,
                input_len=prompt,
                output_len=output or same_output,
                priority=row.priority,
                data_parallel_rank=row.data_parallel_rank,
            ),
        )


FAILED = "failed"
"""Key that counts requests that failed or were cancelled, which are left out."""


class ServeResult(msgspec.Struct):
    """Result of ``vllm bench serve --save-detailed``."""

    input_lens: list[float]
    output_lens: list[float]
    start_times: list[float] = []


def serve_has_times(path: Path) -> bool:
    """Return whether a result of ``vllm bench serve`` has the times at which requests were sent."""
    return all(result.start_times for _, result in json_rows(path, ServeResult))


def serve_rows(path: Path, counts: Counter[str]) -> Iterator[Row]:
    """Yield the requests in a result of ``vllm bench serve``; requests without output failed."""
    for place, (number, result) in enumerate(json_rows(path, ServeResult)):
        if place:
            raise unreadable_row(path, number, "a second result: keep the one whose requests are to be sent")
        times = result.start_times or [0.0] * len(result.input_lens)
        if not len(times) == len(result.input_lens) == len(result.output_lens):
            raise unreadable_row(path, number, "input_lens, output_lens and start_times differ in length")
        requests = zip(times, result.input_lens, result.output_lens, strict=True)
        for at_s, prompt, output in sorted(requests, key=itemgetter(0)):
            if not output:
                counts[FAILED] += 1
                continue
            yield Row(
                line=number,
                prompt_tokens=token_count(path, number, "input_lens", prompt),
                output_tokens=token_count(path, number, "output_lens", output),
                at_us=at_s * 1e6 if result.start_times else None,
            )


class SequenceLength(msgspec.Struct):
    """Figure of a request, with its unit."""

    value: float
    unit: str


class SequenceLengths(msgspec.Struct):
    """Figures of a request in AIPerf's export that are used here."""

    input_sequence_length: SequenceLength | None = None
    output_sequence_length: SequenceLength | None = None


class Metadata(msgspec.Struct):
    """Metadata of a request in AIPerf's export, as far as they are used here."""

    request_start_ns: float
    was_cancelled: bool = False


class ExportedRequest(msgspec.Struct):
    """Line of AIPerf's ``profile_export.jsonl``."""

    metadata: Metadata
    metrics: SequenceLengths | None = None


def aiperf_rows(path: Path, counts: Counter[str]) -> Iterator[Row]:
    """Yield the requests of AIPerf's export, in the order in which they were sent."""
    requests = sorted(json_rows(path, ExportedRequest), key=lambda pair: pair[1].metadata.request_start_ns)
    for number, row in requests:
        metrics = row.metrics or SequenceLengths()
        prompt, output = metrics.input_sequence_length, metrics.output_sequence_length
        if prompt is None or output is None or row.metadata.was_cancelled:
            counts[FAILED] += 1
            continue
        if {prompt.unit, output.unit} != {"tokens"}:
            raise unreadable_row(path, number, "sequence lengths are not in tokens")
        yield Row(
            line=number,
            prompt_tokens=token_count(path, number, "input_sequence_length", prompt.value),
            output_tokens=token_count(path, number, "output_sequence_length", output.value),
            at_us=row.metadata.request_start_ns / 1e3,
        )


@dataclass(frozen=True)
class FormatOptions:
    """Options that a user set for a file, as in ``open_workload``."""

    count_tokens: CountTokens | None = None
    output_len: int | None = None
    time_unit: TimeUnit | None = None
    prefix_block: int | None = None


@dataclass(frozen=True)
class FileFormat:
    """Entry of the table of formats."""

    name: str
    """Noun phrase for a file of this format."""
    claims: Callable[[FileSample], bool]
    """Function that returns whether a file has features of only this format."""
    make: Callable[[Path, FormatOptions], WorkloadFormat]
    has_units: bool = False
    """Whether the options ``time_unit`` and ``prefix_block`` apply to the format."""


def _prompt_format(source: Source, prompts: PromptReader, *notes: Message) -> Callable[..., WorkloadFormat]:
    """Return the function ``make`` of a format that has prompts but no times."""

    def make(_path: Path, options: FormatOptions) -> WorkloadFormat:
        reader = partial(
            measured_rows,
            prompts=prompts,
            count_tokens=options.count_tokens,
            output_len=options.output_len,
        )
        return WorkloadFormat(source, reader, timed=False, prompts=prompts, notes=[*notes])

    return make


def _csv_format(
    source: Source, columns: tuple[str, str, str], at_us: Callable[[str], float]
) -> tuple[Callable[[FileSample], bool], Callable[..., WorkloadFormat]]:
    """Return the functions ``claims`` and ``make`` of a format in CSV."""

    def make(path: Path, _options: FormatOptions) -> WorkloadFormat:
        images = IMAGES in _head(path).first_cells
        return WorkloadFormat(source, partial(_read_csv, columns, at_us), images=images)

    return lambda sample: not sample.is_json and sample.first_cells.issuperset(columns), make


def _timed_trace(path: Path, options: FormatOptions) -> WorkloadFormat:
    units = units_of(path, options.time_unit, options.prefix_block)
    notes = [units.note] if units.note else []
    reader = partial(units.trace_rows, output_len=options.output_len)
    return WorkloadFormat(units.source, reader, units.block, notes=notes)


def _sessions(path: Path, options: FormatOptions) -> WorkloadFormat:
    sessions = sessions_in(
        path,
        unit=options.time_unit,
        block=options.prefix_block,
        count_tokens=options.count_tokens,
        output_len=options.output_len,
    )
    return WorkloadFormat(
        "sessions",
        sessions.turn_rows,
        sessions.block,
        timed=sessions.is_timed,
        sessions=True,
        notes=[sessions.note] if sessions.note else [],
    )


def _claims_sessions(sample: FileSample) -> bool:
    """Return whether rows are turns or sessions, or have AIPerf's lengths without times."""
    first, some = sample.row.keys(), {key for row in sample.rows for key in row}
    prompts = first & {"input_length", "text_input", "messages", "turns"}
    is_session = bool(some & {"session_id", "delay", "context_mode"}) and bool(prompts)
    is_alone = bool(first & {"input_length", "text_input"}) and "timestamp" not in first
    return is_session or is_alone or sample.has("turns")


AS_MEASURED = say("Requests are sent at the benchmark's times, however long answers take here.")
ONE_TEXT = say("Messages are sent as one text each, without the model's chat template.")
_IN_BODY = ("custom_id", "url", "body")
_OF_OTHERS = frozenset(
    {*("input_length", "hash_ids", "text_input", "turns", "conversations", "metrics", "request_throughput")}
    | {*_IN_BODY, "schema_version", "type", "messages"}
)
"""Fields that never occur in a user's own file."""

FORMATS: tuple[FileFormat, ...] = (
    FileFormat("a trace of Azure", *_csv_format("azure", AZURE_COLUMNS, _azure_us)),
    FileFormat("a trace of BurstGPT", *_csv_format("burstgpt", BURSTGPT_COLUMNS, _seconds_us)),
    FileFormat(
        "a workload of ServeGen",
        lambda sample: not sample.is_json and sample.first_cells == {"request_id", *SERVEGEN_COLUMNS},
        _csv_format("servegen", SERVEGEN_COLUMNS, _seconds_us)[1],
    ),
    FileFormat(
        "a timed trace",
        lambda sample: (
            (sample.has("timestamp", "input_length") or sample.has("timestamp", "hash_ids"))
            and not _claims_sessions(sample)
        ),
        _timed_trace,
        has_units=True,
    ),
    FileFormat("sessions of AIPerf or Dynamo", _claims_sessions, _sessions, has_units=True),
    FileFormat(
        "chat messages",
        lambda sample: sample.has("messages") and not _claims_sessions(sample),
        _prompt_format("chat", chat_prompts, ONE_TEXT),
    ),
    FileFormat(
        "a batch of OpenAI requests",
        lambda sample: sample.has(*_IN_BODY),
        _prompt_format("openai_batch", batch_prompts, ONE_TEXT),
    ),
    FileFormat(
        "a detailed result of vllm bench serve",
        lambda sample: sample.has("input_lens", "request_throughput"),
        lambda path, _options: WorkloadFormat(
            "vllm_bench", serve_rows, timed=serve_has_times(path), notes=[AS_MEASURED]
        ),
    ),
    FileFormat(
        "an export of AIPerf's requests",
        lambda sample: (
            sample.has("metadata", "metrics")
            and isinstance(sample.row["metadata"], dict)
            and "request_start_ns" in sample.row["metadata"]
        ),
        lambda _path, _options: WorkloadFormat("aiperf", aiperf_rows, notes=[AS_MEASURED]),
    ),
    FileFormat(
        "conversations of ShareGPT",
        lambda sample: sample.has("conversations") or (sample.first_line.startswith("[") and not sample.rows),
        _prompt_format("sharegpt", sharegpt_prompts),
    ),
    FileFormat(
        "JSON Lines of one's own",
        lambda sample: (
            not sample.row.keys().isdisjoint(_OwnLine.__struct_fields__)
            and sample.row.keys().isdisjoint(_OF_OTHERS)
        ),
        _prompt_format("jsonl", own_prompts),
    ),
)
"""All formats; two of them claim a file only if it mixes their fields."""


def format_of(path: Path, options: FormatOptions) -> WorkloadFormat:
    """Return the format of a file.

    Raises:
        InputError: If the file cannot be read, is empty, or matches no format or several.
        UsageError: If an option is missing, or does not apply to the file.
    """
    if not path.is_file() and path.exists():
        msg = f"{path}: not a regular file; a workload is read more than once"
        raise InputError(msg)
    _check_beginning(path)
    sample = _head(path)
    claiming = [kind for kind in FORMATS if kind.claims(sample)]
    if len(claiming) > 1:
        msg = (
            f"{path}: looks like {claiming[0].name}, and like {claiming[1].name}: leave the fields of one out"
        )
        raise InputError(msg)
    if not claiming or not claiming[0].has_units:
        for option, value in (("--time-unit", options.time_unit), ("--prefix-block", options.prefix_block)):
            if value is not None:
                msg = f"{option} is for timed traces in JSON, and {path} is none"
                raise UsageError(msg)
    if claiming:
        return claiming[0].make(path, options)
    kind = kind_of(path)
    if kind is None or kind in (EMPTY, OTHER_JSON, OTHER_REQUESTS):
        msg = f"{path}: {'unknown format' if kind is None else look_of(kind)}; expected {KNOWN}"
    else:
        advice = kind.advice if "no requests" in kind.advice else "it has no requests"
        msg = f"{path}: {look_of(kind)}: {WITHOUT_REQUESTS.get(kind.name, advice)} (docs/workloads.md)"
    raise InputError(msg)


def _head(path: Path) -> FileSample:
    with opened_file(path) as file:
        content = file.read(HEAD_BYTES)
        return FileSample(content, whole=not file.read(1))


def _check_beginning(path: Path) -> None:
    """Refuse an empty file, and one whose first JSON object is cut or broken.

    The reader of lists reports a broken list.
    """
    number, line = 0, b""
    with opened_file(path) as file:
        while not line and (read := file.readline(LONGEST_LINE)):
            number, line = number + 1, read.removeprefix(BYTE_ORDER_MARK).strip()
    if not line:
        msg = f"{path}: empty; expected {KNOWN}"
        raise InputError(msg)
    if not line.startswith((b"{", b"[")) or keys_of(line) is not None:
        return
    try:
        next(json_values(path), None)
    except BrokenValueError as error:
        if not line.startswith(b"["):
            raise unreadable_row(path, number if error.line == 1 else error.line, error.why) from error
