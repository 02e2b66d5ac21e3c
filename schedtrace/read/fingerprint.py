"""Whether a file still has the content that was read."""

import hashlib
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

SAMPLES = 64
SAMPLE_BYTES = 4096
SETTLED_NS = 2 * 10**9
"""A file changed as recently as this may change again without a new time: clocks of files are coarse."""


class Fingerprint(msgspec.Struct):
    """Of a file's content, and of what the operating system tells about it."""

    size: int
    digest: str
    """BLAKE2b of the whole content."""
    sampled: str
    """BLAKE2b of its begin, its end and blocks between."""
    stamp: list[int] | None
    """Times of the last change (no program can set ``ctime``), inode and device; None: not settled yet."""


def stamp_of(path: Path) -> list[int] | None:
    """The file's stamp, if nothing can change any more without changing it."""
    told = path.stat()
    if time.time_ns() - max(told.st_mtime_ns, told.st_ctime_ns) < SETTLED_NS:
        return None
    return [told.st_mtime_ns, told.st_ctime_ns, told.st_ino, told.st_dev]


def still(path: Path, known: Fingerprint) -> Fingerprint | None:
    """The fingerprint, with a new stamp where need be, if the file still has this content; else None.

    A file with another stamp, such as a copy, is read and hashed as a whole.

    Raises:
        OSError: it cannot be read.
    """
    stamp = stamp_of(path)
    if path.stat().st_size != known.size:
        return None
    with path.open("rb") as file:
        if sampled(file, known.size) != known.sampled:
            return None
    if stamp is not None and stamp == known.stamp:
        return known
    if digest_of(path) != known.digest:
        return None
    return msgspec.structs.replace(known, stamp=stamp)


def sampled(file: BinaryIO, size: int) -> str:
    """BLAKE2b of blocks at equal distances, the first and the last of ``size`` bytes among them."""
    hashed = hashlib.blake2b(digest_size=16)
    for at in range(SAMPLES):
        file.seek(max(0, size - SAMPLE_BYTES) * at // (SAMPLES - 1))
        hashed.update(file.read(SAMPLE_BYTES))
    return hashed.hexdigest()


def digest_of(path: Path) -> str:
    """BLAKE2b of a whole file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
