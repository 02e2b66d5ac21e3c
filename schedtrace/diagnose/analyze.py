"""Runs to a report."""

from collections.abc import Callable
from typing import Any

from schedtrace.diagnose.exit_counts import cap_table, cause_table
from schedtrace.diagnose.limits import limit_shares
from schedtrace.diagnose.rules import RULES
from schedtrace.diagnose.rules.common import counted
from schedtrace.diagnose.trials import strip, trial_reports
from schedtrace.errors import UsageError
from schedtrace.model.facts import ALL_FACTS, Fact
from schedtrace.model.report import Finding, NotJudged, Report, RunReport, Severity
from schedtrace.read.run import Run
from schedtrace.timeline.timeline import Timeline, make_timeline
from schedtrace.timeline.waits import mismatches, waits


def analyze(runs: list[Run]) -> Report:
    """Everything that can be said about ``runs``, each for itself."""
    return Report(runs=[analyze_run(run) for run in runs])


def analyze_run(run: Run) -> RunReport:
    """Figures and findings of one run; of several engines, rank after rank."""
    views = [make_timeline(trace, run.manifest) for trace in run.traces]
    findings = [
        finding
        for timeline in views
        for rule in RULES.values()
        if rule.needs <= timeline.facts
        for finding in rule(timeline)
    ]
    problems = [said for trace in run.traces for said in trace.problems.sentences(trace.path)]
    problems += [f"{trace.path}: {notice}" for trace in run.traces for notice in trace.notices]
    problems += [said for timeline in views for said in _queue_mismatch(timeline)]
    if run.manifest and run.manifest.status in {"failed", "interrupted"}:
        why = f": {run.manifest.error}" if run.manifest.error else ""
        how = {"failed": "failed", "interrupted": "was interrupted"}[run.manifest.status]
        problems.append(f"the run {how}{why}; what was recorded before is analyzed")
    if run.manifest and run.manifest.status in {"starting", "running"}:
        problems.append("the run's command ended without a result, or still runs")
    if run.manifest:
        dirty = [str(trial.trial) for trial in run.manifest.trials if trial.prefix_cache_reset is False]
        if dirty:
            problems.append(f"the prefix cache could not be emptied before trial {', '.join(dirty)}")
    return RunReport(
        path=str(run.path),
        label=run.label,
        config=config_of(run),
        problems=problems,
        trials=[
            report
            for timeline in views
            for report in trial_reports(timeline, run.manifest, engines=run.engines)
        ],
        findings=sorted(findings, key=_weight),
        not_judged=_not_judged(views),
        causes=cause_table(views),
        caps=cap_table(views),
        limits=[
            share for timeline in views if Fact.QUEUE in timeline.facts for share in limit_shares(timeline)
        ],
        strip=strip(views[0]),
        warmup_steps=sum(timeline.warmup_steps for timeline in views),
    )


def config_of(run: Run) -> dict[str, Any]:
    """What the run was: from the trace's header, and from the manifest where there is one."""
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


def _queue_mismatch(timeline: Timeline) -> list[str]:
    """Findings that look at who waits rest on a rebuilt queue: where it disagrees with the counts, say so."""
    if not {Fact.QUEUE, Fact.LIVES, Fact.REQUESTS} <= timeline.facts:
        return []
    wrong = mismatches(timeline, waits(timeline))
    if wrong.is_empty():
        return []
    first = wrong.row(0, named=True)
    said = (
        f"the waiting queue rebuilt from the trace disagrees with the recorded count after "
        f"{counted(wrong.height, 'step')} of {timeline.steps.height:,} (first step {first['step']}: rebuilt "
        f"{first['reconstructed']}, recorded {first['recorded']}); findings that name who waits may be off"
    )
    return [said]


def _not_judged(views: list[Timeline]) -> list[NotJudged]:
    """The rules that this record does not tell enough for, and what is missing."""
    facts = frozenset(ALL_FACTS).intersection(*(timeline.facts for timeline in views))
    return [
        NotJudged(code=rule.code, missing=[str(fact) for fact in Fact if fact in rule.needs - facts])
        for rule in RULES.values()
        if rule.needs - facts
    ]


def _weight(finding: Finding) -> tuple[int, int, int]:
    """Most severe first, then engine by engine, then by the number of steps."""
    return -Severity[finding.severity.upper()], finding.engine_rank, -finding.count
