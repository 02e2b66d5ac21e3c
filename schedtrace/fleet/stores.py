"""Storage of traces: local folders, and file systems of fsspec (``s3://``, ``gs://``, ``memory://``)."""

import glob
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from schedtrace.errors import InputError, MissingExtraError, reason_of
from schedtrace.model.fleet import LeftOut
from schedtrace.read.cache import stamp_of
from schedtrace.read.part_files import BLOCK, HEAD_LINES, began_us, head_of
from schedtrace.timeline.window import Window

LINKED = "a symbolic link to a folder, which is not followed"
VANISHED = "it vanished before it was read"
SEPARATOR = "://"
_STAMPS = (
    *("ETag", "etag", "md5Hash", "crc32c"),
    *("LastModified", "last_modified", "updated", "mtime", "created"),
)
"""Fields by which stores identify the version of a file."""


@dataclass(frozen=True)
class SourceFile:
    """File of an engine in a store's listing."""

    path: str
    """Path within the store."""
    size: int
    stamp: str
    """Text that changes with the content; empty if the store provides none."""

    @property
    def file_name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """Path without the last part."""
        return self.path.rpartition("/")[0]


@dataclass(frozen=True)
class StoreListing:
    """Files below a path that a user named."""

    root: str
    """Folder to which engines' names are relative."""
    files: list[SourceFile]
    left_out: list[LeftOut]
    of_files: bool
    """Whether the user named individual files; if so, other files in their folders are not listed."""


class TraceStore(Protocol):
    """Place that lists files and copies them to this machine."""

    def listing(self, pattern: str) -> StoreListing:
        """Return the files at a path, below a folder, or matching a glob."""

    def copy(self, file: SourceFile, target: Path, most_bytes: int | None = None) -> None:
        """Copy a file, or its beginning, to a local path.

        Raises:
            FileNotFoundError: If the file is gone.
            OSError: If the file cannot be read.
        """

    def location(self, path: str) -> str:
        """Return the path as a user would write it."""


class LocalStore:
    """Files of this machine."""

    def listing(self, pattern: str) -> StoreListing:
        """Return the files at a path, below a folder, or matching a glob."""
        path = Path(pattern)
        is_literal = path.exists() or path.is_symlink()
        names = [pattern] if is_literal else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207  # Path.glob takes no absolute pattern
        matches = [Path(name) for name in names]
        left_out: list[LeftOut] = []
        files: dict[str, SourceFile] = {}
        for file in (file for match in matches for file in _files_below(match, left_out)):
            with suppress(OSError):  # it has vanished
                stamp = stamp_of(file)
                stamp_text = "" if stamp is None else repr(stamp)
                files[str(file)] = SourceFile(str(file), file.stat().st_size, stamp_text)
        of_files = not all(match.is_dir() for match in matches)
        root = _fixed_part(pattern) if not is_literal else str(path.parent if of_files else path)
        return StoreListing(root, [*files.values()], left_out, of_files)

    def copy(self, file: SourceFile, target: Path, most_bytes: int | None = None) -> None:  # noqa: ARG002  # a link costs nothing
        """Link to the file instead of copying it."""
        path = Path(file.path)
        path.stat()
        target.symlink_to(path.absolute())

    def location(self, path: str) -> str:
        """Return the path as a user would write it."""
        return path


def _files_below(path: Path, left_out: list[LeftOut]) -> Iterator[Path]:
    """Yield a file, or all files below a folder; report folders that cannot be read."""
    if not path.is_dir():
        yield path
        return
    folders = [path]
    while folders:
        folder = folders.pop()
        try:
            children = sorted(folder.iterdir())
        except OSError as error:
            left_out.append(LeftOut(path=str(folder), why=f"cannot be read ({error.strerror})"))
            continue
        inner = [child for child in children if child.is_dir()]
        links = [child for child in inner if child.is_symlink()]
        left_out += [LeftOut(path=str(link), why=LINKED) for link in links]
        folders += [child for child in reversed(inner) if child not in links]
        yield from (child for child in children if child not in inner)


def _fixed_part(pattern: str) -> str:
    """Return the folders of a pattern before its first wildcard."""
    folders = []
    for part in pattern.split("/")[:-1]:
        if glob.has_magic(part):
            break
        folders.append(part)
    return "/".join(folders)


