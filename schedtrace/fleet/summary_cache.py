"""Cache of engines' summaries in Parquet files, named after the content of the traces.

Each file has one row per engine; times, sketches, root causes and paces are lists of structs. Polars and
DuckDB can read these files. ``fleet --output`` writes a file of the same kind.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from schedtrace.errors import InputError
from schedtrace.model import safe_files
from schedtrace.model.fleet import SUMMARY_VERSION, EngineSummary
from schedtrace.read import cache
from schedtrace.timeline.window import Window

FOLDER = "fleet"
INDEX = "files.json"
KEPT_S = 30 * 24 * 3600
"""Seconds after which an unused summary is removed."""
MOST_SUMMARIES = 20_000
"""Maximum number of summaries; those that were used most recently stay."""


def _dtype(hint: Any) -> pl.DataType:
    """Return the type of a column for a field."""
    if isinstance(hint, msgspec.inspect.UnionType):
        hint = next(kind for kind in hint.types if not isinstance(kind, msgspec.inspect.NoneType))
    if isinstance(hint, msgspec.inspect.ListType):
        return pl.List(_dtype(hint.item_type))
    if isinstance(hint, msgspec.inspect.StructType):
        return pl.Struct({field.name: _dtype(field.type) for field in hint.fields})
    return _PLAIN[type(hint)]


_PLAIN: dict[type, pl.DataType] = {
    msgspec.inspect.StrType: pl.String(),
    msgspec.inspect.IntType: pl.Int64(),
    msgspec.inspect.FloatType: pl.Float64(),
    msgspec.inspect.BoolType: pl.Boolean(),
}


def summary_frame(summaries: Iterable[EngineSummary]) -> pl.DataFrame:
    """Return summaries as a table."""
    struct = msgspec.inspect.type_info(EngineSummary)
    assert isinstance(struct, msgspec.inspect.StructType)  # noqa: S101  # of a struct
    columns = {field.name: _dtype(field.type) for field in struct.fields}
    return pl.DataFrame([msgspec.to_builtins(summary) for summary in summaries], schema=columns)


def summaries_in(frame: pl.DataFrame) -> list[EngineSummary]:
    """Return the summaries of a table."""
    return [msgspec.convert(row, EngineSummary) for row in frame.to_dicts()]


def write_summaries(path: Path, names: Sequence[str], summaries: Sequence[EngineSummary]) -> None:
    """Write the summaries of a fleet, with the name of each engine, as a Parquet file.

    Raises:
        InputError: If the file cannot be written.
    """
    frame = summary_frame(summaries)
    frame.insert_column(0, pl.Series("engine", names, dtype=pl.String))
    try:
        safe_files.make_folder(path.parent)
        safe_files.replace(path, _parquet(frame))
    except OSError as error:
        msg = f"{path}: cannot be written ({error.strerror or error})"
        raise InputError(msg) from error


def _parquet(frame: pl.DataFrame) -> bytes:
    buffer = BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()


def content_hash(
    digests: Sequence[tuple[str, str]], window: Window | None, engines: int, tenant_key: object = None
) -> str:
    """Return the key of a summary, which changes if the summary could change.

    Args:
        digests: Name and hash of the content of each file.
        window: Window of the recording.
        engines: Number of traces in the folder, which determines what the manifest's figures refer to.
        tenant_key: Property by which the summary is divided among tenants.
    """
    parts = (SUMMARY_VERSION, cache.made_by(), list(digests), str(window or ""), engines, str(tenant_key))
    return hashlib.blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()


class SummaryCache:
    """Summaries by content in a folder, and an index of the hashes of unchanged files.

    A summary does not depend on the path of its trace, so commands that read copies of a trace can share the
    folder.

    Args:
        folder: Folder; None to keep nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._hashes: dict[str, tuple[str, str]] = {}
        """Stamp and hash of the content of each file, by the file's address."""
        if folder is not None:
            with suppress(OSError, UnicodeDecodeError, msgspec.MsgspecError):
                content = (folder / INDEX).read_bytes()
                self._hashes = msgspec.json.decode(content, type=dict[str, tuple[str, str]])

    def known_digest(self, address: str, stamp: str) -> str | None:
        """Return the hash of a file's content if the file has not changed since; otherwise None."""
        before = self._hashes.get(address)
        return before[1] if before is not None and stamp and before[0] == stamp else None

    def note_digest(self, address: str, stamp: str, digest: str) -> None:
        """Remember the hash of a file's content."""
        if stamp:
            self._hashes[address] = (stamp, digest)

    def cached_summary(self, content: str) -> EngineSummary | None:
        """Return a summary; None if it is missing or cannot be read."""
        if self.folder is None:
            return None
        path = self.folder / f"{content}.parquet"
        try:
            [summary] = summaries_in(pl.read_parquet(path))
            os.utime(path)
        except (OSError, ValueError, msgspec.MsgspecError, pl.exceptions.PolarsError):
            return None
        return summary if summary.content == content and summary.summary_version == SUMMARY_VERSION else None

    def store_summary(self, summary: EngineSummary) -> None:
        """Store a summary; ignore a full disk or a read-only folder."""
        if self.folder is not None:
            with suppress(OSError):
                safe_files.replace(
                    self.folder / f"{summary.content}.parquet", _parquet(summary_frame([summary]))
                )

    def close(self) -> None:
        """Write the index; remove old summaries, and those over the maximum number."""
        if self.folder is None:
            return
        with suppress(OSError):
            safe_files.replace(self.folder / INDEX, msgspec.json.encode(self._hashes))
            ages = []
            for path in self.folder.glob("*.parquet"):
                with suppress(OSError):
                    ages.append((time.time() - path.stat().st_mtime, path))
            for place, (age_s, path) in enumerate(sorted(ages)):
                if age_s > KEPT_S or place >= MOST_SUMMARIES:
                    path.unlink(missing_ok=True)


def summaries_folder(folder: Path | None) -> Path | None:
    """Return the folder for summaries: the one that a user named, or one in the user's cache.

    Return None if no folder that only this user may enter can be created.

    Raises:
        InputError: If the named folder cannot be created.
    """
    if folder is None:
        with suppress(OSError):
            return safe_files.own_cache_folder(FOLDER)
        return None
    try:
        safe_files.make_folder(folder)
    except OSError as error:
        msg = f"{folder}: cannot be made ({error.strerror})"
        raise InputError(msg) from error
    return folder
