"""The tables of a report: trials, what requests waited for, exits, caps."""

from schedtrace.model.message import CauseWord, Code, message
from schedtrace.model.report import CauseRow, RunReport, TrialReport
from schedtrace.present.numbers import integer, milliseconds, percent, series
from schedtrace.present.sections import Bars, Cell, Column, Content, Style, Styled, Table, Text

MOST_ROWS = 10


def trials_table(trials: list[TrialReport]) -> Table:
    """One row per trial and engine."""
    several = len({trial.engine_rank for trial in trials}) > 1
    columns = [
        Column("trial", numeric=True),
        Column("steps", numeric=True),
        Column("first step\nreq / tok", numeric=True),
        Column("new requests\nper step"),
        Column("use while\nwaiting", numeric=True),
        Column("preempted", numeric=True),
        Column("output\ntok/s", numeric=True),
        Column("TTFT ms\np50 / p99", numeric=True),
        Column("TPOT\np50 ms", numeric=True),
    ]
    engine = [Column("engine", numeric=True)] if several else []
    rows = [[*([str(trial.engine_rank)] if several else []), *_trial(trial)] for trial in trials]
    return Table([*engine, *columns], rows)


def _trial(trial: TrialReport) -> list[Cell]:
    ttft, tpot = trial.ttft_ms, trial.tpot_ms
    return [
        "all" if trial.trial is None else str(trial.trial) if trial.complete else f"{trial.trial} cut",
        integer(trial.steps),
        f"{integer(trial.first_step_requests)} / {integer(trial.first_step_tokens)}",
        "-" if trial.new_per_step is None else series(trial.new_per_step) or "none",
        percent(trial.budget_use_waiting_frac),
        integer(trial.preemptions),
        integer(trial.output_tokens_per_s),
        f"{milliseconds(ttft.p50)} / {milliseconds(ttft.p99)}" if ttft else "-",
        milliseconds(tpot.p50) if tpot else "-",
    ]


def limits_table(run: RunReport) -> Table:
    """What requests waited for, over the run."""
    several = len({limit.engine_rank for limit in run.limits}) > 1
    columns = [
        Column("requests waited for"),
        Column("share", numeric=True),
        Column("time\nms", numeric=True),
        Column("steps", numeric=True),
        Column(""),
    ]
    rows: list[list[Cell]] = [
        [
            message(
                "{cause}{engine}",
                cause=CauseWord(limit.cause),
                engine=f" (engine {limit.engine_rank})" if several else "",
            ),
            percent(limit.share_frac),
            integer(limit.wait_ms),
            integer(limit.steps),
            Bars(limit.strip, Style.WARNING),
        ]
        for limit in run.limits[:MOST_ROWS]
    ]
    return Table(columns, rows, left_out(len(run.limits)))


def cause_table(run: RunReport) -> Table:
    """Where ``schedule()`` stopped or skipped, and whom."""
    columns = [
        Column("stopped or skipped"),
        Column("times", numeric=True),
        Column("steps", numeric=True),
        Column("requests", numeric=True),
        Column("budget left\nmean tok", numeric=True),
        Column(""),
    ]
    rows: list[list[Cell]] = [
        [
            Styled(_exit(row), None if row.refusal else Style.DIM),
            integer(row.exits),
            integer(row.steps),
            integer(row.requests) if row.requests else "-",
            integer(row.mean_budget_left),
            "inferred" if row.via == "inferred" else _line(row.location),
        ]
        for row in run.causes[:MOST_ROWS]
    ]
    return Table(columns, rows, left_out(len(run.causes)))


def cap_table(run: RunReport) -> Table:
    """Which limits made chunks smaller."""
    columns = [
        Column("chunks made smaller by"),
        Column("times", numeric=True),
        Column("steps", numeric=True),
        Column("requests", numeric=True),
        Column("withheld\ntok", numeric=True),
        Column("budget left\nmean tok", numeric=True),
        Column(""),
    ]
    rows: list[list[Cell]] = [
        [
            message("{cap}", cap=CauseWord(row.cap)),
            integer(row.chunks),
            integer(row.steps),
            integer(row.requests),
            integer(row.withheld_tokens),
            integer(row.mean_budget_left),
            _line(row.location),
        ]
        for row in run.caps[:MOST_ROWS]
    ]
    return Table(columns, rows, left_out(len(run.caps)))


def left_out(count: int, most: int = MOST_ROWS) -> str:
    """How many rows of a table are not shown; nothing if all are."""
    return f"{integer(count - most)} more: --format json lists them all" if count > most else ""


def _exit(row: CauseRow) -> Text:
    detail = f" ({row.detail})" if row.detail else ""
    cause = CauseWord(row.cause)
    return message("{loop} {kind}: {cause}{detail}", loop=row.loop, kind=row.kind, cause=cause, detail=detail)


def _line(location: str | None) -> Content:
    """``scheduler.py:924``; the whole path stands in the findings and in the JSON form."""
    if location is None:
        return ""
    return Styled(message("{line}", line=Code(location.rpartition("/")[2])), Style.DIM)
