"""Large traces by way of Parquet files, kept beside the trace for the next time.

Nothing in the cache is trusted blindly: it is used only if the trace still has the content that it was made
from, if the same version made it, and if every file of it is as it was written.
"""

import hashlib
import tempfile
from pathlib import Path

import msgspec
import polars as pl

from schedtrace import __version__
from schedtrace.errors import InputError
from schedtrace.model import private
from schedtrace.model.trace import SCHEMA_VERSION, End, Header, Step
from schedtrace.read.cache_folder import building, digests, folders_of, mark_used, remove_unused
from schedtrace.read.fingerprint import Fingerprint, sampled, stamp_of, still
from schedtrace.read.options import ReadOptions
from schedtrace.read.parse import Parsed, parse
from schedtrace.read.problems import Problems
from schedtrace.read.schema import schema_of
from schedtrace.read.tables import CannotWriteError, Tables, scan, write
from schedtrace.read.whole_lines import WholeLines

NOTE = "cache.json"
SMALL = ("steps", "arrivals", "finishes")
LAYOUT = 2
"""Raised when what stands in the files changes without a change of the trace's schema."""
_TEMPORARY: list[tempfile.TemporaryDirectory[str]] = []
"""Held until the process ends: what was read refers to the files in them."""

Read = tuple[Parsed, dict[str, pl.LazyFrame]]


class Note(msgspec.Struct):
    """What a cache was made from and by, and what is in it beside tables."""

    made_by: str
    fingerprint: Fingerprint
    files: dict[str, str]
    """Name of each Parquet file to the BLAKE2b of its content."""
    header: Header
    notices: list[str]
    end: End | None
    problems: Problems
    in_order: bool


def read_by_files(path: Path, options: ReadOptions) -> Read:
    """Read a trace whose tables do not fit memory.

    Raises:
        InputError: it cannot be read, is no trace, or there is no room for the files.
    """
    if options.cache:
        kept = _find(path)
        if kept is not None:
            return kept
        try:
            return _build(path, options)
        except CannotWriteError:  # a folder of somebody else's, a full disk: another one may do
            pass
    _TEMPORARY.append(tempfile.TemporaryDirectory(prefix="schedtrace-"))
    folder = Path(_TEMPORARY[-1].name)
    try:
        parsed = parse(WholeLines(path, options.chunk_bytes, options.progress), Tables(folder))
    except CannotWriteError as error:
        msg = f"{folder}: cannot be written to ({error}); {path} is too large for memory: set TMPDIR"
        raise InputError(msg) from error
    return parsed, scan(folder, in_order=parsed.in_order)


def made_by() -> str:
    """Changes whenever the same trace could give other tables."""
    what = (LAYOUT, SCHEMA_VERSION, __version__, pl.__version__, schema_of(Step))
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()


def _find(path: Path) -> Read | None:
    """What is kept of this trace, if it is whole and of the trace's content."""
    for folder in folders_of(path):
        try:
            note = msgspec.json.decode((folder / NOTE).read_bytes(), type=Note)
            fingerprint = still(path, note.fingerprint) if note.made_by == made_by() else None
            if fingerprint is None or digests(folder) != note.files:
                continue
            mark_used(folder)
            kept = _open(folder, note)
            if fingerprint is not note.fingerprint:
                note.fingerprint = fingerprint
                _write_note(folder, note)
        except (OSError, UnicodeDecodeError, msgspec.MsgspecError, pl.exceptions.PolarsError):
            continue  # whatever is wrong with it, the trace itself is there
        return kept
    return None


def _build(path: Path, options: ReadOptions) -> Read:
    """Read the trace into a new folder; a folder is a cache only when its note is written.

    Raises:
        CannotWriteError: not beside the trace.
    """
    stamp = stamp_of(path)
    with building(path) as folder:
        lines = WholeLines(path, options.chunk_bytes, options.progress)
        parsed = parse(lines, Tables(folder))
        for name in SMALL:
            write(getattr(parsed, name), folder / f"{name}.parquet")
        with path.open("rb") as file:
            block = sampled(file, lines.size)
        settled = stamp == stamp_of(path) and lines.size == path.stat().st_size
        note = Note(
            made_by=made_by(),
            fingerprint=Fingerprint(lines.size, lines.digest, block, stamp if settled else None),
            files=digests(folder),
            header=parsed.header,
            notices=parsed.notices,
            end=parsed.end,
            problems=parsed.problems,
            in_order=parsed.in_order,
        )
        _write_note(folder, note)
    remove_unused(path, but=folder)
    return parsed, scan(folder, in_order=parsed.in_order)


def _open(folder: Path, note: Note) -> Read:
    parsed = Parsed(
        header=note.header,
        **{name: pl.read_parquet(folder / f"{name}.parquet") for name in SMALL},
        notices=note.notices,
        end=note.end,
        problems=note.problems,
        in_order=note.in_order,
    )
    return parsed, scan(folder, in_order=note.in_order)


def _write_note(folder: Path, note: Note) -> None:
    private.replace(folder / NOTE, msgspec.json.encode(note))
