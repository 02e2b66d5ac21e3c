"""Summaries of the engines of a fleet: from the cache, or read in other processes, one trace at a time.

Summaries are kept as Parquet files, a row for each engine. Polars and DuckDB read these files as they are;
times, sketches, root causes and paces are lists of structs.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.errors import InputError, SchedtraceError, reason_of
from schedtrace.fleet.inputs import EngineSource, FleetInputs
from schedtrace.fleet.stores import (
    VANISHED,
    SourceFile,
    StagedTrace,
    chosen_parts,
    digests_of,
    staged,
    store_for,
)
from schedtrace.fleet.summary import message_from, message_json, summarize_run
from schedtrace.fleet.tenants import TenantKey
from schedtrace.fleet.workers import Lost, WorkerPool, call_outcomes
from schedtrace.model import safe_files
from schedtrace.model.fleet import SUMMARY_VERSION, EngineRead, EngineSummary, FleetManifest, LeftOut
from schedtrace.model.report import RunReport
from schedtrace.model.say import say
from schedtrace.read import cache
from schedtrace.read.cache import remove_temporary
from schedtrace.read.lines import ReadOptions
from schedtrace.read.run import Run, read_run
from schedtrace.timeline.timeline import Window

FOLDER = "fleet"
INDEX = "files.json"
KEPT_S = 30 * 24 * 3600
"""Seconds after which an unused summary is removed."""
MOST_SUMMARIES = 20_000
"""Summaries that stay; the most recently used ones."""


def _dtype(hint: Any) -> pl.DataType:
    """Return the type of a column for a field."""
    if isinstance(hint, msgspec.inspect.UnionType):
        hint = next(kind for kind in hint.types if not isinstance(kind, msgspec.inspect.NoneType))
    if isinstance(hint, msgspec.inspect.ListType):
        return pl.List(_dtype(hint.item_type))
    if isinstance(hint, msgspec.inspect.StructType):
        return pl.Struct({field.name: _dtype(field.type) for field in hint.fields})
    return _PLAIN[type(hint)]


_PLAIN: dict[type, pl.DataType] = {
    msgspec.inspect.StrType: pl.String(),
    msgspec.inspect.IntType: pl.Int64(),
    msgspec.inspect.FloatType: pl.Float64(),
    msgspec.inspect.BoolType: pl.Boolean(),
}


def summary_schema() -> dict[str, pl.DataType]:
    """Return the columns of a file of summaries."""
    struct = msgspec.inspect.type_info(EngineSummary)
    assert isinstance(struct, msgspec.inspect.StructType)  # noqa: S101  # of a struct
    return {field.name: _dtype(field.type) for field in struct.fields}


def summary_frame(summaries: Iterable[EngineSummary]) -> pl.DataFrame:
    """Return summaries as a table."""
    return pl.DataFrame([msgspec.to_builtins(summary) for summary in summaries], schema=summary_schema())


def summaries_in(frame: pl.DataFrame) -> list[EngineSummary]:
    """Return the summaries of a table."""
    return [msgspec.convert(row, EngineSummary) for row in frame.to_dicts()]


def write_summaries(path: Path, names: Sequence[str], summaries: Sequence[EngineSummary]) -> None:
    """Write the summaries of a fleet, with the name of each engine, as a Parquet file.

    Raises:
        InputError: If it cannot be written.
    """
    frame = summary_frame(summaries)
    frame.insert_column(0, pl.Series("engine", names, dtype=pl.String))
    try:
        safe_files.make_folder(path.parent)
        safe_files.replace(path, _parquet(frame))
    except OSError as error:
        msg = f"{path}: cannot be written ({error.strerror or error})"
        raise InputError(msg) from error


def _parquet(frame: pl.DataFrame) -> bytes:
    from io import BytesIO  # noqa: PLC0415  # only here

    buffer = BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()


def content_hash(
    digests: Sequence[tuple[str, str]], window: Window | None, engines: int, tenant_key: object = None
) -> str:
    """Return the key of a summary: it changes if the summary could.

    Args:
        digests: Name and content's hash of each file.
        window: Window of the recording.
        engines: Number of traces in the folder, which decides what the manifest's figures are about.
        tenant_key: Property by which the summary is divided among tenants.
    """
    parts = (SUMMARY_VERSION, cache.made_by(), list(digests), str(window or ""), engines, str(tenant_key))
    return hashlib.blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()


class SummaryCache:
    """Summaries by content in a folder, and an index of the hashes of unchanged files.

    A summary does not depend on where its trace lies: the folder may be shared by commands that read copies.

    Args:
        folder: Folder; None to keep nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._hashes: dict[str, tuple[str, str]] = {}
        """Stamp and content's hash of each file, by its address."""
        if folder is not None:
            with suppress(OSError, UnicodeDecodeError, msgspec.MsgspecError):
                content = (folder / INDEX).read_bytes()
                self._hashes = msgspec.json.decode(content, type=dict[str, tuple[str, str]])

    def known_digest(self, address: str, stamp: str) -> str | None:
        """Return the content's hash of a file that has not changed since it was read; otherwise None."""
        before = self._hashes.get(address)
        return before[1] if before is not None and stamp and before[0] == stamp else None

    def note_digest(self, address: str, stamp: str, digest: str) -> None:
        """Remember the content's hash of a file."""
        if stamp:
            self._hashes[address] = (stamp, digest)

    def load(self, content: str) -> EngineSummary | None:
        """Return a summary; None if it is not there, or cannot be read."""
        if self.folder is None:
            return None
        path = self.folder / f"{content}.parquet"
        try:
            [summary] = summaries_in(pl.read_parquet(path))
            os.utime(path)
        except (OSError, ValueError, msgspec.MsgspecError, pl.exceptions.PolarsError):
            return None
        return summary if summary.content == content and summary.summary_version == SUMMARY_VERSION else None

    def save(self, summary: EngineSummary) -> None:
        """Store a summary; a full disk or a read-only folder is not an error."""
        if self.folder is not None:
            with suppress(OSError):
                safe_files.replace(
                    self.folder / f"{summary.content}.parquet", _parquet(summary_frame([summary]))
                )

    def close(self) -> None:
        """Write the index, and remove summaries that are old or too many."""
        if self.folder is None:
            return
        with suppress(OSError):
            safe_files.replace(self.folder / INDEX, msgspec.json.encode(self._hashes))
            ages = []
            for path in self.folder.glob("*.parquet"):
                with suppress(OSError):
                    ages.append((time.time() - path.stat().st_mtime, path))
            for place, (age_s, path) in enumerate(sorted(ages)):
                if age_s > KEPT_S or place >= MOST_SUMMARIES:
                    path.unlink(missing_ok=True)


