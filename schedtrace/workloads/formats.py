"""The formats of workload files: which one a file has, by its first line, and readers of one request a line.

* Azure's traces of LLM inference (github.com/Azure/AzurePublicDataset; of 2023, 2024, and the multimodal one
  of 2025) are CSV. ``TIMESTAMP`` is a date with a time, with up to seven decimals, of which those beyond
  microseconds are cut off, and, in some files, a time zone.
* BurstGPT (github.com/HPMLL/BurstGPT) is CSV, too: ``Timestamp`` is seconds since midnight of the first day.
  A request with 0 response tokens failed. ``Session ID`` and ``Elapsed time`` of newer files are not read.
* Mooncake (``FAST25-release/traces`` of github.com/kvcache-ai/Mooncake) is JSON Lines with the identity of
  every block of a prompt: milliseconds, blocks of 512 tokens, the last of which may be a part of one.
* Qwen-Bailian (github.com/alibaba-edu/qwen-bailian-usagetraces-anon) has the same names, but seconds and
  blocks of 16 tokens.
* JSON Lines of one's own have a prompt's text or its length, and how much to generate.
* ShareGPT is one JSON list of conversations (``sharegpt.py``).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from schedtrace.errors import InputError
from schedtrace.workloads.rows import (
    ESTIMATED,
    CountTokens,
    Reader,
    Row,
    cells,
    csv_rows,
    estimated_tokens,
    json_lines,
    opened,
    refused,
    tokens,
)
from schedtrace.workloads.sharegpt import read_sharegpt
from schedtrace.workloads.workload import Source

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
"""Time, prompt tokens and output tokens."""
IMAGES = "NumImages"
"""A further column of Azure's multimodal trace."""
MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16
US_PER_MS, US_PER_S = 1e3, 1e6
NO_IDS, SPARE_IDS = "no block ids", "spare block ids"
"""Counted."""
KNOWN = (
    "Mooncake or Qwen-Bailian (JSON Lines with timestamp, input_length, output_length), "
    f"Azure (CSV with {', '.join(AZURE_COLUMNS)}), "
    f"BurstGPT (CSV with {', '.join(BURSTGPT_COLUMNS)}), "
    "ShareGPT (a JSON list of conversations) or JSON Lines with prompt or input_len"
)
LONGEST_LINE = 2**24
"""Bytes of the first line that are looked at; ShareGPT files are one line."""


@dataclass(frozen=True)
class Format:
    """What a file is, and how it is read."""

    source: Source
    reader: Reader
    prefix_block: int | None = None
    timed: bool = True
    """It says when requests arrived."""
    images: bool = False
    """It says that prompts have images."""


def format_of(path: Path, count_tokens: CountTokens | None = None, output_len: int | None = None) -> Format:
    """The format of a file; options are those of ``open_workload``.

    Raises:
        InputError: it cannot be read, is empty or of no known format.
    """
    if not path.is_file() and path.exists():
        msg = f"{path}: not a regular file; a workload is read more than once"
        raise InputError(msg)
    number, line = _first_line(path)
    if line.startswith(b"["):
        return Format("sharegpt", partial(read_sharegpt, count_tokens=count_tokens), timed=False)
    if not line.startswith(b"{"):
        return _of_columns(path, line)
    try:
        keys = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refused(path, number, error) from error
    if "chat_id" in keys and "timestamp" in keys:
        reader = partial(_read_blocks, unit_us=US_PER_S, block=BAILIAN_BLOCK)
        return Format("bailian", reader, BAILIAN_BLOCK)
    if "timestamp" in keys or "hash_ids" in keys:
        reader = partial(_read_blocks, unit_us=US_PER_MS, block=MOONCAKE_BLOCK)
        return Format("mooncake", reader, MOONCAKE_BLOCK)
    if "conversations" in keys:  # no list around it: the reader says so
        return Format("sharegpt", read_sharegpt, timed=False)
    if not keys.keys().isdisjoint(OwnRow.__struct_encode_fields__):
        reader = partial(_read_own, count_tokens=count_tokens, output_len=output_len)
        return Format("jsonl", reader, timed=False)
    if keys.get("type") == msgspec.Raw(b'"header"'):
        msg = f"{path}: the trace of a run, not a workload file"
        raise InputError(msg)
    raise _unknown(path)


