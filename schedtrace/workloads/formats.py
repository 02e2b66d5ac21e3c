"""The formats of workload files: which one a file has, by its first line, and readers of one request a line.

* Azure's traces of LLM inference (github.com/Azure/AzurePublicDataset; of 2023, 2024, and the multimodal one
  of 2025) are CSV. ``TIMESTAMP`` is a date with a time, with up to seven decimals, of which those beyond
  microseconds are cut off, and, in some files, a time zone.
* BurstGPT (github.com/HPMLL/BurstGPT) is CSV, too: ``Timestamp`` is seconds since midnight of the first day.
  A request with 0 response tokens failed. ``Session ID`` and ``Elapsed time`` of newer files are not read.
* Mooncake (``FAST25-release/traces`` of github.com/kvcache-ai/Mooncake), Qwen-Bailian
  (github.com/alibaba-edu/qwen-bailian-usagetraces-anon) and vLLM's ``timed_trace`` are JSON with the identity
  of every block of a prompt (``timed_traces.py``).
* JSON of one's own, and vLLM's ``custom`` data set, have a prompt's text or its length, and how much to
  generate.
* ShareGPT is one JSON list of conversations (``sharegpt.py``).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from schedtrace.errors import InputError, UsageError
from schedtrace.model.message import Message
from schedtrace.read.kinds import AZURE_COLUMNS, BURSTGPT_COLUMNS, kind_of, look_of
from schedtrace.workloads.rows import (
    BYTE_ORDER_MARK,
    ESTIMATED,
    BrokenValueError,
    CountTokens,
    Reader,
    Row,
    csv_cells,
    csv_rows,
    estimated_tokens,
    json_rows,
    json_values,
    keys_of,
    opened_file,
    token_count,
    unreadable_row,
)
from schedtrace.workloads.sharegpt import read_sharegpt
from schedtrace.workloads.timed_traces import TimeUnit, units_of
from schedtrace.workloads.workload import Source

IMAGES = "NumImages"
"""A further column of Azure's multimodal trace."""
KNOWN = (
    "Mooncake or Qwen-Bailian (JSON Lines with timestamp, input_length, output_length), "
    f"Azure (CSV with {', '.join(AZURE_COLUMNS)}), "
    f"BurstGPT (CSV with {', '.join(BURSTGPT_COLUMNS)}), "
    "ShareGPT (a JSON list of conversations) or JSON Lines with prompt or input_len"
)
LONGEST_LINE = 2**24
"""Maximum bytes of the first line that are examined; ShareGPT files are a single line."""


@dataclass(frozen=True)
class WorkloadFormat:
    """Format of a file, and how to read it."""

    source: Source
    reader: Reader
    prefix_block: int | None = None
    timed: bool = True
    """Whether its rows have arrival times."""
    images: bool = False
    """Whether its rows say that prompts have images."""
    notes: list[Message] = field(default_factory=list)
    """Notes on what was inferred about the file."""


def format_of(
    path: Path,
    count_tokens: CountTokens | None = None,
    output_len: int | None = None,
    *,
    time_unit: TimeUnit | None = None,
    prefix_block: int | None = None,
) -> WorkloadFormat:
    """Return the format of a file; options are those of ``open_workload``.

    Raises:
        InputError: If it cannot be read, is empty or of no known format.
        UsageError: If an option is missing, or does not go with the file.
    """
    if not path.is_file() and path.exists():
        msg = f"{path}: not a regular file; a workload is read more than once"
        raise InputError(msg)
    number, line = _first_line(path)
    if not line.startswith((b"{", b"[")):
        _refuse_units(path, time_unit, prefix_block)
        return _csv_format(path, line)
    try:
        keys = _first_keys(path, line)
    except BrokenValueError as error:
        raise unreadable_row(path, number if error.line == 1 else error.line, error.why) from error
    if {"timestamp", "input_length"} <= keys or "hash_ids" in keys:
        units = units_of(path, time_unit, prefix_block)
        notes = [units.note] if units.note else []
        return WorkloadFormat(units.source, units.trace_rows, units.block, notes=notes)
    _refuse_units(path, time_unit, prefix_block)
    if not keys.isdisjoint(_OwnLine.__struct_fields__):
        reader = partial(_read_own, count_tokens=count_tokens, output_len=output_len)
        return WorkloadFormat("jsonl", reader, timed=False)
    kind = kind_of(path)
    if "conversations" in keys or (line.startswith(b"[") and (kind is None or not keys)):
        return WorkloadFormat("sharegpt", partial(read_sharegpt, count_tokens=count_tokens), timed=False)
    raise _unknown(path)


