"""One ``engine-<rank>.jsonl`` as frames."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import polars as pl

from schedtrace.errors import InputError
from schedtrace.model.facts import ALL_FACTS, Fact
from schedtrace.model.trace import (
    AnyLine,
    Arrival,
    ChunkCap,
    End,
    Events,
    Exit,
    Finish,
    Header,
    Notice,
    Output,
    Preemption,
    ScheduledRequest,
)
from schedtrace.read.lines import read_header, read_steps, sort_lines
from schedtrace.read.problems import Problems
from schedtrace.read.schema import defaults_of, schema_of


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
    tells: frozenset[Fact] = ALL_FACTS
    """Other records than schedtrace's tell less."""

    def requests(self) -> pl.LazyFrame:
        """What every request got: one row per step and request, in the order of the steps."""
        return _nested(self.steps.lazy(), "requests", ScheduledRequest)

    def exits(self) -> pl.LazyFrame:
        """Every recorded exit: one row each, in the order in which they were taken."""
        return _nested(self.steps.lazy(), "exits", Exit)

    def caps(self) -> pl.LazyFrame:
        """Every limit that made a chunk smaller: one row each, in the order in which they were applied."""
        return _nested(self.steps.lazy(), "caps", ChunkCap)

    def preemptions(self) -> pl.LazyFrame:
        """Every preemption: one row each."""
        return _nested(self.steps.lazy(), "preempted", Preemption)


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
    header = read_header(path, lines)
    step_lines, others = sort_lines(lines, problems)
    steps = _merge_outputs(read_steps(step_lines, problems), others)
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
