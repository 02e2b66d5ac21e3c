"""Which format a workload file has, by its first line."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from schedtrace.errors import InputError
from schedtrace.workloads import csv_traces, mooncake
from schedtrace.workloads.jsonl import JsonlRow, read_jsonl
from schedtrace.workloads.rows import CountTokens, Reader, cells, opened, refused
from schedtrace.workloads.sharegpt import read_sharegpt
from schedtrace.workloads.workload import Source

KNOWN = (
    "Mooncake or Qwen-Bailian (JSON Lines with timestamp, input_length, output_length), "
    f"Azure (CSV with {', '.join(csv_traces.AZURE_COLUMNS)}), "
    f"BurstGPT (CSV with {', '.join(csv_traces.BURSTGPT_COLUMNS)}), "
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
        return Format("bailian", mooncake.read_bailian, mooncake.BAILIAN_BLOCK)
    if "timestamp" in keys or "hash_ids" in keys:
        return Format("mooncake", mooncake.read_mooncake, mooncake.BLOCK)
    if "conversations" in keys:  # no list around it: the reader says so
        return Format("sharegpt", read_sharegpt, timed=False)
    if not keys.keys().isdisjoint(JsonlRow.__struct_fields__):
        reader = partial(read_jsonl, count_tokens=count_tokens, output_len=output_len)
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
    if columns.issuperset(csv_traces.AZURE_COLUMNS):
        return Format("azure", csv_traces.read_azure, images=csv_traces.IMAGES in columns)
    if columns.issuperset(csv_traces.BURSTGPT_COLUMNS):
        return Format("burstgpt", csv_traces.read_burstgpt)
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
