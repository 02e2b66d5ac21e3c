"""Documents about records: their content, the statements that it supports, and what it does not show.

A benchmark's result is described alone, or compared with the engine's trace.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from schedtrace.diagnose.records.metrics import engine_metrics, is_window, metrics_statements
from schedtrace.diagnose.records.server_log import (
    SIMILAR,
    console_snapshots,
    console_statements,
    failure_statements,
    intervals_s,
)
from schedtrace.errors import InputError
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.records import ClientLatency, ServerStart, Statement, WeakRecord
from schedtrace.model.report import RunReport, TrialReport
from schedtrace.model.say import say
from schedtrace.read import iteration_log
from schedtrace.read.file_sample import RecordReader
from schedtrace.read.records.benchmark_result import BenchmarkResult
from schedtrace.read.records.metrics import NAME as METRICS
from schedtrace.read.records.metrics import READER as METRICS_READER
from schedtrace.read.records.metrics import MetricsDump, fetched_metrics
from schedtrace.read.records.vllm_log import NAME as LOG
from schedtrace.read.records.vllm_log import ServerLog, read_vllm_log
from schedtrace.read.run import Run

OUTSIDE_FRAC = 0.1
"""Minimum share of a client's median latency that must be spent outside the engine to be reported as such."""
_NAMES = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end-to-end latency"}


def described_benchmark(path: str, result: BenchmarkResult) -> WeakRecord:
    """Return the document about the measurements of a benchmark's client."""
    return WeakRecord(
        path=path,
        kind=f"a result of {result.program}",
        requests=result.requests,
        latencies=result.latencies,
        cannot_tell=say(
            "This result contains latencies[ of {requests:n request}] but no steps: it does not show what "
            "caused them.",
            requests=result.requests,
        ),
        commands=["schedtrace attach --for 60s", f"schedtrace analyze RUN {path}"],
        notices=[say("{notice}", notice=notice) for notice in result.notices],
    )


def compare_with_trace(
    record: WeakRecord, runs: Sequence[RunReport], same_file: Sequence[WeakRecord] = ()
) -> None:
    """Add the engine's latencies to the client's, if exactly one trial finished the same number of requests.

    Equal numbers do not prove that the requests are the same; a statement is therefore likely at best.

    Args:
        record: Result of a benchmark; other records stay as they are.
        runs: Reports on the traces.
        same_file: Results in the same file. If two results have equal numbers of requests, neither is
            compared.
    """
    if not record.latencies or record.requests is None:
        return
    alike = sum(result.requests == record.requests for result in same_file)
    if alike > 1:
        record.notices.append(
            say(
                "not compared with a trace: {alike:n benchmark} of this file have {requests:n finished "
                "request}",
                alike=alike,
                requests=record.requests,
            )
        )
        return
    trials = [trial for run in runs for trial in run.trials if trial.requests_finished == record.requests]
    if len(trials) != 1:
        record.notices.append(
            say(
                "not compared with a trace: {trials} with {requests:n finished request}",
                trials=say("{trials:n trial}", trials=len(trials)) if trials else "none has a trial",
                requests=record.requests,
            )
        )
        return
    record.statements += filter(None, (_beside(latency, trials[0]) for latency in record.latencies))
    record.commands = []
    record.cannot_tell = NOTHING


def _beside(latency: ClientLatency, trial: TrialReport) -> Statement | None:
    engine = {"ttft": trial.ttft_ms, "tpot": trial.tpot_ms, "e2e": trial.e2e_ms}[latency.metric]
    if engine is None or latency.p50_ms is None:
        return None
    latency.engine_p50_ms, latency.engine_p99_ms = engine.p50, engine.p99
    outside = latency.p50_ms - engine.p50
    share = outside / latency.p50_ms if latency.p50_ms else 0.0
    if share < -OUTSIDE_FRAC:
        code, words = "other-requests", "; the trace probably contains other requests"
    elif share < OUTSIDE_FRAC:
        code, words = "latency-of-engine", ": nearly all of it is spent in the engine"
    else:
        code = "latency-outside-engine"
        words = (
            ": {outside:ms} ({share:%}) are spent outside, in the front end's response path, the network or "
            "the client"
        )
    values = {"outside": outside, "share": share} if code == "latency-outside-engine" else {}
    text = say(
        "The client's median {name} is {client:ms}, the engine's {engine:ms}" + words + ".",
        name=_NAMES[latency.metric],
        client=latency.p50_ms,
        engine=engine.p50,
        **values,
    )
    return Statement(code=code, certainty="likely", text=text)


ATTACH = "schedtrace attach --for 60s"
RESTART = "SCHEDTRACE_DIR=logs vllm serve ..."
KEEP = "SCHEDTRACE_KEEP=120s SCHEDTRACE_DIR=logs vllm serve ..."
_CANNOT = (
    "which request waited for what or for how long, which requests held it, or what another setting would "
    "improve"
)
_FIRST = ("start-failed", "engine-failed", "dumped-step")
"""Codes of the statements that come first."""