def _refuse_units(path: Path, time_unit: TimeUnit | None, prefix_block: int | None) -> None:
    """Refuse options of a timed trace for another file.

    Raises:
        UsageError: which one was given.
    """
    for option, value in (("--time-unit", time_unit), ("--prefix-block", prefix_block)):
        if value is not None:
            msg = f"{option} is for timed traces in JSON, and {path} is none"
            raise UsageError(msg)


def _first_keys(path: Path, line: bytes) -> set[str]:
    """Return the keys of the first JSON object of a file; none if a list begins with another value.

    Raises:
        BrokenValueError: If it is cut or broken.
    """
    if (keys := keys_of(line)) is not None:
        return keys
    try:
        first = next(json_values(path), None)
    except BrokenValueError:
        if line.startswith(b"["):
            return set()  # the reader says it
        raise
    return set(first.value) if first is not None and isinstance(first.value, dict) else set()


def _csv_format(path: Path, line: bytes) -> WorkloadFormat:
    try:
        columns = set(csv_cells(line))
    except ValueError as error:
        raise _unknown(path) from error
    if columns.issuperset(AZURE_COLUMNS):
        return WorkloadFormat("azure", partial(_read_csv, AZURE_COLUMNS, _azure_us), images=IMAGES in columns)
    if columns.issuperset(BURSTGPT_COLUMNS):
        return WorkloadFormat("burstgpt", partial(_read_csv, BURSTGPT_COLUMNS, _burstgpt_us))
    raise _unknown(path)


def _first_line(path: Path) -> tuple[int, bytes]:
    """Return the first line that is not blank, with its number."""
    with opened_file(path) as file:
        number = 1
        while line := file.readline(LONGEST_LINE):
            if stripped := line.removeprefix(BYTE_ORDER_MARK).strip():
                return number, stripped
            number += 1
    msg = f"{path}: empty; expected {KNOWN}"
    raise InputError(msg)


def _unknown(path: Path) -> InputError:
    kind = kind_of(path)
    return InputError(f"{path}: {'unknown format' if kind is None else look_of(kind)}; expected {KNOWN}")


def _read_csv(
    columns: tuple[str, str, str], at_us: Callable[[str], float], path: Path, _counts: Counter[str]
) -> Iterator[Row]:
    """Yield the rows of a trace in CSV.

    Args:
        columns: Names of time, prompt tokens and output tokens.
        at_us: Microseconds of a time; raises ValueError with what the text is not.
        path: The file.
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


def _burstgpt_us(text: str) -> float:
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
    """Line of a user's own file, or of vLLM's ``custom`` data set, as it stands."""

    prompt: str | None = None
    input_len: float | None = None
    output_len: float | None = None
    output_tokens: float | None = None
    """vLLM's name for ``output_len``."""
    priority: int = 0
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    timestamp: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Time that is not read: nothing says its unit."""


class OwnRow(NamedTuple):
    """Request of a user's own file: ``text`` or ``input_len``, and how much to generate."""

    text: str | None
    input_len: int | None
    output_len: int | None
    priority: int
    data_parallel_rank: int | None
    """The engine that gets it; None: vLLM's front end chooses."""


def own_rows(path: Path, counts: Counter[str]) -> Iterator[tuple[int, OwnRow]]:
    """Yield every row with its line number; count ignored rows.

    Raises:
        InputError: ``path:line: what``.
    """
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
        yield number, OwnRow(row.prompt, prompt, output or same_output, row.priority, row.data_parallel_rank)


def _read_own(
    path: Path, counts: Counter[str], *, count_tokens: CountTokens | None, output_len: int | None
) -> Iterator[Row]:
    """Yield the lines as rows; without ``count_tokens`` lengths of texts are estimated, and counted as such.

    Raises:
        InputError: ``path:line: what``; also where a line has no ``output_len``, and none is given.
    """
    measure = count_tokens or estimated_tokens
    for number, row in own_rows(path, counts):
        output = row.output_len or output_len
        if output is None:
            raise unreadable_row(path, number, "no output_len or output_tokens: add it, or give --output-len")
        counts[ESTIMATED] += row.text is not None and count_tokens is None
        prompt = row.input_len or measure(row.text or "")
        yield Row(number, prompt, output, priority=row.priority, data_parallel_rank=row.data_parallel_rank)
