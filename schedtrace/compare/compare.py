"""Two runs to a comparison."""

from typing import Any

from schedtrace.compare.cause_changes import cause_changes
from schedtrace.compare.divergence import compare_decisions
from schedtrace.compare.fairness import fairness_notes, taken_in_turn
from schedtrace.compare.metric_changes import metric_changes, number_of_tests
from schedtrace.compare.metrics import trials_used
from schedtrace.compare.power import fewest_trials
from schedtrace.compare.settings import changed_settings
from schedtrace.compare.verdict import verdict
from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.rules import budget_underused
from schedtrace.diagnose.rules.common import counted
from schedtrace.errors import InputError
from schedtrace.model.comparison import Comparison, FindingChange
from schedtrace.model.message import Message, message
from schedtrace.model.report import Finding, RunReport
from schedtrace.read.run import Run
from schedtrace.timeline.timeline import make_timeline

WORK = ("dataset", "num_prompts", "input_tokens", "output_tokens", "request_rate", "burstiness")
"""What makes two workloads the same: how much there is to do, and how it comes."""
NAMED_WORK = ("batch_size", "input_len", "output_len")
"""The same for a log whose name tells it."""


def compare(*, base: Run, new: Run) -> Comparison:
    """Compare two runs.

    Raises:
        InputError: they have nothing in common that could be compared.
    """
    base_report, new_report = analyze_run(base), analyze_run(new)
    work = [_work(report) for report in (base_report, new_report)]
    same_work = None in work or work[0] == work[1]
    _require_common_ground(base=base_report, new=new_report, same_work=same_work)
    metrics = metric_changes(base=base_report, new=new_report)
    findings = _findings(base=base_report, new=new_report)
    told = all(report.config["exits_via"] for report in (base_report, new_report))
    tests = number_of_tests(metrics)
    views = {
        "base": make_timeline(base.traces[0], base.manifest),
        "new": make_timeline(new.traces[0], new.manifest),
    }
    return Comparison(
        verdict=verdict(
            metrics, findings, same_work=same_work, least=fewest_trials(tests), in_turn=taken_in_turn(**views)
        ),
        base_path=base_report.path,
        new_path=new_report.path,
        base_label=base_report.label,
        new_label=new_report.label,
        notes=[
            *_notes(base=base_report, new=new_report, same_work=same_work),
            *fairness_notes(**views, metrics=metrics),
        ],
        config=changed_settings(base=base, new=new),
        metrics=metrics,
        causes=cause_changes(base=base_report, new=new_report) if told else None,
        findings=findings,
        tests=tests,
        trials_least=fewest_trials(tests),
        decisions=compare_decisions(**views),
    )


def _notes(*, base: RunReport, new: RunReport, same_work: bool) -> list[Message | str]:
    """What to keep in mind when reading the figures."""
    sides = (("base", base), ("new", new))
    notes: list[Message | str] = [
        message("{side}: {problem}", side=side, problem=problem)
        for side, run in sides
        for problem in run.problems
    ]
    notes += _not_compared(sides)
    if not same_work:
        notes.append(f"different workloads: base {_load(base)}, new {_load(new)}")
    counts = [len(trials_used(report)) for report in (base, new)]
    if counts[0] != counts[1]:
        notes.append(f"base has {counted(counts[0], 'trial')}, new has {counts[1]}: all are used")
    notes += [
        f"{side}: its only trial was cut" for side, run in sides if not any(t.complete for t in run.trials)
    ]
    if min(counts) == 1:
        notes.append("one trial on a side: how much it would vary by itself is unknown; use --trials")
    sources = [{t.throughput_from for t in report.trials if t.throughput_from} for report in (base, new)]
    if all(sources) and sources[0] != sources[1]:
        notes.append(
            "throughput is the front end's on one side and the trace's on the other: not quite alike"
        )
    return notes


def _require_common_ground(*, base: RunReport, new: RunReport, same_work: bool) -> None:
    for report in (base, new):
        if not any(trial.steps for trial in report.trials):
            msg = f"{report.path}: no step in it to compare"
            raise InputError(msg)
    if base.config["model"] != new.config["model"] and not same_work:
        msg = (
            f"nothing in common to compare: {base.path} ran {base.config['model']} on {_load(base)}, "
            f"{new.path} ran {new.config['model']} on {_load(new)}"
        )
        raise InputError(msg)


def _unjudged(base: RunReport, new: RunReport) -> set[str]:
    """Findings that one side could not have."""
    codes = {rule.code for report in (base, new) for rule in report.not_judged}
    only_without_queue = {budget_underused.CODE} if bool(base.not_judged) != bool(new.not_judged) else set()
    return codes | only_without_queue


def _not_compared(sides: tuple[tuple[str, RunReport], ...]) -> list[str]:
    """What a side could not be judged for, and why; once where both are alike."""
    said: dict[str, list[str]] = {}
    for side, run in sides:
        if run.not_judged:
            missing = dict.fromkeys(fact for rule in run.not_judged for fact in rule.missing)
            codes = ", ".join(rule.code for rule in run.not_judged)
            text = f"{run.config['record']}; it does not tell {', '.join(missing)}: not compared are {codes}"
            said.setdefault(text, []).append(side)
    return [f"{' and '.join(names)}: {text}" for text, names in said.items()]


def _work(report: RunReport) -> tuple[Any, ...] | None:
    """What the run had to do, as far as its manifest tells."""
    if named := report.config.get("named"):
        return tuple(named[name] for name in NAMED_WORK)
    workload = report.config.get("workload")
    return None if workload is None else tuple(workload[name] for name in WORK)


def _load(report: RunReport) -> str:
    if named := report.config.get("named"):
        return f"batch size {named['batch_size']:,}, {named['input_len']:,} + {named['output_len']:,} tokens"
    workload = report.config["workload"]
    tokens = [workload["input_tokens"], workload["output_tokens"]]
    sizes = "" if None in tokens else f", {tokens[0]:,} + {tokens[1]:,} tokens"
    rate = workload["request_rate"]
    pace = "" if rate is None else f", {rate:g} per second, burstiness {workload['burstiness']:g}"
    return f"{counted(workload['num_prompts'], 'prompt')} ({workload['dataset']}{sizes}{pace})"


def _findings(*, base: RunReport, new: RunReport) -> list[FindingChange]:
    before, after = _by_kind(base.findings), _by_kind(new.findings)
    unjudged = _unjudged(base, new)
    changes = []
    for kind in dict.fromkeys([*after, *before]):
        if kind[0] in unjudged:
            continue
        old, now = before.get(kind, []), after.get(kind, [])
        state = "stayed" if old and now else "appeared" if now else "went"
        changes.append(
            FindingChange(
                code=kind[0],
                cause=kind[1],
                state=state,
                base_count=sum(finding.count for finding in old),
                new_count=sum(finding.count for finding in now),
                base_trials=sorted({trial for finding in old for trial in finding.trials}),
                new_trials=sorted({trial for finding in now for trial in finding.trials}),
                message=(now or old)[0].message,
            )
        )
    return changes


def _by_kind(findings: list[Finding]) -> dict[tuple[str, str | None], list[Finding]]:
    kinds: dict[tuple[str, str | None], list[Finding]] = {}
    for finding in findings:
        kinds.setdefault((finding.code, finding.cause), []).append(finding)
    return kinds
