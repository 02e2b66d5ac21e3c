"""Runs to a report."""

from collections.abc import Callable
from typing import Any

from schedtrace.diagnose.exit_counts import cap_table, cause_table
from schedtrace.diagnose.root_causes import ranked
from schedtrace.diagnose.rules import KINDS, RANK_RULES, RULES
from schedtrace.diagnose.settings.effective import effective_settings
from schedtrace.diagnose.statistics import statistics
from schedtrace.diagnose.time_split import time_split
from schedtrace.diagnose.times import engine_time, request_time
from schedtrace.diagnose.trials import strip, trial_reports
from schedtrace.diagnose.verdict import leading, verdict
from schedtrace.errors import UsageError
from schedtrace.model.facts import ALL_FACTS, Fact
from schedtrace.model.manifest import Manifest
from schedtrace.model.message import NOTHING, Count, Duration, Message, Number, Steps, message
from schedtrace.model.report import Finding, NotJudged, Report, RunReport, Severity
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from schedtrace.timeline.ranks import Ranks
from schedtrace.timeline.timeline import Timeline, make_timeline
from schedtrace.timeline.waits import mismatches
from schedtrace.timeline.window import Window, windowed

Test = Callable[[Run, list[Finding]], list[Finding]]
"""Puts the advice of a run's findings to a test: gives them with what came of it, in their new order."""


def analyze(runs: list[Run], window: Window | None = None, test: Test | None = None) -> Report:
    """Figures and findings of each run, or of this window of each trace."""
    return Report(runs=[analyze_run(run, window, test) for run in runs])


def analyze_run(run: Run, window: Window | None = None, test: Test | None = None) -> RunReport:
    """Figures and findings of one run; of several engines, rank after rank."""
    timelines = [make_timeline(trace, run.manifest, front_end=run.front_end) for trace in run.traces]
    if window is not None:
        timelines = [windowed(timeline, window) for timeline in timelines]
    ranks = Ranks(timelines)
    measured = run.manifest if window is None else None  # the front end's figures are of whole trials
    findings = judged(timelines, ranks)
    if test is not None:
        findings = test(run, findings)
    findings = led(findings)
    split = time_split(timelines) if Fact.TIMES in timelines[0].facts else []
    problems = [problem for trace in run.traces for problem in _of_trace(trace)]
    problems += [problem for timeline in timelines for problem in _of_queue(timeline)]
    problems += _of_ranks(ranks)
    problems += _of_run(run.manifest) if run.manifest else []
    return RunReport(
        path=str(run.path),
        label=run.label,
        config=config_of(run),
        problems=problems,
        verdict=verdict(timelines, findings, split),
        time_split=split,
        trials=[
            report
            for timeline in timelines
            for report in trial_reports(timeline, measured, engines=run.engines)
        ],
        findings=findings,
        not_judged=_not_judged(timelines),
        causes=cause_table(timelines),
        caps=cap_table(timelines),
        request_time=[share for timeline in timelines for share in request_time(timeline)],
        engine_time=[share for timeline in timelines for share in engine_time(timeline)],
        strip=strip(timelines[0]),
        statistics=statistics(ranks),
        warmup_steps=sum(timeline.warmup_steps for timeline in timelines),
        settings=effective_settings(run, timelines),
    )


def judged(timelines: list[Timeline], ranks: Ranks) -> list[Finding]:
    """What all rules find in these engines, ranked.

    Args:
        timelines: One per engine.
        ranks: The same.
    """
    of_engines = [
        (
            timeline,
            [
                finding
                for rule in RULES.values()
                if rule.needs <= timeline.facts
                for finding in rule(timeline)
            ],
        )
        for timeline in timelines
    ]
    of_ranks = [
        finding
        for rule in RANK_RULES.values()
        if all(rule.needs <= timeline.facts for timeline in timelines)
        for finding in rule(ranks)
    ]
    stalls = ranks.prefill_stalls.steps() if ranks.prefill_stalls is not None else {}
    return ranked(of_engines, of_ranks, stalls)


def led(findings: list[Finding]) -> list[Finding]:
    """The findings with the one first that the verdict is about."""
    lead = leading(findings)[:1]
    return [*lead, *(finding for finding in findings if finding not in lead)]


