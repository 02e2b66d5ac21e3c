"""Which parts of a trace are needed for its end: each says itself when it begins."""

from functools import partial
from pathlib import Path

import msgspec

from schedtrace.model.safe_files import opened
from schedtrace.model.trace_names import files_of
from schedtrace.read.zstd_frames import Frames

HEAD_LINES = 2
"""With which every part but the first begins: its header, and who was there."""
LONGEST_HEAD = 2**25
"""Bytes, decompressed: 100,000 requests that are there take 24 MB."""
BLOCK = 2**16
"""Compressed bytes that are read at once."""


class _Begin(msgspec.Struct):
    at_us: int


def files_for(path: Path, last_us: int | None) -> list[Path]:
    """The files of a trace that hold what happened so many microseconds before its end; None: all.

    The trace ends after its last part begins, so what is that long before this begin is enough. A part whose
    begin is unknown, such as one that is being begun, is read with those beside it.
    """
    files = files_of(path)
    if last_us is None or len(files) == 1:
        return files
    latest = None
    for at in reversed(range(len(files))):
        began = _began_us(files[at])
        if began is None:
            continue
        latest = began if latest is None else latest
        if began <= latest - last_us:
            return files[at:]
    return files


def _began_us(part: Path) -> int | None:
    """By the second line of its head; None of the first part, which has none, and of what cannot be read."""
    try:
        _, line = _head(part)
        return msgspec.json.decode(line, type=_Begin).at_us
    except (OSError, ValueError, RecursionError):
        return None


def _head(part: Path) -> list[bytes]:
    """The first two lines of a part, as far as they are whole."""
    blocks, size, newlines = [], 0, 0
    with opened(part) as file:
        for block in Frames().blocks(iter(partial(file.read, BLOCK), b""), 1):
            blocks.append(block)
            size += len(block)
            newlines += block.count(b"\n")
            if newlines >= HEAD_LINES or size >= LONGEST_HEAD:
                break
    return b"".join(blocks).split(b"\n")[:-1][:HEAD_LINES]
