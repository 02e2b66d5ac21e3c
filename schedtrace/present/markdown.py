"""A comparison as Markdown, for a pull request."""

from collections.abc import Iterator, Sequence

from schedtrace.model.comparison import CauseChange, Comparison, FindingChange, MetricChange
from schedtrace.present.decisions import decided_alike, divergence_rows, where, why
from schedtrace.present.markdown_text import cell, code, prose
from schedtrace.present.metric_text import change_text, legend, sample_text
from schedtrace.present.numbers import integer, percent
from schedtrace.present.phrases import plain

MOST_ROWS = 15


def markdown(comparison: Comparison) -> str:
    """The verdict, then tables: settings, metrics, causes, findings, the first step decided differently."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: Comparison) -> Iterator[str]:
    yield f"**{prose(comparison.verdict)}**"
    yield ""
    yield f"schedtrace diff: base {code(comparison.base_label)}, new {code(comparison.new_label)}"
    if comparison.notes:
        yield ""
        yield from (f"* {prose(plain(note))}" for note in comparison.notes)
    settings = [(prose(change.name), code(change.base), code(change.new)) for change in comparison.config]
    yield from _table(["setting", "base", "new"], settings)
    yield from _table(
        ["metric", "base", "new", "change (95 % interval)", "noise floor", "trials for 5 %", "result"],
        [_metric(metric) for metric in comparison.metrics],
    )
    yield ""
    yield legend(comparison)
    yield from _table(
        ["refused or skipped", "base, of steps", "new, of steps", "times"],
        [_cause(change) for change in comparison.causes or []],
    )
    yield from _table(
        ["finding", "", "base", "new", "what it says"], [_finding(change) for change in comparison.findings]
    )
    yield ""
    yield f"Decisions of the scheduler: {decided_alike(comparison.decisions)}."
    first = comparison.decisions.first
    if first is not None:
        yield from _table(
            [where(first), "base", "new"], [_decided(row[:3]) for row in divergence_rows(first)]
        )
        yield ""
        yield why(first)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table after a blank line; nothing without rows."""
    if not rows:
        return
    yield ""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(map(cell, row))} |" for row in rows[:MOST_ROWS])
    if len(rows) > MOST_ROWS:
        yield ""
        yield f"{len(rows) - MOST_ROWS} more: `--format json` lists them all."


def _metric(metric: MetricChange) -> list[str]:
    certain = f"**{metric.outcome}**" if metric.significant else str(metric.outcome)
    return [
        f"{metric.name} {metric.unit}".strip(),
        sample_text(metric.base),
        sample_text(metric.new),
        change_text(metric),
        percent(metric.noise_floor_frac),
        integer(metric.trials_needed),
        certain,
    ]


def _cause(change: CauseChange) -> list[str]:
    detail = f" ({prose(change.detail)})" if change.detail else ""
    times = f"{integer(change.base_exits)} -> {integer(change.new_exits)}"
    shares = [percent(change.base_steps_frac), percent(change.new_steps_frac)]
    return [f"{prose(change.loop)}: {code(change.cause)}{detail}", *shares, times]


def _finding(change: FindingChange) -> list[str]:
    cause = f" {code(change.cause)}" if change.cause else ""
    counts = [integer(change.base_count), integer(change.new_count)]
    return [f"{prose(change.code)}{cause}", change.state, *counts, prose(plain(change.message))]


def _decided(row: Sequence[str]) -> list[str]:
    return [prose(text) for text in row]
