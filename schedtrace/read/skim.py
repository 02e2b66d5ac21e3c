"""The part of a long trace before the window of a follower: who came and went, and nothing else."""

import os
from collections import deque
from typing import Any

import msgspec

from schedtrace.model.trace import Arrival, Finish, Preemption
from schedtrace.read.lines import UNREADABLE, decode_line
from schedtrace.read.lives import Lives
from schedtrace.read.schema import readable
from schedtrace.read.whole_lines import LONGEST_LINE

BLOCK = 2**23
FULL = b'{"type":"step"'
NOTICE = b'{"type":"notice"'
TELLING = (b'"arrived":[', b'"finished":[', b'"preempted":[', b'"added":[')
"""In lines of any kind; inside an id the quotes would be escaped."""


def _told() -> type[msgspec.Struct]:
    """What is decoded of a line: who came, went, was preempted or scheduled."""
    named: Any = msgspec.defstruct("Named", [("request_id", str)], gc=False)
    changes: Any = msgspec.defstruct("Changes", [("added", list[named], [])], gc=False)
    fields: list[Any] = [
        ("start_us", int, 0),
        ("requests", list[named], []),
        ("changes", changes | None, None),
    ]
    for name, kind in (("arrived", Arrival), ("finished", Finish), ("preempted", Preemption)):
        entry: Any = readable(kind)
        fields.append((name, list[entry], []))
    return msgspec.defstruct("Told", fields, kw_only=True, gc=False)


_decode = msgspec.json.Decoder(_told()).decode


def skim(file: int, at: int, size: int, keep_us: int, lives: Lives) -> tuple[int, list[str]]:
    """Where to begin to read a trace, with the lives up to there, and the notices before.

    That is the last full line that is ``keep_us`` before the last one, or the trace's begin.

    Args:
        file: Its descriptor.
        at: Where its second line begins.
        size: Up to where to read.
        keep_us: Microseconds.
        lives: Gets who came and went before that place.
    """
    full: deque[tuple[int, int]] = deque()
    told: deque[tuple[int, Any]] = deque()
    notices, begun, begin = [], b"", at
    while at + len(begun) < size and (
        block := os.pread(file, min(BLOCK, size - at - len(begun)), at + len(begun))
    ):
        *lines, begun = (begun + block).split(b"\n")
        if len(begun) > LONGEST_LINE:  # no line of a trace
            lines, begun = [*lines, begun], b""
        for line in lines:
            if line.startswith(NOTICE):
                notice = decode_line(line)
                notices += [(at, notice.message)] if hasattr(notice, "message") else []
            elif any(key in line for key in TELLING) or line.startswith(FULL):
                _take(line, at, full, told)
            at += len(line) + 1
        while len(full) > 1 and full[1][1] <= full[-1][1] - keep_us:
            full.popleft()
            begin = full[0][0]
        while told and told[0][0] < begin:
            one = told.popleft()[1]
            lives.step(one.start_us, one.arrived, one.finished, one.preempted)
            admitted = one.changes.added if one.changes else []
            lives.scheduled([row.request_id for row in (*one.requests, *admitted)])
    return begin, [text for place, text in notices if place < begin]


def _take(line: bytes, at: int, full: deque[tuple[int, int]], told: deque[tuple[int, Any]]) -> None:
    try:
        read: Any = _decode(line)
    except UNREADABLE:
        return
    if line.startswith(FULL):
        full.append((at, read.start_us))
    told.append((at, read))
