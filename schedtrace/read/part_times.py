"""Which parts of a trace are needed for its end: each says itself when it begins."""

from pathlib import Path

import msgspec

from schedtrace.model.safe_files import opened
from schedtrace.model.trace_names import files_of
from schedtrace.read.zstd_frames import Frames

HEAD = 2**22
"""Bytes in which the head of a part stands: 20,000 requests that are there take 1 MB."""


class _Told(msgspec.Struct):
    at_us: int


def files_for(path: Path, last_us: int | None) -> list[Path]:
    """The files of a trace that hold what happened so many microseconds before its end; None: all.

    The last part ends after it begins, so what is that long before its begin is enough.
    """
    files = files_of(path)
    if last_us is None or len(files) == 1:
        return files
    last_us = _began_us(files[-1]) - last_us
    first = next((at for at in reversed(range(len(files))) if _began_us(files[at]) <= last_us), 0)
    return files[first:]


def _began_us(part: Path) -> int:
    """By the second line of its head; 0 of the first part, which has none, and of what cannot be read."""
    try:
        with opened(part) as file:
            head = next(Frames().blocks([file.read(HEAD)], 1), b"")
        return msgspec.json.decode(head.split(b"\n")[1], type=_Told).at_us
    except (OSError, IndexError, msgspec.MsgspecError):
        return 0
