"""Code that readers of workload files share: numbered lines, JSON and CSV with named fields, and rows."""

import codecs
import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec

from schedtrace.errors import InputError
from schedtrace.read.lines import reading

_Line = TypeVar("_Line", bound=msgspec.Struct)


class Row(NamedTuple):
    """Row of a file, usable or not."""

    line: int
    """Number of the line from 1; for ShareGPT, the number of the conversation."""
    prompt_tokens: int
    output_tokens: int
    at_us: float | None = None
    """Time of the row on the file's clock, in microseconds; None if the file has no times."""
    prefix: tuple[int, ...] = ()
    priority: int = 0
    data_parallel_rank: int | None = None
    session: str | None = None
    """Session to which the row belongs, as a turn that is sent after the answer to the previous turn; None:
    the row waits for no answer."""
    delay_us: float = 0.0
    """Time from the answer to the previous turn until this turn is sent."""


Reader = Callable[[Path, Counter[str]], Iterator[Row]]
"""Function that reads a file once, row by row, and counts what ``open_workload`` reports.

Raises:
    InputError: If a row is invalid; the message begins with ``path:line``.
"""


class PromptRow(NamedTuple):
    """Request in a file without times: a text or the length of a prompt, and how much to generate."""

    text: str | None = None
    input_len: int | None = None
    output_len: int | None = None
    completion: str | None = None
    """Recorded answer; if ``output_len`` is missing, as many tokens are generated as the answer has."""
    priority: int = 0
    data_parallel_rank: int | None = None
    """Rank of the engine that gets the request; None: vLLM's front end chooses."""


PromptReader = Callable[[Path, Counter[str]], Iterator[tuple[int, PromptRow]]]
"""Function that reads a file once and yields each request with its line or entry number; it counts as
``Reader`` does."""


CountTokens = Callable[[str], int]
"""Function that returns the number of tokens of a text."""
CHARACTERS_A_TOKEN = 4
"""Approximate number of characters per token in English text."""
MOST_TOKENS = 2**40
"""Maximum number of tokens of a request."""
ESTIMATED = "estimated"
"""Key that counts rows whose lengths were estimated instead of measured with a tokenizer."""


