"""What readers of workload files share: numbered lines, JSON and CSV by names, and what a row becomes."""

import csv
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
    """One usable or unusable row of a file."""

    line: int
    """Where it stands, from 1; of ShareGPT the number of the conversation."""
    prompt_tokens: int
    output_tokens: int
    at_us: float | None = None
    """Its time on the file's clock; None: the file has no times."""
    prefix: tuple[int, ...] = ()
    priority: int = 0
    data_parallel_rank: int | None = None


Reader = Callable[[Path, Counter[str]], Iterator[Row]]
"""Reads a file once, row by row; counts what ``open_workload`` has to say about it.

Raises:
    InputError: ``path:line: what``.
"""


CountTokens = Callable[[str], int]
"""A tokenizer's count of a text's tokens."""
CHARACTERS_A_TOKEN = 4
"""Of English text, about."""
ESTIMATED = "estimated"
"""Counted: rows whose texts no tokenizer measured."""


def estimated_tokens(text: str) -> int:
    """A text's length for want of a tokenizer."""
    return -(-len(text) // CHARACTERS_A_TOKEN)


def refused(path: Path, line: int, what: object) -> InputError:
    """The error for a row that cannot be read."""
    return InputError(f"{path}:{line}: {what}")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file for reading.

    Raises:
        InputError: it cannot be read.
    """
    with reading(path), path.open("rb") as file:
        yield file


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def json_lines(path: Path, kind: type[_Line]) -> Iterator[tuple[int, _Line]]:
    """Each line that is not blank as a struct of this kind, with its number from 1.

    Raises:
        InputError: a line is none.
    """
    decode = msgspec.json.Decoder(kind).decode
    for number, line in numbered_lines(path):
        try:
            read = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise refused(path, number, error) from error
        yield number, read


def cells(line: bytes) -> list[str]:
    """The cells of one line of CSV, without surrounding blanks.

    Raises:
        ValueError: not UTF-8, or no CSV.
    """
    try:
        return [cell.strip() for cell in next(csv.reader([line.decode("utf-8-sig").rstrip("\r\n")]), [])]
    except csv.Error as error:
        raise ValueError(error) from error


def csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """The cells of these columns with the line's number; no cell may contain a line break.

    Raises:
        InputError: a column is missing, or a line has fewer or more cells than the header.
    """
    header: list[str] | None = None
    places: list[int] = []
    for number, line in numbered_lines(path):
        try:
            found = cells(line)
        except ValueError as error:
            raise refused(path, number, error) from error
        if header is None:
            header = found
            if missing := [name for name in columns if name not in header]:
                raise refused(path, number, f"no column {missing[0]!r}")
            places = [header.index(name) for name in columns]
        elif len(found) != len(header):
            raise refused(path, number, f"{len(found)} cells, but the header has {len(header)}")
        else:
            yield number, [found[place] for place in places]


def tokens(path: Path, line: int, column: str, text: str) -> int:
    """A number of tokens; ``472.0``, as data frames write it, is one too.

    Raises:
        InputError: it is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number.is_integer() or number < 0:
        raise refused(path, line, f"{column} {text!r} is not a number of tokens")
    return int(number)