_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Extra for each protocol that has one of its own; the extra ``remote`` installs only fsspec."""


class RemoteStore:
    """Files of a file system of fsspec, with the credentials of the environment.

    Args:
        address: Address with a protocol, such as ``s3://bucket/traces``.

    Raises:
        MissingExtraError: If fsspec, or the package of S3 or Google Cloud Storage, is not installed.
        InputError: If the protocol is unknown, or its package is not installed.
    """

    def __init__(self, address: str) -> None:
        self.protocol = address.partition(SEPARATOR)[0]
        extra = _EXTRAS.get(self.protocol)
        try:
            import fsspec  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise MissingExtraError(what=address, extra=extra or "remote") from error
        try:
            self._files: Any = fsspec.filesystem(self.protocol)
        except (ImportError, ValueError) as error:
            if extra is not None and isinstance(error, ImportError):
                raise MissingExtraError(what=address, extra=extra) from error
            msg = f"{address}: {reason_of(error)}"
            raise InputError(msg) from error

    def listing(self, pattern: str) -> StoreListing:
        """Return the files at a path, below a folder, or matching a glob."""
        path = str(self._files._strip_protocol(pattern))  # noqa: SLF001  # as fsspec's own functions do
        try:
            self._files.invalidate_cache()
            matches = self._files.glob(path) if glob.has_magic(path) else [path]
            details: dict[str, Any] = {}
            for match in matches:
                details |= self._files.find(match, detail=True)
        except Exception as error:  # each file system has errors of its own
            msg = f"{pattern}: cannot be listed ({reason_of(error)})"
            raise InputError(msg) from error
        of_files = any(match in details for match in matches)
        root = _fixed_part(path) if glob.has_magic(path) else path.rpartition("/")[0] if of_files else path
        files = []
        for name, about in sorted(details.items()):
            if about.get("type") != "file":
                continue
            stamps = [f"{stamp}={about[stamp]}" for stamp in _STAMPS if about.get(stamp) is not None]
            if stamps:  # the size alone does not identify a version
                stamps.insert(0, f"size={about.get('size')}")
            files.append(SourceFile(name, int(about.get("size") or 0), " ".join(stamps)))
        return StoreListing(root, files, [], of_files)

    def copy(self, file: SourceFile, target: Path, most_bytes: int | None = None) -> None:
        """Download a file, or its beginning."""
        try:
            if most_bytes is not None:
                target.write_bytes(self._files.cat_file(file.path, start=0, end=min(most_bytes, file.size)))
            else:
                self._files.get_file(file.path, str(target))
        except OSError:
            raise
        except Exception as error:  # likewise
            raise OSError(0, reason_of(error), file.path) from error

    def location(self, path: str) -> str:
        """Return the path as a user would write it."""
        return str(self._files.unstrip_protocol(path))


def store_for(address: str) -> TraceStore:
    """Return the store of a path or an address."""
    return RemoteStore(address) if SEPARATOR in address else LocalStore()


def chosen_parts(
    store: TraceStore, parts: Sequence[SourceFile], window: Window | None
) -> Sequence[SourceFile]:
    """Return the parts that overlap a window, judged by the time at which each part begins."""
    if window is None or len(parts) == 1:
        return parts
    begins = []
    with tempfile.TemporaryDirectory(prefix="schedtrace-fleet-") as name:
        head = Path(name) / "head.jsonl.zst"
        for part in parts:
            lines = []
            with suppress(OSError):  # reading it will say what is wrong
                store.copy(part, head, BLOCK)
                lines = head_of(head, HEAD_LINES)
            head.unlink(missing_ok=True)
            begins.append(began_us(lines[1]) if len(lines) == HEAD_LINES else None)
    return [parts[place] for place in needed_parts(begins, window)]


def needed_parts(begins: Sequence[int | None], window: Window) -> list[int]:
    """Return the places of the parts that overlap a window.

    Args:
        begins: Beginning of each part in microseconds on the trace's clock; None if unknown.
        window: Window to cover; a window with a length but no end is counted back from the beginning of the
            last part.
    """
    begun = [us for us in begins if us is not None]
    end_us = window.end_us
    first_us = window.begin_us
    if window.last_us is not None and (end_us is not None or begun):
        first_us = (end_us if end_us is not None else begun[-1]) - window.last_us
    needed = []
    for place, (begin, following) in enumerate(pairwise([*begins, None])):
        ends_before = first_us is not None and following is not None and following <= first_us
        begins_after = end_us is not None and begin is not None and begin >= end_us
        if not ends_before and not begins_after:
            needed.append(place)
    return needed