def estimated_tokens(text: str) -> int:
    """Return an estimate of a text's number of tokens, without a tokenizer."""
    return -(-len(text) // CHARACTERS_A_TOKEN)


def measured_rows(
    path: Path,
    counts: Counter[str],
    *,
    prompts: PromptReader,
    count_tokens: CountTokens | None,
    output_len: int | None,
) -> Iterator[Row]:
    """Yield prompts as rows. Without ``count_tokens``, estimate the lengths of texts and count the estimates.

    Raises:
        InputError: If a row is invalid, or has no output length and ``output_len`` is None.
    """
    measure = count_tokens or estimated_tokens
    for number, row in prompts(path, counts):
        output = row.output_len or output_len
        if row.completion is not None and row.output_len is None:
            output = max(1, measure(row.completion))
        if output is None:
            raise unreadable_row(path, number, "no output_len or output_tokens: add it, or give --output-len")
        counts[ESTIMATED] += row.text is not None and count_tokens is None
        prompt = row.input_len or measure(row.text or "")
        yield Row(number, prompt, output, priority=row.priority, data_parallel_rank=row.data_parallel_rank)


def unreadable_row(path: Path, line: int, what: object) -> InputError:
    """Return the error for a row that cannot be read."""
    return InputError(f"{path}:{line}: {what}")


@contextmanager
def opened_file(path: Path) -> Iterator[BinaryIO]:
    """Open the file for reading."""
    with reading(path), path.open("rb") as file:
        yield file


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield lines that are not blank, with their numbers from 1; leave out a byte-order mark."""
    with opened_file(path) as file:
        for number, line in enumerate(file, start=1):
            if text := (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).strip():
                yield number, text


def json_rows(path: Path, kind: type[_Line]) -> Iterator[tuple[int, _Line]]:
    """Yield each JSON object of a file as a struct of this kind, with its line number from 1.

    Objects may have a line each (JSON Lines), be in a list, or extend over several lines, one after the
    other.

    Raises:
        InputError: If a value is not such an object.
    """
    number, line = next(numbered_lines(path), (1, b"{}"))
    if keys_of(line) is None:
        yield from _json_values(path, kind)
        return
    decode = msgspec.json.Decoder(kind).decode
    for number, line in numbered_lines(path):
        try:
            read = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise unreadable_row(path, number, error) from error
        yield number, read


def keys_of(line: bytes) -> set[str] | None:
    """Return the keys of a line that is a whole JSON object, as in JSON Lines; None for any other line."""
    try:
        return set(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _json_values(path: Path, kind: type[_Line]) -> Iterator[tuple[int, _Line]]:
    try:
        for value in json_values(path):
            try:
                yield value.line, msgspec.convert(value.value, kind)
            except msgspec.ValidationError as error:
                raise unreadable_row(path, value.line, error) from error
    except BrokenValueError as error:
        raise unreadable_row(path, error.line, error.why) from error


CHUNK_BYTES = 2**20
MOST_CHARACTERS = 2**26
"""Maximum characters of one value; a file with a longer value is treated as broken."""


class JsonValue(NamedTuple):
    """Entry of a JSON list, or one of several values in a file."""

    number: int
    """Place in the file, from 1."""
    line: int
    """Line on which the value begins, from 1."""
    value: object


class BrokenValueError(Exception):
    """Error: a JSON value is cut or broken.

    Args:
        number: Place of the value in the file, from 1.
        line: Line on which the value begins, from 1.
        why: Description of the defect.
    """

    def __init__(self, number: int, line: int, why: object) -> None:
        super().__init__(number, line, why)
        self.number, self.line, self.why = number, line, why


def json_values(path: Path) -> Iterator[JsonValue]:
    """Yield the entries of a JSON list, or consecutive values, with only one value in memory at a time.

    Raises:
        BrokenValueError: If a value cannot be read.
    """
    scan = json.JSONDecoder().raw_decode
    text, at, number, line, is_list = "", 0, 1, 1, None
    with opened_file(path) as file:
        utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        while True:
            begin = at
            while at < len(text) and (text[at].isspace() or (text[at] == "," and is_list)):
                at += 1
            line += text.count("\n", begin, at)
            if is_list is None and at < len(text):
                is_list = text[at] == "["
                at += is_list
                continue
            if at < len(text) and text[at] == "]" and is_list:
                rest = text[at + 1 :] + file.read(CHUNK_BYTES).decode(errors="replace")
                if content := rest.lstrip():
                    line += rest.count("\n", 0, len(rest) - len(content))
                    raise BrokenValueError(number, line, "content after the end of the list")
                return
            try:
                value, end = scan(text, at)
            except (json.JSONDecodeError, RecursionError) as error:
                more = file.read(max(CHUNK_BYTES, len(text) - at))
                if not more and at == len(text) and not is_list:
                    return
                if not more or len(text) - at > MOST_CHARACTERS or isinstance(error, RecursionError):
                    raise BrokenValueError(number, line, error) from error
                try:
                    text, at = text[at:] + utf8.decode(more), 0
                except UnicodeDecodeError as wrong:
                    raise BrokenValueError(number, line, wrong) from wrong
                continue
            yield JsonValue(number, line, value)
            line += text.count("\n", at, end)
            number, at = number + 1, end


def csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of these columns with the line's number; no cell may contain a line break.

    Raises:
        InputError: If a column is missing, or a line has fewer or more cells than the header.
    """
    header: list[str] | None = None
    places: list[int] = []
    for number, line in numbered_lines(path):
        try:
            text = line.decode("utf-8-sig").rstrip("\r\n")
            line_cells = [cell.strip() for cell in next(csv.reader([text]), [])]
        except (ValueError, csv.Error) as error:
            raise unreadable_row(path, number, error) from error
        if header is None:
            header = line_cells
            if missing := [name for name in columns if name not in header]:
                raise unreadable_row(path, number, f"no column {missing[0]!r}")
            places = [header.index(name) for name in columns]
        elif len(line_cells) != len(header):
            raise unreadable_row(path, number, f"{len(line_cells)} cells, but the header has {len(header)}")
        else:
            yield number, [line_cells[place] for place in places]


def token_count(path: Path, line: int, column: str, cell: str | float) -> int:
    """Return a number of tokens; ``472.0``, as data frames write it, is accepted, too.

    Raises:
        InputError: If the value is not a number of tokens.
    """
    try:
        number = float(cell)
    except (ValueError, OverflowError):
        number = -1.0
    if not number.is_integer() or not 0 <= number <= MOST_TOKENS:
        raise unreadable_row(path, line, f"{column} {cell!r} is not a number of tokens")
    return int(number)
