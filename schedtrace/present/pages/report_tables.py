"""The tables of a report: trials, where the requests' time went, exits, caps."""

from schedtrace.model.message import CauseWord, joined
from schedtrace.model.report import CauseRow, RunReport, TrialReport
from schedtrace.model.say import say
from schedtrace.present.numbers import counted, integer, milliseconds, percent, series
from schedtrace.present.sections import (
    Bars,
    Cell,
    Column,
    Content,
    Fact,
    Facts,
    Style,
    Styled,
    Table,
    Text,
)
from schedtrace.present.words import ENGINE_STATES, state

MOST_ROWS = 10
MOST_TRIALS = 32
"""Of several engines."""
MOST_ENGINES = 8
LEAST_SHOWN_FRAC = 0.01
"""A smaller share of the requests' time is left to the JSON form."""


def trials_table(trials: list[TrialReport], *, log: bool = False) -> Table:
    """One row per trial and engine. A server has no trials, and so nothing that is a trial's first step.

    Args:
        trials: Of one run.
        log: It is a benchmark's log, which has one trial and does not say so.
    """
    of_trials = log or any(trial.trial is not None for trial in trials)
    several = len({trial.engine_rank for trial in trials}) > 1
    begin = [Column("first step\nreq / tok", numeric=True), Column("new requests\nper step")]
    columns = [
        Column("trial" if of_trials else "", numeric=True),
        Column("steps", numeric=True),
        *(begin if of_trials else []),
        Column("use while\nwaiting", numeric=True),
        Column("preempted", numeric=True),
        Column("output\ntok/s", numeric=True),
        Column("TTFT ms\np50 / p99", numeric=True),
        Column("TPOT\np50 ms", numeric=True),
    ]
    engine = [Column("engine", numeric=True)] if several else []
    shown = trials[:MOST_TRIALS] if several else trials
    rows = [
        [*([str(trial.engine_rank)] if several else []), *_trial(trial, of_trials=of_trials)]
        for trial in shown
    ]
    return Table([*engine, *columns], rows, left_out(len(trials), MOST_TRIALS) if several else "")


def _trial(trial: TrialReport, *, of_trials: bool) -> list[Cell]:
    ttft, tpot = trial.ttft_ms, trial.tpot_ms
    begin: list[Cell] = [
        f"{integer(trial.first_step_requests)} / {integer(trial.first_step_tokens)}",
        "-" if trial.new_per_step is None else series(trial.new_per_step) or "none",
    ]
    return [
        "all" if trial.trial is None else str(trial.trial) if trial.complete else f"{trial.trial} cut",
        integer(trial.steps),
        *(begin if of_trials else []),
        percent(trial.budget_use_waiting_frac),
        integer(trial.preemptions),
        integer(trial.output_tokens_per_s),
        f"{milliseconds(ttft.p50)} / {milliseconds(ttft.p99)}" if ttft else "-",
        milliseconds(tpot.p50) if tpot else "-",
    ]


def request_time_table(run: RunReport) -> Table:
    """Where the requests' time went, over the run."""
    several = len({share.engine_rank for share in run.request_time}) > 1
    columns = [
        Column("requests' time"),
        Column("share", numeric=True),
        Column("ms", numeric=True),
        Column("requests", numeric=True),
        Column(""),
    ]
    shown = [share for share in run.request_time if share.share_frac >= LEAST_SHOWN_FRAC][:MOST_ROWS]
    rows: list[list[Cell]] = [
        [
            say(
                "{state}{cause}{engine}",
                state=state(share.state).word,
                cause=say(": {cause:cause}", cause=share.cause) if share.cause else "",
                engine=f" (engine {share.engine_rank})" if several else "",
            ),
            percent(share.share_frac),
            integer(share.time_ms),
            integer(share.requests),
            Bars(share.strip, Style.WARNING if share.cause else Style.GOOD),
        ]
        for share in shown
    ]
    less = len(run.request_time) - len(shown)
    more = f"{counted(less, 'part')} under 1 %: --format json lists them" if less else ""
    return Table(columns, rows, more)


def engine_time(run: RunReport) -> Facts:
    """Where the engines' time went: shares are of busy time."""
    several = run.config["engines"] > 1
    facts = []
    ranks = list(dict.fromkeys(share.engine_rank for share in run.engine_time))
    for rank in ranks[:MOST_ENGINES]:
        of_engine = [share for share in run.engine_time if share.engine_rank == rank]
        parts = [
            say("{state} {share:%}", state=ENGINE_STATES[share.state], share=share.busy_frac)
            for share in of_engine
            if share.busy_frac is not None
        ]
        idle = sum(share.time_ms for share in of_engine if share.busy_frac is None)
        text = say(
            "{busy:us} busy ({parts}){idle}",
            busy=1e3 * (sum(share.time_ms for share in of_engine) - idle),
            parts=joined(parts, ", "),
            idle=say(", {idle:us} idle", idle=1e3 * idle) if idle else "",
        )
        facts.append(Fact(f"engine {rank}" if several else "engine", [text]))
    if len(ranks) > MOST_ENGINES:
        facts.append(Fact("others", [left_out(len(ranks), MOST_ENGINES)]))
    return Facts(facts)


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
            say("{cap:cause}", cap=row.cap),
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
    return say("{loop} {kind}: {cause}{detail}", loop=row.loop, kind=row.kind, cause=cause, detail=detail)


def _line(location: str | None) -> Content:
    """``scheduler.py:924``; the whole path stands in the findings and in the JSON form."""
    if location is None:
        return ""
    return Styled(say("{line:code}", line=location.rpartition("/")[2]), Style.DIM)
