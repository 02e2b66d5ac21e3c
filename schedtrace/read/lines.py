"""The lines of a trace, told apart and checked; broken ones are dropped, and their numbers noted."""

import re
from pathlib import Path
from typing import Any, Union

import msgspec

from schedtrace.errors import InputError
from schedtrace.model.trace import SCHEMA_VERSION, Cpu, Delta, End, Events, Header, Notice, Output, Step
from schedtrace.read.known_settings import check_settings
from schedtrace.read.problems import Problems
from schedtrace.read.schema import readable

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no JSON of ours; the last for brackets nested without end."""
HUGE_NUMBER = re.compile(rb"[:\[,]\s*-?\d{19}")
"""Nothing that is counted or timed here has 19 digits; such a number would not fit Polars' integers."""
AS_READ = {line: readable(line) for line in (Header, Step, Delta, Output, Events, Cpu, Notice, End)}
"""Kind of line to the struct that it is read into."""
_decode = msgspec.json.Decoder(Union[tuple(AS_READ.values())]).decode  # noqa: UP007  # made at run time


def read_lines(lines: list[bytes], first: int, problems: Problems) -> dict[type[msgspec.Struct], list[Any]]:
    """Kind of line to the lines of that kind, in their order.

    Deltas stand among the steps. So does a None for every line that a delta cannot continue: a broken one,
    which may have been a step, and the header of another trace.

    Args:
        lines: Some lines of a trace, not its header.
        first: Number of the first one.
        problems: Gets the numbers of broken ones.
    """
    found: dict[type[msgspec.Struct], list[Any]] = {kind: [] for kind in AS_READ.values()}
    header = AS_READ[Header]
    steps = found[AS_READ[Delta]] = found[AS_READ[Step]]
    for number, line in enumerate(lines, start=first):
        if not line:
            continue
        try:
            read = _decode(line)
        except UNREADABLE:
            problems.garbled_lines.append(number)
            steps.append(None)
        else:
            found[type(read)].append(read)
            if type(read) is header:
                steps.append(None)
    return {kind: found[as_read] for kind, as_read in AS_READ.items()}


def decode_line(line: bytes) -> Any:
    """A line as read; None if it is broken."""
    try:
        return _decode(line)
    except UNREADABLE:
        return None


def read_header(path: Path, lines: list[bytes]) -> Header:
    """The first line.

    Raises:
        InputError: it is no header, broken, or of a newer schema.
    """
    try:
        raw = msgspec.json.decode(lines[0])
    except UNREADABLE:
        raw = None
    if not isinstance(raw, dict) or raw.get("type") != "header":
        msg = f"{path}:1: not a schedtrace trace, the first line is no header"
        raise InputError(msg)
    version = raw.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        msg = (
            f"{path}:1: schema version {version}, written by schedtrace {raw.get('schedtrace_version')}; "
            f"this one reads up to {SCHEMA_VERSION}: upgrade schedtrace"
        )
        raise InputError(msg)
    try:
        msgspec.json.decode(lines[0], type=AS_READ[Header])  # no number is too large
        header = msgspec.json.decode(lines[0], type=Header)
        check_settings(header.scheduler_config)
    except UNREADABLE as error:
        msg = f"{path}:1: broken header ({error})"
        raise InputError(msg) from error
    if HUGE_NUMBER.search(lines[0]):
        msg = f"{path}:1: broken header (a number in it is too large)"
        raise InputError(msg)
    return header