def analyzed_records(
    readers: Mapping[Path, RecordReader], names: Mapping[Path, str], url: str | None
) -> list[WeakRecord]:
    """Read records and return the statements that each supports; two dumps of one server form a window.

    Args:
        readers: Reader for each file.
        names: Names that the documents use for files, where these differ from the path.
        url: Address of a server whose metrics are also read.

    Raises:
        UsageError: If ``url`` is not the address of a server.
        InputError: If a file cannot be read, or a server does not answer.
    """
    contents = {path: reader.read(path) for path, reader in readers.items()}
    dumps = [path for path, reader in readers.items() if reader is METRICS_READER]
    records = []
    joined = [dump for path in dumps for dump in contents[path]]
    if len(dumps) == 2 and is_window(joined):  # noqa: PLR2004  # before and after
        both = " and ".join(names.get(path, str(path)) for path in dumps)
        records.append(described_metrics(both, joined))
        contents = {path: content for path, content in contents.items() if path not in dumps}
    for path, content in contents.items():
        records += described(names.get(path, str(path)), content)
    if url is not None:
        records.append(described_metrics(url, fetched_metrics(url)))
    return records


def periodic_lines(runs: Sequence[Run], names: Mapping[Path, str]) -> list[WeakRecord]:
    """Return the statements that periodic lines in iteration logs support; only these show queue lengths.

    Args:
        runs: Runs, of which only iteration logs are examined.
        names: As for ``analyzed_records``.
    """
    records = []
    for run in runs:
        if run.traces[0].record == iteration_log.RECORD:
            with suppress(InputError):  # no such lines
                logs = [log for log in read_vllm_log(run.path) if log.engines]
                records += described(names.get(run.path, str(run.path)), logs)
    return records


def described(path: str, contents: Sequence[ServerLog | MetricsDump | BenchmarkResult]) -> list[WeakRecord]:
    """Return the statements that a file supports; all dumps of metrics in it form one record."""
    dumps = [content for content in contents if isinstance(content, MetricsDump)]
    records = [described_log(path, content) for content in contents if isinstance(content, ServerLog)]
    records += [
        described_benchmark(path, content) for content in contents if isinstance(content, BenchmarkResult)
    ]
    return records + ([described_metrics(path, dumps)] if dumps else [])


def described_log(path: str, log: ServerLog) -> WeakRecord:
    """Return the statements that the log of one server supports."""
    statements = [*failure_statements(log), *console_statements(log)]
    engines = [console_snapshots(engine) for engine in log.engines]
    return WeakRecord(
        path=path,
        kind=LOG,
        source=log.source,
        server=log.start if log.start != ServerStart() else None,
        engines=engines,
        step=log.step,
        failure=log.failure,
        statements=_in_order(statements),
        cannot_tell=_cannot_tell(log),
        commands=[ATTACH, RESTART]
        if log.failure is None
        else [RESTART if log.failure.stage == "start" else KEEP],  # it should next keep its last minutes
        notices=[say("{notice}", notice=notice) for notice in log.notices],
    )


def _cannot_tell(log: ServerLog) -> Message:
    if log.engines:
        apart = None  # unknown
        if steps := [step for engine in log.engines for step in intervals_s(list(engine.snapshots))]:
            usual, longest = min(steps), max(steps)
            is_regular = longest <= SIMILAR * usual
            apart = say("{usual:s}[ to {longest:s}]", usual=usual, longest=None if is_regular else longest)
        return say(
            "Periodic lines are snapshots[, {apart} apart]: they do not show {facts}.",
            apart=apart,
            facts=_CANNOT,
        )
    if log.failure is not None and log.failure.stage == "start":
        return say(
            "No engine ran, so this log shows nothing about requests. Record the server once it starts."
        )
    return say("This log does not show {facts}.", facts=_CANNOT)


def described_metrics(path: str, dumps: Sequence[MetricsDump]) -> WeakRecord:
    """Return the statements that one or several dumps of metrics support."""
    engines = engine_metrics(dumps)
    broken = sum(dump.broken for dump in dumps)
    verb = "is" if broken == 1 else "are"
    notices = (
        [say("{broken:n line} of vLLM's metrics {verb} not understood", broken=broken, verb=verb)]
        if broken
        else []
    )
    if len(dumps) > 1 and any(engine.window is None for engine in engines):
        notices.append(
            say(
                "no window between the dumps: they are of different starts, of different engines, or in the "
                "wrong order"
            )
        )
    return WeakRecord(
        path=path,
        kind=METRICS,
        server=dumps[-1].server if dumps[-1].server != ServerStart() else None,
        metrics=engines,
        statements=_in_order(list(metrics_statements(dumps, engines))),
        cannot_tell=say(
            "Metrics are a snapshot and totals[{single:?} since the start], so they do not show {facts}.",
            single=len(dumps) == 1,
            facts=_CANNOT,
        ),
        commands=[ATTACH, RESTART],
        notices=notices,
    )


def _in_order(statements: list[Statement]) -> list[Statement]:
    """Sort statements: failures first, and stalls that at most half of the snapshots suggest last."""

    def certainty_order(statement: Statement) -> int:
        is_possible = statement.code == "no-tokens" and statement.certainty == "possible"
        if is_possible and 2 * (statement.at or 0) <= (statement.snapshots or 0):
            return len(_FIRST) + 1
        return _FIRST.index(statement.code) if statement.code in _FIRST else len(_FIRST)

    return sorted(statements, key=certainty_order)
