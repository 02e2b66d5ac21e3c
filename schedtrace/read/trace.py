"""Trace of one engine: its lines are converted to frames chunk by chunk."""

import gc
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from schedtrace.errors import InputError, UsageError
from schedtrace.model.delta import Delta
from schedtrace.model.manifest import is_in_parts
from schedtrace.model.trace import Cpu, End, Events, Header, Notice, Output, Step
from schedtrace.model.trace_facts import ALL_FACTS, Control, DummyBatch, Fact, KvSend, RankSync
from schedtrace.read import cache
from schedtrace.read.chain import Chain
from schedtrace.read.lines import READ, ReadOptions, WholeLines, file_size, read_header, read_lines
from schedtrace.read.part_files import files_for
from schedtrace.read.problems import GAP_SCHEMA, TOLD, Problems, gaps_of, number_ranges
from schedtrace.read.tables import (
    EVENTS,
    FLAT,
    LISTS,
    STRETCHES,
    CannotWriteError,
    Tables,
    all_rows,
    cpu_times,
    empty_table,
    entries_of,
    event_rows,
    frame_of,
    present_in,
    scan,
    stalls_in,
    structs_of,
)

NO_EVENTS = {name: empty_table(name).drop("start_us") for name in EVENTS}
"""Tables of ``EVENTS`` without rows."""


class StepTables:
    """Collector of steps; it accepts each step number only once.

    Args:
        tables: Collector of the large tables.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.chain = Chain(lambda table: tables.put({STRETCHES: table}))
        self._frames: list[pl.DataFrame] = []
        self._events = {name: [rows] for name, rows in NO_EVENTS.items()}

    def add(self, lines: list[Any]) -> None:
        """Add the steps and deltas of a chunk; None stands for a line that may have been a step."""
        for line in lines:
            self.chain.take(line)
        columns = self.chain.pop_columns()
        self._tables.put({name: entries_of(columns, name) for name in LISTS})
        self._frames.append(frame_of(columns, FLAT))
        for name, frames in self._events.items():
            if any(columns[name]):
                frames.append(entries_of(columns, name).drop("start_us"))

    def end_tables(self, idle: list[Any]) -> tuple[pl.DataFrame, dict[str, pl.DataFrame]]:
        """End all stretches; return all steps without their lists, and the whole tables of ``EVENTS``.

        Args:
            idle: The ``events`` lines, whose entries belong to no step.
        """
        self.chain.running.cut()
        self._tables.write_rest()
        steps = pl.concat(self._frames)
        events = {name: pl.concat(frames) for name, frames in self._events.items()}
        if not self.chain.in_order:
            steps = steps.sort("step", maintain_order=True)
            events = {name: rows.sort("step", maintain_order=True) for name, rows in events.items()}
        return steps, {name: event_rows(name, rows, idle) for name, rows in events.items()}


BESIDE = {"dummies": "began_us", "syncs": "began_us", "controls": "at_us", "kv_sends": "at_us"}
"""Lists of events outside steps, with the field that contains their time and determines their order."""


def side_tables(events: dict[str, pl.DataFrame]) -> dict[str, Any]:
    """Return the tables of ``BESIDE``, without the number of the step that recorded each event."""
    rows = {name: events[name].drop("step", "trial") for name in BESIDE}
    return {name: rows[name] if rows[name].is_empty() else rows[name].sort(at) for name, at in BESIDE.items()}


@dataclass(kw_only=True)
class Parsed:
    """A trace file without its large tables. Frames have the columns of ``model.trace``'s structs."""

    header: Header
    steps: pl.DataFrame
    """Steps without their lists, which are separate tables."""
    arrivals: pl.DataFrame
    finishes: pl.DataFrame
    present: pl.DataFrame = field(default_factory=lambda: present_in(()))
    """Requests that were present when the trace began (``read/tables.py``)."""
    gaps: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=GAP_SCHEMA))
    """Periods in which nothing was recorded (``read/problems.py``)."""
    there_after: pl.DataFrame = field(default_factory=lambda: present_in(()))
    """Requests present at the end of gaps of the kind ``TOLD``, including those whose arrival is recorded."""
    dummies: pl.DataFrame = field(default_factory=lambda: structs_of((), DummyBatch))
    """Dummy batches of a rank in lock-step, in order; older traces list only some of those that they count.
    """
    syncs: pl.DataFrame = field(default_factory=lambda: structs_of((), RankSync))
    """All-reduces among ranks in lock-step, in order."""
    controls: pl.DataFrame = field(default_factory=lambda: structs_of((), Control))
    """Calls to the engine that are not requests, in order of time."""
    kv_sends: pl.DataFrame = field(default_factory=lambda: structs_of((), KvSend))
    """Blocks that finished requests keep until they are sent, in order of time."""
    cpu: pl.DataFrame = field(default_factory=lambda: cpu_times(()))
    """Processor times of threads over time (``read/tables.py``)."""
    stalls: pl.DataFrame = field(default_factory=lambda: stalls_in(()))
    """Periods without progress that the engine's watchdog reported (``read/tables.py``)."""
    notices: list[str]
    end: End | None
    problems: Problems
    in_order: bool = True
    """Whether the steps came in the order of their numbers."""


