"""The lines of a trace, told apart and checked; broken ones are dropped, and their numbers noted."""

import re
from io import BytesIO
from pathlib import Path

import msgspec
import polars as pl

from schedtrace.errors import InputError
from schedtrace.model.trace import (
    SCHEMA_VERSION,
    AnyLine,
    Arrival,
    Exit,
    Finish,
    Header,
    Preemption,
    ScheduledRequest,
    Step,
)
from schedtrace.read.problems import Problems
from schedtrace.read.schema import defaults_of, required_of, schema_of

_STEP_START = b'{"type":"step",'
_HUGE_NUMBER = re.compile(rb"[:\[,]\s*-?\d{19}")
"""Nothing that is counted or timed here has 19 digits; such a number would not fit Polars' integers."""
_NESTED: dict[str, type[msgspec.Struct]] = {
    "requests": ScheduledRequest,
    "exits": Exit,
    "preempted": Preemption,
    "arrived": Arrival,
    "finished": Finish,
}


def sort_lines(lines: list[bytes], problems: Problems) -> tuple[list[tuple[int, bytes]], list[AnyLine]]:
    """Step lines, unread and with their numbers, and all other lines but the header, read."""
    step_lines: list[tuple[int, bytes]] = []
    others: list[AnyLine] = []
    for number, line in enumerate(lines[1:], start=2):
        if line.startswith(_STEP_START):
            step_lines.append((number, line))
            continue
        if not line:
            continue
        try:
            other = msgspec.json.decode(line, type=AnyLine)
        except (msgspec.DecodeError, UnicodeDecodeError):
            other = None
        if other is None or _HUGE_NUMBER.search(line):
            problems.garbled_lines.append(number)
            continue
        if isinstance(other, Step):  # written by somebody else, in another order or with spaces
            step_lines.append((number, line))
        else:
            others.append(other)
    return step_lines, others


def read_header(path: Path, lines: list[bytes]) -> Header:
    """The first line.

    Raises:
        InputError: it is no header, broken, or of a newer schema.
    """
    try:
        raw = msgspec.json.decode(lines[0])
    except (msgspec.DecodeError, UnicodeDecodeError):
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
        header = msgspec.json.decode(lines[0], type=Header)
    except msgspec.DecodeError as error:
        msg = f"{path}:1: broken header ({error})"
        raise InputError(msg) from error
    if _HUGE_NUMBER.search(lines[0]):
        msg = f"{path}:1: broken header (a number in it is too large)"
        raise InputError(msg)
    return header


def read_steps(numbered: list[tuple[int, bytes]], problems: Problems) -> pl.DataFrame:
    """All step lines at once; if that fails, line by line to find the broken ones."""
    steps = _parse([line for _, line in numbered])
    if steps is None:
        decode = msgspec.json.Decoder(Step).decode
        good: list[tuple[int, bytes]] = []
        for number, line in numbered:
            try:
                decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                problems.garbled_lines.append(number)
                continue
            if _HUGE_NUMBER.search(line):
                problems.garbled_lines.append(number)
            else:
                good.append((number, line))
        steps = _parse([line for _, line in good])
        if steps is None:  # msgspec takes some lines that Polars does not, such as integers over 64 bits
            steps = _parse([line for _, line in _parsable(good, problems)])
        assert steps is not None  # noqa: S101  # each of these lines was parsed before
    defaults = [pl.col(name).fill_null(value) for name, value in defaults_of(Step).items()]
    return steps.with_columns(*defaults).unique("step", keep="first", maintain_order=True).sort("step")


def _parsable(numbered: list[tuple[int, bytes]], problems: Problems) -> list[tuple[int, bytes]]:
    """The lines that Polars takes, found by halving."""
    if not numbered or _parse([line for _, line in numbered]) is not None:
        return numbered
    if len(numbered) == 1:
        problems.garbled_lines.append(numbered[0][0])
        return []
    half = len(numbered) // 2
    return _parsable(numbered[:half], problems) + _parsable(numbered[half:], problems)


def _parse(lines: list[bytes]) -> pl.DataFrame | None:
    schema = schema_of(Step)
    if not lines:
        return pl.DataFrame(schema=schema)
    try:
        steps = pl.read_ndjson(BytesIO(b"\n".join(lines)), schema=schema)
    except pl.exceptions.PolarsError:
        return None
    if steps.height != len(lines) or _incomplete(steps, Step):
        return None
    return steps


def _incomplete(rows: pl.DataFrame, struct: type[msgspec.Struct]) -> bool:
    """Whether a field without a default is missing, in the rows or in what is nested in them."""
    if any(rows[name].null_count() for name in required_of(struct)):
        return True
    return struct is Step and any(
        _incomplete(rows.filter(pl.col(name).list.len() > 0)[name].explode().struct.unnest(), entry)
        for name, entry in _NESTED.items()
    )
