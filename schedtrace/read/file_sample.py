"""Samples that show a file's kind, and the interface of readers for records other than traces.

A sample is a file's first block, or a later block with a marker, and can be read as text, JSON or CSV.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from schedtrace.model.printable import without_colours
from schedtrace.read.decompress import opened_text
from schedtrace.read.lines import reading
from schedtrace.read.text_stream import searched_blocks

HEAD = 2**20
"""Number of bytes at the beginning of a file from which its kind is recognized."""
MOST_ROWS = 20
"""Maximum number of JSON objects that are examined."""
_BINARY = 4096
"""Number of first bytes to search for a zero byte, which text does not contain."""
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
        """Text of the block, without terminal colours."""
        return without_colours(self.content.removeprefix(b"\xef\xbb\xbf").decode(errors="replace"))

    @cached_property
    def sample_lines(self) -> list[str]:
        """Lines of the block's text."""
        return self.text.split("\n")

    @cached_property
    def first_line(self) -> str:
        """The first line that is not blank."""
        return next((line.strip() for line in self.sample_lines if line.strip()), "")

    @property
    def is_json(self) -> bool:
        """Return whether the block begins like a JSON object or a list of objects."""
        return bool(re.match(r'\s*(?:\[\s*)?\{\s*["}]', self.text))

    @cached_property
    def first_cells(self) -> frozenset[str]:
        """Cells of the first line, read as CSV."""
        return frozenset(cell.strip().strip('"') for cell in self.first_line.split(","))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """First JSON objects, whether one per line, in a list or in one line; empty if the block is not JSON.

        If an object is longer than the block, only the fields within the block are present, and the last of
        them may be None.
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
        """Return whether the block begins like a JSON list."""
        return self.text.lstrip().startswith("[")

    @property
    def row(self) -> dict[str, Any]:
        """The first JSON object."""
        return self.rows[0] if self.rows else {}

    def has(self, *names: str) -> bool:
        """Return whether the first JSON object has all these fields."""
        return bool(names) and self.row.keys() >= set(names)


def _fields_so_far(text: str, at: int) -> dict[str, Any]:
    """Return the fields of an incomplete object up to the point where it is cut off or broken."""
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
    """Return a file's first block."""
    with reading(path), opened_text(path) as file:
        content = file.read(HEAD)
        return FileSample(content, whole=not file.read(1))


def later_samples(
    path: Path, markers: tuple[bytes, ...], searched: tuple[bytes, ...]
) -> Iterator[FileSample]:
    """Yield the later blocks that contain a marker; each begins and ends at a line break.

    Args:
        path: File that is searched.
        markers: Byte strings; each yielded block contains at least one of them.
        searched: All markers to search for: ``markers``, and those that a reader will need.
    """
    for place, (block, summary) in enumerate(searched_blocks(path, searched)):
        is_first_sample = place == 0 and len(block) <= HEAD
        if not is_first_sample and not summary.markers.isdisjoint(markers):
            yield FileSample(block)


@dataclass(frozen=True)
class RecordReader:
    """Reader of one kind of record that contains less than a trace; ``records.READERS`` lists all readers."""

    name: str
    """Kind of record, as a noun phrase."""
    reads: str
    """Description of such a file, shown to users whose file is of no known kind."""
    matches: Callable[[FileSample], bool]
    """Check whether a block of a file has features that only this kind has."""
    read: Callable[[Path], list[Any]]
    """Function that reads the record's contents, of a type for which ``diagnose.records`` has rules."""
    samples: tuple[str, ...]
    """Names of samples in ``tests/data/files`` and ``tests/data/records``."""
    markers: tuple[bytes, ...] = ()
    """Byte strings, one of which is in each line that the reader needs; empty if the file's first block
    identifies the kind."""
