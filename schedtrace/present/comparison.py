"""A comparison as text for a terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from schedtrace.model.comparison import Comparison, MetricChange, Outcome
from schedtrace.present.causes import cause_changes_table
from schedtrace.present.decisions import decisions_view
from schedtrace.present.metric_text import change_text, legend, noise_floors, sample_text
from schedtrace.present.numbers import integer
from schedtrace.present.phrases import plain

MAX_SETTINGS = 15
STATE_STYLE = {"appeared": "yellow", "went": "green", "stayed": ""}


def comparison_view(comparison: Comparison) -> RenderableType:
    """The verdict first, then what it rests on."""
    return Group(*_parts(comparison))


def _parts(comparison: Comparison) -> Iterator[RenderableType]:
    yield Text.assemble(("Verdict: ", "bold"), (comparison.verdict, "bold"))
    yield Text(f"base  {comparison.base_label}  {comparison.base_path}")
    yield Text(f"new   {comparison.new_label}  {comparison.new_path}")
    for note in comparison.notes:
        yield Text(f"! {plain(note)}", style="yellow")
    yield Text()
    yield Text("Settings that differ", style="bold")
    yield Padding(Group(*_settings(comparison)), (0, 0, 0, 2), expand=False)
    yield Text()
    yield _metrics(comparison.metrics)
    yield Text()
    if floors := noise_floors(comparison.metrics):
        yield Text(floors)
    yield Text(legend(comparison), style="dim")
    yield Text()
    yield from decisions_view(comparison.decisions)
    yield Text()
    yield cause_changes_table(comparison.causes)
    yield Text()
    yield Text("Findings", style="bold")
    yield Padding(Group(*_findings(comparison)), (0, 0, 0, 2), expand=False)


def _settings(comparison: Comparison) -> Iterator[RenderableType]:
    if not comparison.config:
        yield Text("none")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for change in comparison.config[:MAX_SETTINGS]:
        how = "given" if change.given else "resolved"
        table.add_row(Text(change.name), Text(f"{change.base} -> {change.new}"), Text(how, style="dim"))
    yield table
    if len(comparison.config) > MAX_SETTINGS:
        yield Text(f"{len(comparison.config) - MAX_SETTINGS} more: --format json lists them all", style="dim")


def _metrics(metrics: list[MetricChange]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("mean (range)\nof trials", no_wrap=True)
    for heading in ("base", "new", "change\n(95 %)"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("")
    for metric in metrics:
        table.add_row(
            f"{metric.name} {metric.unit}".strip(),
            sample_text(metric.base),
            sample_text(metric.new),
            change_text(metric),
            Text(metric.outcome, style=_style(metric)),
        )
    return table


def _style(metric: MetricChange) -> str:
    if metric.worsened:
        return "red"
    if not metric.significant:
        return "dim"
    return "green" if metric.higher_is_better is not None and metric.outcome != Outcome.DIFFERS else ""


def _findings(comparison: Comparison) -> Iterator[RenderableType]:
    if not comparison.findings:
        yield Text("none on either side")
    for change in comparison.findings:
        cause = f" ({change.cause})" if change.cause else ""
        yield Text.assemble(
            (f"{change.state:<9}", STATE_STYLE[change.state]),
            (f"{change.code}{cause}", "bold"),
            f"  {integer(change.base_count)} -> {integer(change.new_count)}",
        )
        yield Padding(Text(plain(change.message), style="dim"), (0, 0, 0, 9), expand=False)
