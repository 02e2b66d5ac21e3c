"""Statements about benchmarks' results: the client's latencies, alone or beside the engine's trace."""

from collections.abc import Sequence

from schedtrace.model.message import NOTHING
from schedtrace.model.records import ClientLatency, Statement, WeakRecord
from schedtrace.model.report import RunReport, TrialReport
from schedtrace.model.say import say
from schedtrace.read.records.benchmark_result import BenchmarkResult

OUTSIDE_FRAC = 0.1
"""Share of a client's median latency that must be spent outside the engine to be reported as such."""
_NAMES = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end-to-end latency"}


def described_benchmark(path: str, result: BenchmarkResult) -> WeakRecord:
    """Return what a benchmark's client measured."""
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
    """Set the engine's latencies beside the client's, if exactly one trial has as many finished requests.

    Equal numbers do not prove that the requests are the same; a statement is therefore likely at best.

    Args:
        record: Result of a benchmark; other records stay as they are.
        runs: Reports on the traces.
        same_file: Results in the same file. If two have equal numbers of requests, neither is compared.
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