def _of_columns(path: Path, line: bytes) -> Format:
    try:
        columns = set(cells(line))
    except ValueError as error:
        raise _unknown(path) from error
    if columns.issuperset(AZURE_COLUMNS):
        return Format("azure", partial(_read_csv, AZURE_COLUMNS, _azure_us), images=IMAGES in columns)
    if columns.issuperset(BURSTGPT_COLUMNS):
        return Format("burstgpt", partial(_read_csv, BURSTGPT_COLUMNS, _burstgpt_us))
    raise _unknown(path)


def _first_line(path: Path) -> tuple[int, bytes]:
    """The first line that is not blank, with its number."""
    with opened(path) as file:
        number = 1
        while line := file.readline(LONGEST_LINE):
            if stripped := line.removeprefix(b"\xef\xbb\xbf").strip():
                return number, stripped
            number += 1
    msg = f"{path}: empty; expected {KNOWN}"
    raise InputError(msg)


def _unknown(path: Path) -> InputError:
    return InputError(f"{path}: unknown format; expected {KNOWN}")


def _read_csv(
    columns: tuple[str, str, str], at_us: Callable[[str], float], path: Path, _counts: Counter[str]
) -> Iterator[Row]:
    """The rows of a trace in CSV.

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
            raise refused(path, number, f"{time} {at!r} is not {error}") from error
        yield Row(
            line=number,
            prompt_tokens=tokens(path, number, prompt, prompt_tokens),
            output_tokens=tokens(path, number, output, output_tokens),
            at_us=us,
        )


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)


def _azure_us(text: str) -> int:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        msg = "a date with a time"
        raise ValueError(msg) from error
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


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class _BlocksRow(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Count] = []


def _read_blocks(path: Path, counts: Counter[str], *, unit_us: float, block: int) -> Iterator[Row]:
    """The rows of a Mooncake or Qwen-Bailian trace, times in ``unit_us``, ``block`` tokens a block."""
    for number, row in json_lines(path, _BlocksRow):
        blocks = -(-row.input_length // block)
        counts[NO_IDS] += not row.hash_ids
        counts[SPARE_IDS] += len(row.hash_ids) > blocks
        yield Row(
            line=number,
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            at_us=row.timestamp * unit_us,
            prefix=tuple(row.hash_ids[:blocks]),
        )


class OwnRow(msgspec.Struct, kw_only=True):
    """One line of one's own: ``prompt`` or ``input_len``, and how much to generate."""

    text: str | None = msgspec.field(default=None, name="prompt")
    input_len: _Positive | None = None
    output_len: _Positive | None = None
    priority: int = 0
    data_parallel_rank: _Count | None = None
    """The engine that gets it; None: vLLM's front end chooses."""


def own_rows(path: Path) -> Iterator[tuple[int, OwnRow]]:
    """Every row with its line's number.

    Raises:
        InputError: ``path:line: what``.
    """
    for number, row in json_lines(path, OwnRow):
        if (row.text is None) == (row.input_len is None):
            what = "give either prompt (a text) or input_len (a number of random tokens)"
            raise refused(path, number, what)
        yield number, row


def _read_own(
    path: Path, counts: Counter[str], *, count_tokens: CountTokens | None, output_len: int | None
) -> Iterator[Row]:
    """The lines as rows; without ``count_tokens`` lengths of texts are estimated, and counted as such.

    Raises:
        InputError: ``path:line: what``; also where a line has no ``output_len``, and none is given.
    """
    measure = count_tokens or estimated_tokens
    for number, row in own_rows(path):
        output = output_len or row.output_len
        if output is None:
            raise refused(path, number, "no output_len: add it, or give --output-len")
        counts[ESTIMATED] += row.text is not None and count_tokens is None
        prompt = row.input_len or measure(row.text or "")
        yield Row(number, prompt, output, priority=row.priority, data_parallel_rank=row.data_parallel_rank)
