"""One ``engine-<rank>.jsonl``: every line checked, what is broken dropped and counted."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import msgspec
import polars as pl

from schedtrace.errors import InputError
from schedtrace.model.trace import (
    SCHEMA_VERSION,
    AnyLine,
    Arrival,
    End,
    Events,
    Exit,
    Finish,
    Header,
    Notice,
    Output,
    Preemption,
    ScheduledRequest,
    Step,
)
from schedtrace.read.schema import defaults_of, required_of, schema_of

_STEP_START = b'{"type":"step",'
_NAMED_LINES = 5
_HUGE_NUMBER = re.compile(rb"[:\[,]\s*-?\d{19}")
"""Nothing that is counted or timed here has 19 digits; such a number would not fit Polars' integers."""
_NESTED: dict[str, type[msgspec.Struct]] = {
    "requests": ScheduledRequest,
    "exits": Exit,
    "preempted": Preemption,
    "arrived": Arrival,
    "finished": Finish,
}


@dataclass
class Problems:
    """What is wrong with a trace, for the person to know."""

    garbled_lines: list[int] = field(default_factory=list)
    """Line numbers (from 1) that are no trace lines; dropped."""
    truncated: bool = False
    """The last line was cut off; dropped."""
    unclosed: bool = False
    """There is no end line: the engine was killed, or still runs."""
    unfinished_requests: int = 0
    """Requests that had arrived and not ended when an unclosed trace ends."""
    missing_steps: int = 0
    """Steps that the numbering says there were, and that are not in the file."""

    def sentences(self, trace: Path) -> list[str]:
        """One sentence a problem."""
        said = []
        if self.truncated:
            said.append(f"{trace}: the last line is cut off and was dropped")
        if self.garbled_lines:
            count = len(self.garbled_lines)
            lines = ", ".join(str(number) for number in self.garbled_lines[:_NAMED_LINES])
            more = ", ..." if count > _NAMED_LINES else ""
            said.append(f"{trace}: {_lines(count)} not understood and dropped (line {lines}{more})")
        if self.missing_steps:
            steps = "1 step is" if self.missing_steps == 1 else f"{self.missing_steps:,} steps are"
            said.append(f"{trace}: {steps} missing")
        if self.unclosed:
            open_ones = (
                f"; {self.unfinished_requests} requests had not ended" if self.unfinished_requests else ""
            )
            said.append(
                f"{trace}: not closed, the engine was killed or still runs; up to one second before the end "
                f"may be missing{open_ones}"
            )
        return said


@dataclass
class Trace:
    """One engine's trace. Frames have the columns of ``model.trace``'s structs."""

    path: Path
    header: Header
    steps: pl.DataFrame
    arrivals: pl.DataFrame
    finishes: pl.DataFrame
    notices: list[str]
    end: End | None
    problems: Problems

    def requests(self) -> pl.LazyFrame:
        """What every request got: one row per step and request, in the order of the steps."""
        return _nested(self.steps.lazy(), "requests", ScheduledRequest)

    def exits(self) -> pl.LazyFrame:
        """Every recorded exit: one row each, in the order in which they were taken."""
        return _nested(self.steps.lazy(), "exits", Exit)

    def preemptions(self) -> pl.LazyFrame:
        """Every preemption: one row each."""
        return _nested(self.steps.lazy(), "preempted", Preemption)


def _lines(count: int) -> str:
    return "1 line was" if count == 1 else f"{count:,} lines were"


def read_trace(path: Path) -> Trace:
    """Read and check one trace.

    Raises:
        InputError: missing, empty, no schedtrace trace, or of a newer schema.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror})"
        raise InputError(msg) from error
    if not content.strip():
        msg = f"{path}: empty; the engine stopped before it recorded anything"
        raise InputError(msg)
    problems = Problems()
    *lines, rest = content.split(b"\n")
    problems.truncated = bool(rest)
    if not lines:
        msg = f"{path}:1: cut off in its first line; the engine stopped before it recorded anything"
        raise InputError(msg)
    header = _header(path, lines)
    step_lines, others = _sort_lines(lines, problems)
    steps = _merge_outputs(_read_steps(step_lines, problems), others)
    end = next((line for line in reversed(others) if isinstance(line, End)), None)
    problems.unclosed = end is None
    expected = max([*steps["step"].tail(1) + 1, end.steps if end else 0])
    problems.missing_steps = max(0, expected - steps.height)
    problems.garbled_lines.sort()
    events = [line for line in others if isinstance(line, Events)]
    arrivals = _events(
        steps, "arrived", Arrival, [(line.trial, row) for line in events for row in line.arrived]
    )
    finishes = _events(
        steps, "finished", Finish, [(line.trial, row) for line in events for row in line.finished]
    )
    if problems.unclosed:
        ended = finishes["request_id"].implode()
        problems.unfinished_requests = arrivals.filter(~pl.col("request_id").is_in(ended))[
            "request_id"
        ].n_unique()
    return Trace(
        path=path,
        header=header,
        steps=steps,
        arrivals=arrivals,
        finishes=finishes,
        notices=[*header.notices, *(line.message for line in others if isinstance(line, Notice))],
        end=end,
        problems=problems,
    )


def _sort_lines(lines: list[bytes], problems: Problems) -> tuple[list[tuple[int, bytes]], list[AnyLine]]:
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


def _header(path: Path, lines: list[bytes]) -> Header:
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


def _read_steps(numbered: list[tuple[int, bytes]], problems: Problems) -> pl.DataFrame:
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


def _merge_outputs(steps: pl.DataFrame, others: list[AnyLine]) -> pl.DataFrame:
    """Put what ``output`` lines tell into the steps that were written before."""
    late = [msgspec.to_builtins(line) for line in others if isinstance(line, Output)]
    if not late:
        return steps
    columns = ["step", "output_us", "update_us", "output_tokens"]
    outputs = pl.DataFrame(late, schema=dict.fromkeys(columns, pl.Int64)).unique("step", keep="first")
    return steps.update(outputs, on="step", how="left")


def _nested(steps: pl.LazyFrame, column: str, struct: type[msgspec.Struct]) -> pl.LazyFrame:
    """One row per entry of a list column, with the step it belongs to; defaults filled in."""
    rows = (
        steps.select("step", "trial", "start_us", pl.col(column).alias("entry"))
        .filter(pl.col("entry").list.len() > 0)
        .explode("entry")
        .unnest("entry")
    )
    return rows.with_columns(pl.col(name).fill_null(value) for name, value in defaults_of(struct).items())


def _events(
    steps: pl.DataFrame,
    column: str,
    struct: type[msgspec.Struct],
    idle: Sequence[tuple[int | None, msgspec.Struct]],
) -> pl.DataFrame:
    """Arrivals or finishes of the whole trace, those told with a step and those told between."""
    of_steps = _nested(steps.lazy(), column, struct).drop("start_us").collect()
    rows = [{"trial": trial, **msgspec.to_builtins(row)} for trial, row in idle]
    between = pl.DataFrame(rows, schema={"trial": pl.Int64, **schema_of(struct)}).with_columns(
        pl.col(name).fill_null(value) for name, value in defaults_of(struct).items()
    )
    return pl.concat([of_steps, between], how="diagonal")