def summaries_folder(folder: Path | None) -> Path | None:
    """Return the folder for summaries: the one that a user named, or one in the user's cache.

    None where no folder can be made that this user alone may enter.

    Raises:
        InputError: If the named folder cannot be made.
    """
    if folder is None:
        with suppress(OSError):
            return safe_files.own_cache_folder(FOLDER)
        return None
    try:
        safe_files.make_folder(folder)
    except OSError as error:
        msg = f"{folder}: cannot be made ({error.strerror})"
        raise InputError(msg) from error
    return folder


DIED = "the process that read it ended twice without a result (for lack of memory?)"


@dataclass(frozen=True)
class EngineTask:
    """Trace to summarize, for another process."""

    source: EngineSource
    window: Window | None
    digests: Mapping[str, str]
    """Hashes of the contents of unchanged files, by path."""
    cache_folder: Path | None
    tenant_key: TenantKey | None = None
    """Property by which to divide the summary among tenants; None not to divide it."""


@dataclass(frozen=True)
class EngineResult:
    """Summary of an engine, and what the cache has to remember."""

    summary: EngineSummary
    digests: Mapping[str, str]
    """Hashes of the files that were read."""
    cached: bool


@dataclass
class FleetSummaries:
    """Summaries of a fleet by the names of its engines, and what was read."""

    by_name: dict[str, EngineSummary] = field(default_factory=dict)
    read: FleetManifest = field(default_factory=lambda: FleetManifest(engines=[], left_out=[]))


