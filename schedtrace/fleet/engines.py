"""Summaries of a fleet's engines, from the cache or made in other processes, one trace at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.errors import InputError, SchedtraceError, reason_of
from schedtrace.fleet.inputs import EngineSource, FleetInputs, StagedTrace, staged
from schedtrace.fleet.stores import SourceFile, chosen_parts, store_for
from schedtrace.fleet.summary import message_from, message_json, summarize_run
from schedtrace.fleet.summary_cache import SummaryCache, content_hash
from schedtrace.fleet.tenants import TenantKey
from schedtrace.fleet.workers import Lost, WorkerPool, call_outcomes
from schedtrace.model.fleet import EngineRead, EngineSummary, FleetManifest, LeftOut
from schedtrace.model.report import RunReport
from schedtrace.model.say import say
from schedtrace.read.cache import digest_of, remove_temporary
from schedtrace.read.lines import ReadOptions
from schedtrace.read.run import Run, read_run
from schedtrace.timeline.window import Window

VANISHED = "it vanished before it was read"
DIED = "the process that read it ended twice without a result (for lack of memory?)"


@dataclass(frozen=True)
class EngineTask:
    """Task for another process: a trace to summarize."""

    source: EngineSource
    window: Window | None
    digests: Mapping[str, str]
    """Hashes of the contents of unchanged files, by path."""
    cache_folder: Path | None
    tenant_key: TenantKey | None = None
    """Property by which to divide the summary among tenants; None for no division."""


@dataclass(frozen=True)
class EngineResult:
    """Summary of an engine, with data for the cache."""

    summary: EngineSummary
    digests: Mapping[str, str]
    """Hashes of the files that were read."""
    cached: bool


@dataclass
class FleetSummaries:
    """Summaries of a fleet by engine name, and a record of the inputs that were read."""

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
    """Return the summaries of all engines that can be read; no engine is counted twice.

    Args:
        inputs: Engines.
        pool_of: Function that starts processes for a number of engines; not called if all summaries are in
            the cache.
        window: Part of each recording to read; None for the whole recording.
        tenant_key: Property by which to divide the summaries among tenants; None for no division.
        cache: Cache of summaries.
        progress: Function that is called with the number of engines done and the total number.

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
    digests = {
        file.path: cache.known_digest(f"{folder}/{file.file_name}", file.stamp) for file in source.files
    }
    return {path: digest for path, digest in digests.items() if digest is not None}


def _remember(source: EngineSource, result: EngineResult, cache: SummaryCache) -> None:
    folder = source.address.rpartition("/")[0]
    for file in source.files:
        if file.path in result.digests:
            cache.note_digest(f"{folder}/{file.file_name}", file.stamp, result.digests[file.path])
    if not result.cached:
        cache.store_summary(result.summary)


def _from_cache(task: EngineTask, parts: tuple[SourceFile, ...], cache: SummaryCache) -> EngineSummary | None:
    """Return the cached summary if all files are known to be unchanged; otherwise None."""
    files = (*parts, *task.source.beside)
    if not all(file.path in task.digests for file in files):
        return None
    digests = [(file.file_name, task.digests[file.path]) for file in files]
    return cache.cached_summary(content_hash(digests, task.window, task.source.engines, task.tenant_key))


def read_engine(task: EngineTask) -> EngineResult:
    """Summarize one engine; other processes call this.

    Raises:
        InputError: If its trace cannot be read.
        UsageError: If the window contains no step, or the record has no times.
    """
    source, window, cache = task.source, task.window, SummaryCache(task.cache_folder)
    try:
        parts = tuple(chosen_parts(store_for(source.address), source.parts, window))
        if (summary := _from_cache(task, parts, cache)) is not None:
            return EngineResult(summary, {}, cached=True)
        with staged(source, parts) as trace:
            if not {file.name for file in trace.files} & {part.file_name for part in source.parts}:
                msg = f"{source.address}: {VANISHED}"
                raise InputError(msg)
            digests = [(path.name, digest_of(path)) for path in trace.files]
            paths = {file.file_name: file.path for file in source.files}
            by_path = {paths[name]: digest for name, digest in digests}
            content = content_hash(digests, window, source.engines, task.tenant_key)
            if (summary := cache.cached_summary(content)) is not None:  # of a copy of this trace
                return EngineResult(summary, by_path, cached=True)
            summary = summarize_run(_run(trace, source, window), window, content, task.tenant_key)
        folders = (str(trace.path.parent), source.address.rpartition("/")[0])
        summary.problems = [problem.replace(*folders) for problem in summary.problems]
        summary.problems += [
            message_json(say("{file:code}: {why}.", file=name, why=VANISHED)) for name in trace.vanished
        ]
        return EngineResult(summary, by_path, cached=False)
    except OSError as error:
        msg = f"{source.address}: cannot be read ({error.strerror or error})"
        raise InputError(msg) from error
    finally:
        remove_temporary()


def _run(trace: StagedTrace, source: EngineSource, window: Window | None) -> Run:
    last_us = None if window is None or window.end_us is not None else window.last_us
    run = read_run(trace.path, ReadOptions(cache=False, last_us=last_us))
    run.engines = source.engines
    return run


def engine_report(source: EngineSource, window: Window | None) -> RunReport:
    """Return an engine's own report, as ``analyze`` would make it.

    Raises:
        InputError: If its trace cannot be read.
        UsageError: If the window contains no step, or the record has no times.
    """
    parts = chosen_parts(store_for(source.address), source.parts, window)
    with staged(source, parts) as trace:
        report = analyze_run(_run(trace, source, window), window)
    report.path = source.address
    return report


def _gathered(
    inputs: FleetInputs, results: Mapping[str, EngineResult | BaseException], redone: int
) -> FleetSummaries:
    """Sort results into summaries and inputs that are left out: failures, and copies of an engine."""
    fleet = FleetSummaries()
    fleet.read.left_out, fleet.read.redone = list(inputs.left_out), redone
    seen: dict[object, str] = {}
    for source in inputs.engines:
        result = results[source.name]
        if not isinstance(result, EngineResult):
            fleet.read.left_out.append(LeftOut(path=source.address, why=_why(source, result)))
            continue
        summary = result.summary
        # Copies of a recording have the same identity.
        identity: object = (
            (summary.host, summary.pid, summary.engine_rank, summary.clock_id, summary.begin_unix_us)
            if summary.clock != "virtual" and summary.pid is not None
            else summary.content
        )
        if identity in seen:
            why = f"the same recording as {seen[identity]}, which is counted"
            fleet.read.left_out.append(LeftOut(path=source.address, why=why))
            continue
        seen[identity] = source.name
        fleet.by_name[source.name] = summary
        fleet.read.engines.append(
            EngineRead(
                engine=source.name,
                path=source.address,
                files=len(source.files),
                size_bytes=sum(file.size for file in source.files),
                cached=result.cached,
                problems=[message_from(problem) for problem in summary.problems],
            )
        )
    if not fleet.by_name:
        first = fleet.read.left_out[0]
        msg = f"{first.path}: {first.why}"
        raise InputError(msg, *(f"{entry.path}: {entry.why}" for entry in fleet.read.left_out[1:]))
    return fleet


def _why(source: EngineSource, error: BaseException) -> str:
    if isinstance(error, Lost):
        return DIED
    if isinstance(error, SchedtraceError):
        return str(error).removeprefix(f"{source.address}: ")
    text = reason_of(error) if isinstance(error, Exception) else str(error)
    return f"cannot be analyzed ({type(error).__name__}: {text})"