def config_of(run: Run) -> dict[str, Any]:
    """The configuration: from the trace's header, and from the manifest where there is one."""
    header = run.traces[0].header
    config: dict[str, Any] = {
        "record": run.traces[0].record,
        "model": header.model,
        "vllm_version": header.vllm_version,
        "schedtrace_version": header.schedtrace_version,
        "device": header.device,
        "scheduler_class": header.scheduler_class,
        "async_scheduling": header.async_scheduling,
        "engines": len(run.traces),
        "exits_via": header.exits_via if Fact.EXITS in run.traces[0].facts else None,
        "token_budget": header.token_budget,
        "max_num_running_reqs": header.max_num_running_reqs,
        "max_model_len": header.max_model_len,
        "kv_blocks_total": header.kv_blocks_total,
        "block_size": header.block_size,
        "enable_prefix_caching": header.enable_prefix_caching,
        "enable_chunked_prefill": header.scheduler_config.get("enable_chunked_prefill"),
        "policy": header.scheduler_config.get("policy"),
    }
    if run.named is not None:
        config["named"] = {name: getattr(run.named, name) for name in run.named.__struct_fields__}
    manifest = run.manifest
    if manifest is not None:
        config["status"] = manifest.status
        config["front_end"] = manifest.front_end
        config["trials_asked"] = manifest.trials_asked
        config["engine_args_chosen"] = manifest.engine_args_chosen
        if manifest.workload is not None:
            workload = manifest.workload
            config["workload"] = {name: getattr(workload, name) for name in workload.__struct_fields__}
    return config


def at_or_above(severity: str | None) -> Callable[[Finding], bool]:
    """A test for findings at least this severe; for None, one that no finding passes.

    Raises:
        UsageError: there is no such severity.
    """
    if severity is None:
        return lambda _: False
    try:
        least = Severity[severity.upper()]
    except KeyError:
        msg = f"--fail-on {severity}: expected info, warning or critical"
        raise UsageError(msg) from None
    return lambda finding: Severity[finding.severity.upper()] >= least


def _of_trace(trace: Trace) -> list[Message]:
    """What is wrong with the file, and the recorder's notices."""
    notices = [f"{trace.path}: {notice}" for notice in trace.notices]
    return [message("{problem}", problem=text) for text in (*trace.problems.sentences(trace.path), *notices)]


def _of_queue(timeline: Timeline) -> list[Message]:
    """Where the queue rebuilt from the trace disagrees with the recorded counts."""
    if not {Fact.QUEUE, Fact.LIVES, Fact.REQUESTS} <= timeline.facts:
        return []
    wrong = mismatches(timeline)
    if wrong.is_empty():
        return []
    first = wrong.row(0, named=True)
    return [
        message(
            "The waiting queue rebuilt from the trace disagrees with the recorded count after {wrong} of "
            "{steps}: after {first} it has {rebuilt}, the record {recorded}. Findings that name waiting "
            "requests may be wrong.",
            wrong=Number(wrong.height),
            steps=Count(timeline.steps.height, "step"),
            first=Steps(first["step"], first["step"]),
            rebuilt=Count(first["reconstructed"], "request"),
            recorded=Number(first["recorded"]),
        )
    ]


def _of_ranks(ranks: Ranks) -> list[Message]:
    """Ranks in lock-step that have no trace here, and clocks of several hosts."""
    problems, found = [], len(ranks.timelines)
    if ranks.missing:
        problems.append(
            message(
                "{found} of {size} recorded: what the others made them wait for is not known.",
                found=Number(found),
                size=Count(found + ranks.missing, "rank"),
            )
        )
    if ranks.hosts > 1:
        off = ranks.uncertainty_us
        apart: Message | str = "differ by an unknown time"
        if off is not None:
            apart = message("differ by up to {off}", off=Duration(off))
        problems.append(
            message(
                "The ranks ran on {hosts} whose clocks may {apart}: no comparison of their times is better.",
                hosts=Count(ranks.hosts, "host"),
                apart=apart,
            )
        )
    return problems


def _of_run(manifest: Manifest) -> list[Message]:
    """How the run ended, and trials that did not begin with an empty prefix cache."""
    problems = []
    ended = {"failed": "failed", "interrupted": "was interrupted"}.get(manifest.status)
    if ended is not None:
        error = message(": {error}", error=manifest.error) if manifest.error else NOTHING
        problems.append(
            message(
                "The run {ended}{error}. This report covers what was recorded before.",
                ended=ended,
                error=error,
            )
        )
    if manifest.status in {"starting", "running"}:
        problems.append(message("The run's command ended without a result, or is still running."))
    dirty = [trial.trial for trial in manifest.trials if trial.prefix_cache_reset is False]
    if dirty:
        problems.append(
            message(
                "The prefix cache could not be emptied before {trials}.",
                trials=f"trial {', '.join(map(str, dirty))}",
            )
        )
    return problems


def _not_judged(timelines: list[Timeline]) -> list[NotJudged]:
    """The rules that need facts which this record lacks."""
    facts = frozenset(ALL_FACTS).intersection(*(timeline.facts for timeline in timelines))
    rules = KINDS if len(timelines) > 1 else RULES
    return [
        NotJudged(code=rule.code, missing=[str(fact) for fact in Fact if fact in rule.needs - facts])
        for rule in rules.values()
        if rule.needs - facts
    ]
