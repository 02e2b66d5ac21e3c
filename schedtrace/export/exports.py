"""Files that ``schedtrace export`` writes; existing files are replaced only if the user asks for it."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import polars as pl
from polars import selectors as cs

from schedtrace.errors import InputError, MissingExtraError, UsageError
from schedtrace.export import ExportKind
from schedtrace.export.mooncake import mooncake_loads, write_mooncake
from schedtrace.model import safe_files
from schedtrace.model.manifest import plain_of
from schedtrace.model.printable import encodable, visible, visible_json
from schedtrace.model.trace_facts import ALL_FACTS, SHOWS_LIMITS, Fact
from schedtrace.read.chain import expanded_lines
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from schedtrace.timeline.frames import missing_steps
from schedtrace.timeline.timeline import make_timeline

_FORMULA = r"(^|[;,|])([=+@\-\uff1d\uff0b\uff20\uff0d])"
"""Pattern of the beginning of a formula in a spreadsheet, also after possible separators, and in full width.
"""
_SUSPECT = rf"[^\x20-\x5b\x5d-\x7e]|{_FORMULA}"


def safe_cells(table: pl.LazyFrame) -> pl.LazyFrame:
    """Return the table with its texts made safe for a CSV file; numbers stay unchanged."""
    texts = [name for name, dtype in table.collect_schema().items() if dtype == pl.String]
    return table.with_columns(
        pl.col(name).map_batches(_safe, return_dtype=pl.String, is_elementwise=True) for name in texts
    )


def safe_cell(text: str) -> str:
    """Return the text with invisible characters escaped, and an apostrophe before a possible formula."""
    return re.sub(_FORMULA, r"\1'\2", visible(text))


def _safe(cells: pl.Series) -> pl.Series:
    suspect = cells.filter(cells.str.contains(_SUSPECT)).unique()
    if suspect.is_empty():
        return cells
    return cells.replace(suspect, pl.Series([safe_cell(text) for text in suspect], dtype=pl.String))


NEEDS = {
    "requests": frozenset({Fact.REQUESTS}),
    "exits": frozenset({Fact.EXITS}),
    "caps": frozenset({Fact.EXITS}),
    "preemptions": frozenset({Fact.PREEMPTIONS}),
    "present": frozenset({Fact.LIVES}),
    "arrivals": frozenset({Fact.LIVES}),
    "finishes": frozenset({Fact.LIVES}),
    "request_states": SHOWS_LIMITS,
    "engine_states": frozenset({Fact.TIMES}),
}
"""Facts that a trace must contain, by the name of the table that needs them."""


def export_tables(run: Run) -> dict[str, pl.LazyFrame]:
    """Return the tables by name, including the warm-up (trial 0); ``engine_rank`` identifies the engine.

    Columns are those of the trace format. ``steps`` lacks its lists, which are separate tables. ``present``
    is left out if no request was present when a trace began, ``gaps`` if no step is missing, and any table
    whose facts the trace lacks (``NEEDS``), because an empty table would mean that nothing happened.
    ``request_states`` and ``engine_states`` divide the time (``timeline/``).
    """
    of_traces = [(trace.header.engine_rank, _tables(trace)) for trace in run.traces]
    first = of_traces[0][1]
    facts = ALL_FACTS.intersection(*(trace.facts for trace in run.traces))
    for name in [name for name, needs in NEEDS.items() if not needs <= facts]:
        del first[name]
    for name in ("present", "gaps"):
        if name in first and all(getattr(trace, name).is_empty() for trace in run.traces):
            del first[name]
    return {
        name: pl.concat(
            [
                frames[name].select(pl.lit(rank, dtype=pl.Int64).alias("engine_rank"), pl.all())
                for rank, frames in of_traces
            ],
            how="diagonal_relaxed",
        )
        for name in first
    }


def gap_sentences(run: Run) -> list[str]:
    """Return a sentence for each trace that lacks steps or requests between its beginning and its end."""
    sentences = []
    for trace in run.traces:
        if not trace.problems.is_incomplete:
            continue
        timeline = make_timeline(trace, whole=True)
        steps, arrived = missing_steps(timeline), trace.present.height - timeline.there_first.height
        arrived, left = arrived + trace.problems.missing_arrivals, timeline.tables.gone.height
        left += trace.problems.missing_finishes
        ends = {"the arrival": arrived, "the end": left}
        of_requests = " and ".join(f"{what} of at least {count:,}" for what, count in ends.items() if count)
        sentences.append(
            f"{trace.path}: incomplete: {steps:,} steps are missing"
            + (f", {of_requests} requests" if of_requests else "")
            + ", and all requests that came and went in these steps"
        )
    return sentences


def stream_table(table: pl.LazyFrame, kind: ExportKind, file: Path) -> int:
    """Write a table as Parquet or CSV, streamed because it may be large; return its number of rows."""
    safe_files.create(file)
    if kind is ExportKind.CSV:
        safe_cells(table).sink_csv(file)
    else:
        table.sink_parquet(file)
    return int(table.select(pl.len()).collect().item())


def _tables(trace: Trace) -> dict[str, pl.LazyFrame]:
    timeline = make_timeline(trace, whole=True)
    return {
        "steps": trace.steps.lazy().select(~cs.nested()),
        "requests": trace.requests(),
        "exits": trace.exits(),
        "caps": trace.caps(),
        "preemptions": trace.preemptions(),
        "present": trace.present.lazy(),
        "gaps": trace.gaps.lazy().drop("told_us"),
        "arrivals": trace.arrivals.lazy(),
        "finishes": trace.finishes.lazy(),
        "request_states": timeline.request_states.lazy().drop("engine_rank"),
        "engine_states": timeline.engine_states.lazy().drop("engine_rank"),
    }


def write_exports(run: Run, folder: Path, *, kind: ExportKind, force: bool = False) -> dict[Path, int]:
    """Write files into ``folder``: one per table, trace (JSONL) or trial (Mooncake), or one for a viewer.

    Args:
        run: Run to export.
        folder: Folder, created if needed.
        kind: Format of the files.
        force: Whether to replace existing files.

    Returns:
        Each file with its number of rows, lines or events.

    Raises:
        UsageError: If a file exists already, a foreign log has no trace to write or no times to show, or
            Polars cannot write to a folder of this name.
        InputError: If the folder cannot be written to, or a load is asked for and no requests are recorded.
    """
    if encodable(str(folder)) != str(folder):
        msg = f"{folder}: its name is not UTF-8, which Polars needs; --output names another folder"
        raise UsageError(msg)
    files = _files(run, folder, kind)
    there = [file for file in files if file.exists() or file.is_symlink()]
    if there and not force:
        msg = f"{there[0]} is there already; --force replaces it, --output names another folder"
        raise UsageError(msg)
    try:
        safe_files.make_folder(folder)
        return {file: write(file) for file, write in files.items()}
    except OSError as error:
        msg = f"{folder}: cannot be written to ({error.strerror or error})"
        raise InputError(msg) from error


def _files(run: Run, folder: Path, kind: ExportKind) -> dict[Path, Callable[[Path], int]]:
    """Return each file to write, with the function that writes it."""
    if kind is ExportKind.JSONL:
        files = {folder / plain_of(trace.path): partial(_expand, trace) for trace in run.traces}
        _require_traces(run, files)
        return dict(files)
    if kind is ExportKind.MOONCAKE:
        loads = mooncake_loads(run)
        return {folder / name: partial(write_mooncake, load) for name, load in loads.items()}
    if kind in {ExportKind.PERFETTO, ExportKind.CHROME}:
        for trace in run.traces:
            trace.require(Fact.TIMES, "a viewer")
    if kind is ExportKind.PERFETTO:
        try:
            from schedtrace.export.perfetto import write_perfetto  # noqa: PLC0415  # protobuf takes 0.1 s
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                what="--to perfetto", extra="perfetto", instead="--to chrome opens in the same viewer"
            ) from error

        return {folder / "trace.pftrace": partial(write_perfetto, run)}
    if kind is ExportKind.CHROME:
        from schedtrace.export.chrome import write_chrome  # noqa: PLC0415  # likewise: only what is asked for

        return {folder / "trace.json.gz": partial(write_chrome, run)}
    return {
        folder / f"{name}.{kind}": partial(stream_table, table, kind)
        for name, table in export_tables(run).items()
    }


def _require_traces(run: Run, files: Iterable[Path]) -> None:
    """Raise UsageError if a trace is a foreign log, or if a file would replace a trace."""
    foreign = [trace for trace in run.traces if trace.facts != ALL_FACTS]
    if foreign:
        msg = f"{foreign[0].path}: --to jsonl expands traces of schedtrace, and this is a {foreign[0].record}"
        raise UsageError(msg)
    sources = {trace.path.resolve() for trace in run.traces}
    if over := [file for file in files if file.resolve() in sources]:
        msg = f"{over[0]}: --output names the folder of the trace itself, which would be lost"
        raise UsageError(msg)


def _expand(trace: Trace, file: Path) -> int:
    """Expand a trace line by line, because a large trace in full does not fit into memory."""
    count = 0
    with safe_files.writable(file) as target:
        for line in expanded_lines(trace.path):
            target.write(visible_json(line) + b"\n")
            count += 1
    return count