@dataclass(kw_only=True)
class Trace(Parsed):
    """An engine's trace."""

    path: Path
    large: dict[str, pl.LazyFrame]
    """Table ``stretches`` with the tokens that requests got, and a table for each list of a step. They may be
    on disk, so no code collects a whole table."""
    facts: frozenset[Fact] = ALL_FACTS
    """Facts that the record contains. A foreign log's reader states what its kind of log contains; facts that
    the recorder could not see are removed.
    """
    record: str = "trace of schedtrace"
    """Kind of record from which the trace was read."""

    def __post_init__(self) -> None:
        """Remove the facts that a scheduler with foreign parts does not show."""
        if not self.header.preemptions_recorded:
            self.facts -= {Fact.PREEMPTIONS}
            if self.steps["num_resumed"].sum():  # requests waited again, and nobody knows since when
                self.facts -= {Fact.LIVES}
        if self.steps.height and self.steps["kv_blocks_free_after"].is_null().all():
            self.facts -= {Fact.BLOCKS}

    def require(self, fact: Fact, what: str) -> None:
        """Raise UsageError if the record lacks a fact that the caller needs."""
        if fact not in self.facts:
            msg = f"{self.path} ({self.record}) does not record {fact}, which {what} needs"
            raise UsageError(msg)

    def stretches(self) -> pl.LazyFrame:
        """Return the tokens that every request got, as stretches of steps (``read/tables.py``)."""
        return self.large[STRETCHES]

    def requests(self) -> pl.LazyFrame:
        """Return the tokens that every request got: one row per step and request, in step order."""
        return all_rows(self.stretches(), self.steps)

    def exits(self) -> pl.LazyFrame:
        """Return all recorded exits, one row each, in the order in which they were taken."""
        return self.large["exits"]

    def caps(self) -> pl.LazyFrame:
        """Return all limits that reduced a chunk, one row each, in the order of their application."""
        return self.large["caps"]

    def preemptions(self) -> pl.LazyFrame:
        """Return all preemptions, one row each."""
        return self.large["preempted"]


EXPANDS = 8
"""Approximate ratio of a part's decompressed size to its file size."""


def read_trace(path: Path, options: ReadOptions = READ) -> Trace:
    """Read and check one trace, which is a single file or parts.

    A large trace is converted to Parquet files, which later commands use.

    Raises:
        InputError: If the file does not exist, is empty, is not a trace of schedtrace, or has a newer schema.
    """
    size = file_size(path)
    if is_in_parts(path):
        size = EXPANDS * sum(map(file_size, files_for(path, options.last_us)))
    if size > options.memory_bytes:
        fields, large = _read_by_files(path, options)
        return Trace(path=path, large=large, **fields)
    tables = Tables()
    parsed = parse(WholeLines(path, options), tables)
    return Trace(path=path, large=tables.scan(in_order=parsed.in_order), **vars(parsed))


