"""A reader of a kind of record that is weaker than a trace."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedtrace.read.file_sample import FileSample


@dataclass(frozen=True)
class RecordReader:
    """Reader of one kind of record; ``records.READERS`` lists them all."""

    name: str
    """Kind of record, as a noun phrase."""
    reads: str
    """What such a file looks like, for a person who has another one."""
    matches: Callable[[FileSample], bool]
    """Whether a block of a file has what only this kind has."""
    read: Callable[[Path], list[Any]]
    """The record's contents, of a type for which ``diagnose.records`` has rules."""
    samples: tuple[str, ...]
    """Samples in ``tests/data/files`` and ``tests/data/records``."""
    markers: tuple[bytes, ...] = ()
    """Byte strings, one of which is in each line that is read; empty: such a file begins with them."""
