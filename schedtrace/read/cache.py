"""Large traces as Parquet files, kept in the user's cache for the next command.

A cache is the folder ``traces/<hash of the trace's path>.<random>/`` in the user's cache directory. It holds
tables and a note of what they were made from. A command uses a cache only if the trace's content is
unchanged, if the same version made the cache, and if none of the cache's files has changed. Files next to the
trace are never trusted as a cache, because someone else may have written them.
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import polars as pl

from schedtrace.model import safe_files
from schedtrace.model.trace import SCHEMA_VERSION, End, Header, Step
from schedtrace.read.lines import Content
from schedtrace.read.part_files import files_for
from schedtrace.read.problems import Problems
from schedtrace.read.tables import CannotWriteError, scan, schema_of, write_table
from schedtrace.version import __version__

FOLDER = "traces"
NOTE = "cache.json"
SMALL = (
    *("steps", "arrivals", "finishes", "present", "gaps", "there_after"),
    *("dummies", "syncs", "controls", "kv_sends", "cpu", "stalls"),
)
NOTED = ("header", "notices", "end", "problems", "in_order")
"""Fields of a ``trace.Parsed`` that are in the note; those in ``SMALL`` are tables, each in a file."""
LAYOUT = 11
"""Version of the cache's layout; raise it if files get other content although the trace's schema is the same.
"""
IN_USE_S = 600
"""Seconds for which another process may still read or build a cache that no longer matches the trace."""
KEPT_S = 30 * 24 * 3600
"""Seconds after which an unused cache is removed, because its trace may be gone."""
KEPT_BYTES = 2**30
"""Maximum size of all caches together; the most recently used ones stay."""
SAMPLES = 64
SAMPLE_BYTES = 4096
SETTLED_NS = 2 * 10**9
"""Age in nanoseconds up to which a file may change again without a new time stamp: file systems' clocks are
coarse."""
_TEMPORARY: list[tempfile.TemporaryDirectory[str]] = []
"""Folders that exist until the process ends, because lazy tables refer to their files."""

Fields = dict[str, Any]
"""Fields of a ``trace.Parsed``, by name."""


class Fingerprint(msgspec.Struct):
    """Hash of a file's content, and the operating system's record of the file's last change."""

    size: int
    digest: str
    """BLAKE2b hash of the whole content."""
    sampled: str
    """BLAKE2b hash of the file's first block, its last block and blocks in between."""
    stamp: list[int] | None
    """Times of the last change (``mtime`` and ``ctime``, which no program can set), inode and device; None if
    the file changed too recently."""


class CacheNote(msgspec.Struct):
    """Note in a cache: the files and the version that it was made from, and the data outside its tables."""

    made_by: str
    read: dict[str, Fingerprint]
    """Fingerprint of the trace's file, or of each of its parts, by name."""
    files: dict[str, str]
    """BLAKE2b hash of each Parquet file's content, by the file's name."""
    header: Header
    notices: list[str]
    end: End | None
    problems: Problems
    in_order: bool


def temporary_folder() -> Path:
    """Make a folder that exists until the process ends, or until ``remove_temporary``."""
    _TEMPORARY.append(tempfile.TemporaryDirectory(prefix="schedtrace-"))
    return Path(_TEMPORARY[-1].name)


def remove_temporary() -> None:
    """Remove this process's temporary folders, after which lazy tables that refer to them cannot be used."""
    while _TEMPORARY:
        _TEMPORARY.pop().cleanup()


def made_by() -> str:
    """Return a hash of the versions and the schema that a cache's tables depend on."""
    versions = (LAYOUT, SCHEMA_VERSION, __version__, pl.__version__, schema_of(Step))
    return hashlib.blake2b(repr(versions).encode(), digest_size=16).hexdigest()


def folders_of(path: Path) -> list[Path]:
    """Return the cache folders of this trace, including those under construction."""
    with suppress(OSError):
        return sorted(safe_files.own_cache_folder(FOLDER).glob(f"{_prefix(path)}*"))
    return []


def _prefix(path: Path) -> str:
    """Return the beginning of the names of a trace's caches."""
    real = os.fsencode(path.resolve())
    return f"{hashlib.blake2b(real, digest_size=16).hexdigest()}."


