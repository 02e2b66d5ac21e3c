"""Where caches stand: ``.schedtrace-cache/<name of the trace>.<random>/`` beside the trace."""

import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from schedtrace.model import private
from schedtrace.read.fingerprint import digest_of
from schedtrace.read.tables import CannotWriteError

FOLDER = ".schedtrace-cache"
IN_USE_S = 600
"""For so long another process may still read, or build, a cache that is not the trace's any more."""


def folders_of(path: Path) -> list[Path]:
    """Folders of this trace, those that are being built among them."""
    return sorted((path.parent / FOLDER).glob(f"{glob.escape(path.name)}.*"))


def digests(folder: Path) -> dict[str, str]:
    """Name of every Parquet file to the digest of its content.

    Raises:
        OSError: one cannot be read.
    """
    return {file.name: digest_of(file) for file in sorted(folder.glob("*.parquet"))}


@contextmanager
def building(path: Path) -> Iterator[Path]:
    """A new folder for a cache of this trace; removed if building it fails.

    Raises:
        CannotWriteError: the trace's folder cannot be written to, or the disk is full.
    """
    home = path.parent / FOLDER
    try:
        private.make_folder(home)
        private.replace(home / ".gitignore", b"*\n")
        folder = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=home))
    except OSError as error:
        raise CannotWriteError(str(error)) from error
    try:
        yield folder
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise CannotWriteError(str(error)) from error
        raise


def mark_used(folder: Path) -> None:
    """Keep others from removing it for a while; where that is not allowed, they may not remove it either."""
    with suppress(OSError):
        os.utime(folder)


def remove_unused(path: Path, but: Path) -> None:
    """Remove the trace's other caches, unless somebody may still use them."""
    for other in folders_of(path):
        with suppress(OSError):
            if other != but and time.time() - other.stat().st_mtime > IN_USE_S:
                shutil.rmtree(other)