def _read_by_files(path: Path, options: ReadOptions) -> tuple[cache.Fields, dict[str, pl.LazyFrame]]:
    """Read a trace whose tables do not fit into memory, by way of Parquet files.

    Raises:
        InputError: If the file cannot be read or is not a trace, or there is no room for the files.
    """
    if options.cache:
        if (cached := cache.load_cached(path, options.last_us)) is not None:
            return cached
        with suppress(CannotWriteError):  # no home, a full disk: a temporary folder may do
            stamps = {file.name: cache.stamp_of(file) for file in files_for(path, options.last_us)}
            lines = WholeLines(path, options)
            with cache.building(path) as folder:
                parsed = parse(lines, Tables(folder))
                cache.save_cached(path, folder, vars(parsed), lines.contents, stamps)
            cache.remove_unused(path, but=folder)
            return vars(parsed), scan(folder, in_order=parsed.in_order)
    folder = cache.temporary_folder()
    try:
        parsed = parse(WholeLines(path, options), Tables(folder))
    except CannotWriteError as error:
        msg = f"{folder}: cannot be written to ({error}); {path} is too large for memory: set TMPDIR"
        raise InputError(msg) from error
    return vars(parsed), scan(folder, in_order=parsed.in_order)


def parse(lines: WholeLines, tables: Tables) -> Parsed:
    """Read all lines; put the lists nested in the steps, such as ``requests``, into ``tables``.

    Garbage collection is suspended: lines have no cycles, and searching so many objects takes a while.

    Raises:
        InputError: If the file is empty, is not a trace of schedtrace, or has a newer schema.
        CannotWriteError: If ``tables`` cannot be written.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _parse(lines, tables)
    finally:
        if was_enabled:
            gc.enable()


def _parse(lines: WholeLines, tables: Tables) -> Parsed:
    header, problems, steps = None, Problems(), StepTables(tables)
    other_lines: dict[type[msgspec.Struct], list[Any]] = defaultdict(list)
    for number, chunk in lines:
        if header is None:
            if not any(line.strip() for line in chunk):
                continue
            header = read_header(lines.path, chunk if number == 1 else [b""])
            chunk[0] = b""
        read = read_lines(chunk, number, problems)
        steps.add(read.pop(Step))
        del read[Delta]
        for kind, found_lines in read.items():
            other_lines[kind] += found_lines
    if header is None:
        raise InputError(_nothing(lines))
    end = msgspec.convert(other_lines[End][-1], End, from_attributes=True) if other_lines[End] else None
    step_rows, events = steps.end_tables(other_lines[Events])
    step_rows = merge_outputs(step_rows, other_lines[Output])
    listed = present_in(other_lines[Events], keep="all")
    if not step_rows.is_empty() and not listed.is_empty():
        # Leave out the requests in a head after which no step follows.
        late = [at_us for first, at_us in lines.begun_anew if first > step_rows["step"][-1]]
        listed = listed.filter(~pl.col("at_us").is_in(late))
    is_begun = is_in_parts(lines.path) and not lines.left_out
    gaps = gaps_of(step_rows, lines.begun_anew, other_lines[Events], header.first_step if is_begun else None)
    there_after = listed
    if not listed.is_empty():
        told_us = gaps["told_us"].drop_nulls()
        there_after = listed.filter(pl.col("at_us").is_in(pl.lit(told_us).implode()))
    notices = [*header.notices, *about_the_recorder(other_lines[Notice])]
    # Headers that follow lost lines repeat the notices so far, and may add some.
    later = dict.fromkeys(notice for header_read in other_lines[Header] for notice in header_read.notices)
    parsed = Parsed(
        header=header,
        steps=step_rows,
        arrivals=events["arrived"],
        finishes=events["finished"],
        present=unseen_requests(listed, events["arrived"], step_rows),
        gaps=gaps,
        there_after=there_after,
        **side_tables(events),
        cpu=cpu_times(other_lines[Cpu]),
        stalls=stalls_in(other_lines[Notice]),
        notices=[*notices, *(notice for notice in later if notice not in notices)],
        end=end,
        problems=problems,
        in_order=steps.chain.in_order,
    )
    _note_problems(parsed, lines, steps.chain, other_lines[Events])
    return parsed


def _note_problems(parsed: Parsed, lines: WholeLines, chain: Chain, events: list[Any]) -> None:
    """Complete the problems of a trace once all its lines have been read.

    Args:
        parsed: The trace; its ``problems`` already list the broken lines.
        lines: Reader of the lines.
        chain: Reader of the step lines.
        events: All ``events`` lines.
    """
    problems, steps, first = parsed.problems, parsed.steps, parsed.header.first_step
    problems.truncated, problems.broken_frames = lines.cut_off, lines.broken_frames
    problems.dropped = lines.dropped
    problems.unclosed = parsed.end is None
    in_vain = sorted(set(chain.not_rebuilt).difference(steps["step"]))
    problems.not_rebuilt = number_ranges(in_vain)
    problems.refused = sorted(chain.refused)
    problems.doubtful = chain.doubtful
    expected = max(
        [
            *(steps["step"].tail(1) + 1),
            *(step + 1 for step in in_vain[-1:]),
            *(first_anew for first_anew, _ in lines.begun_anew),
            parsed.end.steps if parsed.end else 0,
        ]
    )
    problems.end_missing = steps.height > 0 and expected > steps["step"][-1] + 1
    problems.first_step = 0 if lines.left_out else first
    if problems.first_step and steps.height:
        problems.began_unix_us = parsed.header.wall_anchor_us + int(steps["start_us"][0])
    if not parsed.gaps.is_empty():
        lacks = (pl.col("first_step") <= pl.col("last_step")) | (pl.col("from_us") < pl.col("to_us"))
        missing = parsed.gaps.filter(lacks, kind=TOLD)
        problems.gaps = missing.select("first_step", "last_step", "from_us", "to_us").rows()
    refused = {step for step in problems.refused if first <= step < expected}
    refused = refused.difference(steps["step"], in_vain)
    problems.missing_steps = max(0, expected - first - steps.height - len(in_vain) - len(refused))
    dropped = sum(line.dropped_steps for line in events)
    problems.dropped_steps = max(0, min(dropped, problems.missing_steps))
    ids = pl.concat([parsed.present["request_id"], parsed.arrivals["request_id"]])
    finished = parsed.finishes["request_id"]
    if problems.missing_steps or problems.garbled_lines or in_vain:
        unknown = finished.filter(~finished.is_in(ids.implode())).n_unique()
        problems.missing_arrivals = max(unknown, sum(line.dropped_arrivals for line in events))
        problems.missing_finishes = sum(line.dropped_finishes for line in events)
    if problems.unclosed:
        problems.unfinished_requests = ids.filter(~ids.is_in(finished.implode())).n_unique()


def about_the_recorder(lines: list[Any]) -> list[str]:
    """Return the notices about failures of the recorder, without stalls, which are failures of the engine."""
    return [line.message for line in lines if line.stalled is None]


def unseen_requests(listed: pl.DataFrame, arrivals: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the requests that were present when the trace began, and those first seen after a gap."""
    present = listed.unique("request_id", keep="first", maintain_order=True)
    if steps.is_empty() or present.is_empty():
        return present
    has_arrived = pl.col("request_id").is_in(pl.lit(arrivals["request_id"]).implode())
    return present.filter(~has_arrived | (pl.col("at_us") <= steps["start_us"][0]))


def merge_outputs(steps: pl.DataFrame, late: list[Any]) -> pl.DataFrame:
    """Merge ``output`` lines into the steps that were written before them."""
    if not late:
        return steps
    outputs = structs_of(late, Output).unique("step", keep="first")
    return steps.update(outputs, on="step", how="left")


def _nothing(lines: WholeLines) -> str:
    """Return the reason why a file without a header is not a trace."""
    stopped = "the engine stopped before it recorded anything"
    if lines.dropped:
        return f"{lines.path}: no line of a trace in it; {lines.dropped[-1]}"
    if lines.cut_off:
        return f"{lines.path}:1: cut off in its first line; {stopped}"
    return f"{lines.path}: empty; {stopped}"