def read_fleet(
    inputs: FleetInputs,
    pool_of: Callable[[int], WorkerPool],
    *,
    window: Window | None = None,
    tenant_key: TenantKey | None = None,
    cache: SummaryCache | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> FleetSummaries:
    """Return the summaries of all engines that can be read; none is counted twice.

    Args:
        inputs: Engines.
        pool_of: Function that makes the processes for this many engines; not called if all are in the cache.
        window: Part of each recording; None for all.
        tenant_key: Property by which to divide the summaries among tenants; None not to divide them.
        cache: Cache of summaries.
        progress: Called with the engines done and their total number.

    Raises:
        InputError: If no engine can be read.
        MissingExtraError: If the processes need a package that is not installed.
    """
    cache = cache or SummaryCache(None)
    tasks = [
        EngineTask(source, window, _known_digests(source, cache), cache.folder, tenant_key)
        for source in inputs.engines
    ]
    results: dict[str, EngineResult | BaseException] = {}
    for task in tasks:
        if window is None and (summary := _from_cache(task, task.source.parts, cache)) is not None:
            results[task.source.name] = EngineResult(summary, task.digests, cached=True)
    progress(len(results), len(tasks))
    left, redone = [task for task in tasks if task.source.name not in results], 0
    if left:
        pool = pool_of(len(left))
        try:
            for done in call_outcomes(pool, read_engine, left):
                results[done.argument.source.name] = done.value
                redone += done.again
                progress(len(results), len(tasks))
                if isinstance(done.value, EngineResult):
                    _remember(done.argument.source, done.value, cache)
        finally:
            pool.close()
            cache.close()
    return _gathered(inputs, results, redone)


def _known_digests(source: EngineSource, cache: SummaryCache) -> dict[str, str]:
    folder = source.address.rpartition("/")[0]
    digests = {file.path: cache.known_digest(f"{folder}/{file.name}", file.stamp) for file in source.files}
    return {path: digest for path, digest in digests.items() if digest is not None}


def _remember(source: EngineSource, result: EngineResult, cache: SummaryCache) -> None:
    folder = source.address.rpartition("/")[0]
    for file in source.files:
        if file.path in result.digests:
            cache.note_digest(f"{folder}/{file.name}", file.stamp, result.digests[file.path])
    if not result.cached:
        cache.save(result.summary)


def _from_cache(task: EngineTask, parts: tuple[SourceFile, ...], cache: SummaryCache) -> EngineSummary | None:
    """Return the summary if all files are known to be unchanged; otherwise None."""
    files = (*parts, *task.source.beside)
    if not all(file.path in task.digests for file in files):
        return None
    digests = [(file.name, task.digests[file.path]) for file in files]
    return cache.load(content_hash(digests, task.window, task.source.engines, task.tenant_key))


def read_engine(task: EngineTask) -> EngineResult:
    """Summarize one engine; other processes call this.

    Raises:
        InputError: If its trace cannot be read.
        UsageError: If the window has no step, or the record no times.
    """
    source, cache = task.source, SummaryCache(task.cache_folder)
    store = store_for(source.address)
    try:
        parts = tuple(chosen_parts(store, source.parts, task.window))
        if (summary := _from_cache(task, parts, cache)) is not None:
            return EngineResult(summary, {}, cached=True)
        whole = len(parts) == len(source.parts)
        with staged(store, source.trace_name, parts, source.beside, whole=whole) as trace:
            return _read(task, trace, cache)
    except OSError as error:
        msg = f"{source.address}: cannot be read ({error.strerror or error})"
        raise InputError(msg) from error
    finally:
        remove_temporary()


def _read(task: EngineTask, trace: StagedTrace, cache: SummaryCache) -> EngineResult:
    """Summarize a trace that is readable here, unless the cache has a summary of equal content."""
    source, window = task.source, task.window
    if not any(file.name in {part.name for part in source.parts} for file in trace.files):
        msg = f"{source.address}: {VANISHED}"
        raise InputError(msg)
    digests = digests_of(trace.files)
    paths = {file.name: file.path for file in source.files}
    by_path = {paths[name]: digest for name, digest in digests}
    content = content_hash(digests, window, source.engines, task.tenant_key)
    if (summary := cache.load(content)) is not None:
        return EngineResult(summary, by_path, cached=True)
    summary = summarize_run(_run(trace, source, window), window, content, task.tenant_key)
    folder = (str(trace.path.parent), source.address.rpartition("/")[0])
    summary.problems = [problem.replace(*folder) for problem in summary.problems]
    summary.problems += [
        message_json(say("{file:code}: {why}.", file=name, why=VANISHED)) for name in trace.vanished
    ]
    return EngineResult(summary, by_path, cached=False)


def _run(trace: StagedTrace, source: EngineSource, window: Window | None) -> Run:
    last_us = None if window is None or window.end_us is not None else window.last_us
    run = read_run(trace.path, ReadOptions(cache=False, last_us=last_us))
    run.engines = source.engines
    return run


def engine_report(source: EngineSource, window: Window | None) -> RunReport:
    """Return an engine's own report, as ``analyze`` makes it of its trace.

    Raises:
        InputError: If its trace cannot be read.
        UsageError: If the window has no step, or the record no times.
    """
    store = store_for(source.address)
    parts = chosen_parts(store, source.parts, window)
    whole = len(parts) == len(source.parts)
    with staged(store, source.trace_name, parts, source.beside, whole=whole) as trace:
        report = analyze_run(_run(trace, source, window), window)
    report.path = source.address
    return report


def _gathered(
    inputs: FleetInputs, results: Mapping[str, EngineResult | BaseException], redone: int
) -> FleetSummaries:
    """Sort results into summaries and what is left out: failures, and copies of an engine."""
    fleet = FleetSummaries()
    fleet.read.left_out, fleet.read.redone = list(inputs.left_out), redone
    seen: dict[object, str] = {}
    for source in inputs.engines:
        result = results[source.name]
        if not isinstance(result, EngineResult):
            fleet.read.left_out.append(LeftOut(path=source.address, why=_why(source, result)))
            continue
        identity = _identity(result.summary)
        if identity in seen:
            why = f"the same recording as {seen[identity]}, which is counted"
            fleet.read.left_out.append(LeftOut(path=source.address, why=why))
            continue
        seen[identity] = source.name
        fleet.by_name[source.name] = result.summary
        fleet.read.engines.append(
            EngineRead(
                engine=source.name,
                path=source.address,
                files=len(source.files),
                size_bytes=source.size_bytes,
                cached=result.cached,
                problems=[message_from(problem) for problem in result.summary.problems],
            )
        )
    if not fleet.by_name:
        first = fleet.read.left_out[0]
        msg = f"{first.path}: {first.why}"
        raise InputError(msg, *(f"{entry.path}: {entry.why}" for entry in fleet.read.left_out[1:]))
    return fleet


def _identity(summary: EngineSummary) -> object:
    """Return what two copies of a recording have in common, and no two engines."""
    if summary.clock == "virtual" or summary.pid is None:
        return summary.content
    return summary.host, summary.pid, summary.engine_rank, summary.clock_id, summary.begin_unix_us


def _why(source: EngineSource, error: BaseException) -> str:
    if isinstance(error, Lost):
        return DIED
    if isinstance(error, SchedtraceError):
        return str(error).removeprefix(f"{source.address}: ")
    text = reason_of(error) if isinstance(error, Exception) else str(error)
    return f"cannot be analyzed ({type(error).__name__}: {text})"
