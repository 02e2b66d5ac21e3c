"""The tables of exits and of caps."""

from rich.table import Table
from rich.text import Text

from schedtrace.model.comparison import CauseChange
from schedtrace.model.report import CauseRow, RunReport
from schedtrace.present.numbers import bar, integer, percent

MOST_ROWS = 10


def cause_table(run: RunReport) -> Table:
    """Where ``schedule()`` stopped or skipped, and whom."""
    table = _table("stopped or skipped", "times", "steps", "requests", "budget left\nmean tok")
    for row in run.causes[:MOST_ROWS]:
        table.add_row(
            Text(_cause(row), style="" if row.refusal else "dim"),
            integer(row.exits),
            integer(row.steps),
            integer(row.requests) if row.requests else "-",
            integer(row.mean_budget_left),
            Text(_where(row), style="dim"),
        )
    if len(run.causes) > MOST_ROWS:
        table.add_row(f"{len(run.causes) - MOST_ROWS} more: --format json lists them all")
    return table


def cap_table(run: RunReport) -> Table:
    """Which limits made chunks smaller."""
    table = _table(
        "chunks made smaller by", "times", "steps", "requests", "withheld\ntok", "budget left\nmean tok"
    )
    for row in run.caps[:MOST_ROWS]:
        table.add_row(
            row.cap,
            integer(row.chunks),
            integer(row.steps),
            integer(row.requests),
            integer(row.withheld_tokens),
            integer(row.mean_budget_left),
            Text(_line(row.location), style="dim"),
        )
    return table


def limits_table(run: RunReport) -> Table:
    """What requests waited for, over the run."""
    table = _table("requests waited for", "share", "time\nms", "steps")
    several = len({limit.engine_rank for limit in run.limits}) > 1
    for limit in run.limits[:MOST_ROWS]:
        engine = f" (engine {limit.engine_rank})" if several else ""
        table.add_row(
            limit.cause + engine,
            percent(limit.share_frac),
            integer(limit.wait_ms),
            integer(limit.steps),
            Text("".join(map(bar, limit.strip)), style="yellow", no_wrap=True),
        )
    return table


def cause_changes_table(changes: list[CauseChange] | None) -> Table | Text:
    """Who was refused more or less often."""
    if changes is None:
        return Text("Who was refused is not told by both sides.")
    if not changes:
        return Text("Nobody was refused on either side.")
    table = _table("refused or skipped, share of steps", "base", "new")
    for change in changes[:MOST_ROWS]:
        detail = f" ({change.detail})" if change.detail else ""
        table.add_row(
            f"{change.loop}: {change.cause}{detail}",
            percent(change.base_steps_frac),
            percent(change.new_steps_frac),
            Text(f"{integer(change.base_exits)} -> {integer(change.new_exits)} times", style="dim"),
        )
    return table


def _table(what: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(what, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    return table


def _cause(row: CauseRow) -> str:
    detail = f" ({row.detail})" if row.detail else ""
    return f"{row.loop} {row.kind}: {row.cause}{detail}"


def _where(row: CauseRow) -> str:
    return "inferred" if row.via == "inferred" else _line(row.location)


def _line(location: str | None) -> str:
    """``scheduler.py:924``; the whole path stands in the findings and in the JSON form."""
    return "" if location is None else location.rpartition("/")[2]
