"""Two runs to a comparison: settings, metrics over trials, findings."""

from collections.abc import Callable
from typing import Any

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.rules.common import counted
from schedtrace.diagnose.settings import changed_settings
from schedtrace.errors import InputError
from schedtrace.model.comparison import Comparison, FindingChange, MetricChange, Sample
from schedtrace.model.report import Finding, Percentiles, RunReport, TrialReport
from schedtrace.read.run import Run

Value = float | int | None

METRICS: list[tuple[str, str, bool | None, Callable[[TrialReport], Value]]] = [
    ("output", "tok/s", True, lambda t: t.output_tokens_per_s),
    ("total", "tok/s", True, lambda t: t.total_tokens_per_s),
    ("requests", "req/s", True, lambda t: t.requests_per_s),
    ("TTFT p50", "ms", False, lambda t: _p(t.ttft_ms, "p50")),
    ("TTFT p99", "ms", False, lambda t: _p(t.ttft_ms, "p99")),
    ("TPOT p50", "ms", False, lambda t: _p(t.tpot_ms, "p50")),
    ("E2E p50", "ms", False, lambda t: _p(t.e2e_ms, "p50")),
    ("E2E p99", "ms", False, lambda t: _p(t.e2e_ms, "p99")),
    ("steps", "", None, lambda t: t.steps),
    ("first-step requests", "", None, lambda t: t.first_step_requests),
    ("first-step tokens", "", None, lambda t: t.first_step_tokens),
    ("steps that admit", "", None, lambda t: len(t.new_per_step)),
    ("preemptions", "", False, lambda t: t.preemptions),
]
"""Name, unit, whether more is better (None: neither), and the figure of one trial."""


def compare(*, base: Run, new: Run) -> Comparison:
    """Compare two runs.

    Raises:
        InputError: they have nothing in common that could be compared.
    """
    base_report, new_report = analyze_run(base), analyze_run(new)
    _require_common_ground(base=base_report, new=new_report)
    metrics = _metrics(base=base_report, new=new_report)
    findings = _findings(base=base_report, new=new_report)
    notes = [*base_report.problems, *new_report.problems]
    base_trials, new_trials = len(base_report.trials), len(new_report.trials)
    if base_trials != new_trials:
        notes.append(f"base has {counted(base_trials, 'trial')}, new has {new_trials}: all of them are used")
    if min(base_trials, new_trials) == 1:
        notes.append("one trial on a side: how much it would vary by itself is unknown; use --trials")
    return Comparison(
        verdict=_verdict(metrics, findings),
        base_path=base_report.path,
        new_path=new_report.path,
        base_label=base_report.label,
        new_label=new_report.label,
        notes=notes,
        config=changed_settings(base=base, new=new),
        metrics=metrics,
        findings=findings,
    )


def _require_common_ground(*, base: RunReport, new: RunReport) -> None:
    for report in (base, new):
        if not any(trial.steps for trial in report.trials):
            msg = f"{report.path}: no step in it to compare"
            raise InputError(msg)
    workloads = [report.config.get("workload") for report in (base, new)]
    lengths = [
        None if w is None else (w["dataset"], w["num_prompts"], w["input_tokens"], w["output_tokens"])
        for w in workloads
    ]
    if base.config["model"] != new.config["model"] and None not in lengths and lengths[0] != lengths[1]:
        msg = (
            f"nothing in common to compare: {base.path} ran {base.config['model']} on {_load(workloads[0])}, "
            f"{new.path} ran {new.config['model']} on {_load(workloads[1])}"
        )
        raise InputError(msg)


def _load(workload: Any) -> str:
    return f"{counted(workload['num_prompts'], 'prompt')} ({workload['dataset']})"


def _metrics(*, base: RunReport, new: RunReport) -> list[MetricChange]:
    """Metrics that both sides have."""
    changes = []
    for name, unit, higher_is_better, value in METRICS:
        samples = [_sample([value(trial) for trial in report.trials]) for report in (base, new)]
        if samples[0] is None or samples[1] is None:
            continue
        before, after = samples[0], samples[1]
        known_spread = before.count > 1 and after.count > 1
        changes.append(
            MetricChange(
                name=name,
                unit=unit,
                higher_is_better=higher_is_better,
                base=before,
                new=after,
                change_frac=after.mean / before.mean - 1 if before.mean else None,
                beyond_spread=(after.min > before.max or after.max < before.min) if known_spread else None,
            )
        )
    return changes


def _sample(values: list[Value]) -> Sample | None:
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    return Sample(count=len(known), mean=sum(known) / len(known), min=min(known), max=max(known))


def _findings(*, base: RunReport, new: RunReport) -> list[FindingChange]:
    before, after = _by_kind(base.findings), _by_kind(new.findings)
    changes = []
    for kind in dict.fromkeys([*after, *before]):
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


def _verdict(metrics: list[MetricChange], findings: list[FindingChange]) -> str:
    """The first line: what changed, in the order of what matters."""
    parts = []
    for state, verb in (("went", "gone"), ("appeared", "new")):
        named = [_named(change) for change in findings if change.state == state]
        if named:
            parts.append(f"{verb}: {', '.join(named)}")
    parts += [
        _steadied(metric) for metric in metrics if metric.name == "first-step requests" and _steadied(metric)
    ]
    headline = metrics[0] if metrics else None
    moved = [metric for metric in metrics if metric.beyond_spread and metric.unit]
    if moved:
        parts.append("; ".join(f"{m.name} {_percent(m.change_frac)}" for m in moved[:3]))
    elif headline is not None and headline.beyond_spread is False:
        parts.append(f"{headline.name} {_percent(headline.change_frac)}, within the spread of the trials")
    elif headline is not None:
        parts.append(f"{headline.name} {_percent(headline.change_frac)}, one trial only: may be noise")
    return "; ".join(parts) or "no difference found"


def _steadied(metric: MetricChange) -> str:
    """That trials no longer vary, or now do; empty if neither."""
    before, after = metric.base, metric.new
    if after.min == after.max and before.min < before.max:
        return f"{metric.name} now {after.min:.0f} in every trial (were {before.min:.0f} to {before.max:.0f})"
    if before.min == before.max and after.min < after.max:
        return f"{metric.name} now vary from {after.min:.0f} to {after.max:.0f} (were {before.min:.0f})"
    return ""


def _named(change: FindingChange) -> str:
    count = change.base_count if change.state == "went" else change.new_count
    trials = change.base_trials if change.state == "went" else change.new_trials
    cause = f" {change.cause}" if change.code == "blocked-budget" else ""
    where = f" in {counted(len(trials), 'trial')}" if trials else ""
    return (
        f"{change.code}{cause} ({counted(count, 'step' if change.code != 'preemption' else 'time')}{where})"
    )


def _percent(change_frac: float | None) -> str:
    return "n/a" if change_frac is None else f"{100 * change_frac:+.1f} %"


def _p(percentiles: Percentiles | None, name: str) -> float | None:
    return None if percentiles is None else float(getattr(percentiles, name))