def load_cached(path: Path, last_us: int | None) -> tuple[Fields, dict[str, pl.LazyFrame]] | None:
    """Return the trace and its large tables from a complete, current cache; None if there is none."""
    for folder in folders_of(path):
        try:
            note = msgspec.json.decode((folder / NOTE).read_bytes(), type=CacheNote)
            files = files_for(path, last_us)
            if note.made_by != made_by() or [file.name for file in files] != list(note.read):
                continue
            now = {file.name: still(file, note.read[file.name]) for file in files}
            read = {name: fingerprint for name, fingerprint in now.items() if fingerprint is not None}
            if len(read) != len(files) or digests(folder) != note.files:
                continue
            with suppress(OSError):  # keeps others from removing it; if it fails, nor may they remove it
                os.utime(folder)
            fields: Fields = {name: pl.read_parquet(folder / f"{name}.parquet") for name in SMALL}
            fields |= {name: getattr(note, name) for name in NOTED}
            large = scan(folder, in_order=note.in_order)
            if read != note.read:
                note.read = read
                safe_files.replace(folder / NOTE, msgspec.json.encode(note))
        except (OSError, UnicodeDecodeError, msgspec.MsgspecError, pl.exceptions.PolarsError):
            continue  # whatever is wrong with it, the trace itself is there
        return fields, large
    return None


def save_cached(
    path: Path,
    folder: Path,
    fields: Fields,
    contents: dict[str, Content],
    stamps: dict[str, list[int] | None],
) -> None:
    """Complete a cache in the folder of a trace's large tables; the note is written last and makes it valid.

    Args:
        path: Path of the trace.
        folder: Folder made by ``building``.
        fields: The trace without its large tables.
        contents: Content of each file that was read, by name.
        stamps: Stamp of each file before it was read.

    Raises:
        CannotWriteError: If a table cannot be written.
        OSError: If the note cannot be written.
    """
    for name in SMALL:
        write_table(fields[name], folder / f"{name}.parquet")
    read = {}
    for name, content in contents.items():
        with path.with_name(name).open("rb") as file:
            blocks = sampled(file, content.size)
        # If the file has changed since it was read, it no longer has the stamp from before.
        read[name] = Fingerprint(content.size, content.digest, blocks, stamps.get(name))
    noted = {name: fields[name] for name in NOTED}
    note = CacheNote(made_by=made_by(), read=read, files=digests(folder), **noted)
    safe_files.replace(folder / NOTE, msgspec.json.encode(note))


@contextmanager
def building(path: Path) -> Iterator[Path]:
    """Make a new cache folder for this trace; remove it if building it fails.

    Raises:
        CannotWriteError: If the user's cache cannot be written to, or the disk is full.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(path), dir=safe_files.own_cache_folder(FOLDER)))
    except OSError as error:
        raise CannotWriteError(str(error)) from error
    try:
        yield folder
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise CannotWriteError(str(error)) from error
        raise


def remove_unused(path: Path, but: Path) -> None:
    """Remove caches that are outdated, old or over the limit, except ``but`` and those that may be in use."""
    used = []
    for folder in but.parent.iterdir():
        with suppress(OSError):
            size = sum(file.stat().st_size for file in folder.iterdir())
            used.append((time.time() - folder.stat().st_mtime, folder, size))
    left = sum(size for _, _, size in used)
    for age_s, folder, size in sorted(used, reverse=True):
        is_old = age_s > KEPT_S or left > KEPT_BYTES or folder.name.startswith(_prefix(path))
        if is_old and folder != but and age_s > IN_USE_S:
            shutil.rmtree(folder, ignore_errors=True)
            left -= size


def stamp_of(path: Path) -> list[int] | None:
    """Return the file's stamp; None if the file may change again without a new stamp."""
    stat = path.stat()
    if time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) < SETTLED_NS:
        return None
    return [stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def still(path: Path, fingerprint: Fingerprint) -> Fingerprint | None:
    """Return the fingerprint with the file's current stamp if its content is unchanged; otherwise None.

    A file with another stamp, such as a copy, is hashed as a whole.
    """
    stamp = stamp_of(path)
    if path.stat().st_size != fingerprint.size:
        return None
    with path.open("rb") as file:
        if sampled(file, fingerprint.size) != fingerprint.sampled:
            return None
    if stamp is not None and stamp == fingerprint.stamp:
        return fingerprint
    if digest_of(path) != fingerprint.digest:
        return None
    return msgspec.structs.replace(fingerprint, stamp=stamp)


def sampled(file: BinaryIO, size: int) -> str:
    """Return a hash of evenly spaced blocks of the first ``size`` bytes, from the first block to the last."""
    digest = hashlib.blake2b(digest_size=16)
    for at in range(SAMPLES):
        file.seek(max(0, size - SAMPLE_BYTES) * at // (SAMPLES - 1))
        digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each Parquet file's content, by the file's name."""
    return {file.name: digest_of(file) for file in sorted(folder.glob("*.parquet"))}


def digest_of(path: Path) -> str:
    """Return the BLAKE2b hash of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
