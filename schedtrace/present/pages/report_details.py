"""Full report of runs: tables of trials, times, exits, caps, latencies and counts, and the findings."""

from collections.abc import Iterator

from schedtrace.diagnose.analyze import Catalogue, FindingKind
from schedtrace.model.message import NOTHING, Message, StepList, joined, plain
from schedtrace.model.numbers import counted, integer, number, percent
from schedtrace.model.report import (
    MAX_STEPS,
    Advice,
    CapRow,
    CauseRow,
    Finding,
    RequestTime,
    RunReport,
    TrialReport,
)
from schedtrace.model.say import say
from schedtrace.model.statistics import (
    ClassLatency,
    Distribution,
    EngineFigures,
    Percentiles,
    Statistics,
)
from schedtrace.present.pages.run_header import SETTINGS, log_figures, not_judged
from schedtrace.present.phrases import ENGINE_STATES, in_brackets, on_engines, series, severity_word, state
from schedtrace.present.sections import (
    Band,
    Bars,
    Content,
    FactRow,
    Facts,
    Field,
    FindingSection,
    Page,
    Section,
    Strip,
    Style,
    Styled,
    Table,
    Text,
    figure_field,
    omission_note,
    table,
)

MOST_ROWS = 10
MOST_TRIALS = 32
"""Maximum number of rows of the trials' table if there are several engines."""
MOST_ENGINES = 8
LEAST_STATE_FRAC = 0.01
"""Share of the requests' time below which only JSON contains a state."""


TRIAL: list[Field[TrialReport]] = [
    figure_field("steps", lambda trial: integer(trial.steps)),
    figure_field("budget used\nif waiting", lambda trial: percent(trial.budget_use_waiting_frac)),
    figure_field("preempted", lambda trial: integer(trial.preemptions)),
    figure_field("output\ntok/s", lambda trial: integer(trial.output_tokens_per_s)),
    figure_field("TTFT ms\np50 / p99", lambda trial: p50_p99(trial.ttft_ms)),
    figure_field("TPOT\np50 ms", lambda trial: p50(trial.tpot_ms)),
]
FIRST_STEP: list[Field[TrialReport]] = [
    figure_field(
        "first step\nreq / tok",
        lambda trial: f"{integer(trial.first_step_requests)} / {integer(trial.first_step_tokens)}",
    ),
    Field(
        "new requests\nper step",
        lambda trial: "-" if trial.new_per_step is None else series(trial.new_per_step) or "none",
    ),
]


def trials_table(trials: list[TrialReport], *, log: bool = False) -> Table:
    """Return a table with a row per trial and engine.

    Args:
        trials: Trials of a run.
        log: Whether the record is a benchmark's log, which is a single trial.
    """
    of_trials = log or any(trial.trial is not None for trial in trials)
    several = len({trial.engine_rank for trial in trials}) > 1
    engine: Field[TrialReport] = figure_field("engine", lambda trial: str(trial.engine_rank))
    begin = FIRST_STEP if of_trials else []
    fields = [figure_field("trial" if of_trials else "", _trial), TRIAL[0], *begin, *TRIAL[1:]]
    return table(trials, [engine, *fields] if several else fields, most=MOST_TRIALS if several else None)


def _trial(trial: TrialReport) -> str:
    if trial.trial is None:
        return "all"
    return str(trial.trial) if trial.complete else f"{trial.trial} cut"


def p50_p99(times: Percentiles | Distribution | None) -> str:
    """Return the median and p99 in ms, such as ``12.0 / 34.5``, without the unit; ``-`` if unknown."""
    return f"{number(times.p50)} / {number(times.p99)}" if times else "-"


def p50(times: Percentiles | Distribution | None) -> str:
    """Return the median in milliseconds, or ``-``."""
    return number(times.p50) if times else "-"


def request_time_table(run: RunReport) -> Table:
    """Return the table that divides the requests' time among states, for the whole run."""
    several = len({share.engine_rank for share in run.request_time}) > 1
    shown = [share for share in run.request_time if share.share_frac >= LEAST_STATE_FRAC][:MOST_ROWS]
    fields: list[Field[RequestTime]] = [
        Field(
            "requests' time",
            lambda share: say(
                "{state}[: {cause:cause}]{engine}",
                share,
                state=state(share.state).word,
                engine=f" (engine {share.engine_rank})" if several else "",
            ),
        ),
        figure_field("share", lambda share: percent(share.share_frac)),
        figure_field("ms", lambda share: integer(share.time_ms)),
        figure_field("requests", lambda share: integer(share.requests)),
        Field("", lambda share: Bars(share.strip, Style.WARNING if share.cause else Style.GOOD)),
    ]
    less = len(run.request_time) - len(shown)
    return table(
        shown, fields, f"{counted(less, 'part')} under 1 %: --format json lists them" if less else ""
    )


PARTS = {
    "execution": "on the device",
    "schedule": "in schedule()",
    "update": "in update_from_output()",
    "between": "between two steps",
}
"""Phrase for the place where the time of each part of a step is spent."""


def step_excess(run: RunReport) -> Facts:
    """Return the excess of slow steps, and the part of it that no feature in the trace explains."""
    several = run.config["engines"] > 1
    sentence = (
        "{slow_steps:n} of {steps:n step} took {excess_ms:ms} longer {where} than their work explains; "
        "{unexplained_frac:%} of that goes with nothing in this trace[ (engine {engine})]."
    )
    texts: list[Content | Table | Strip] = [
        say(sentence, excess, where=PARTS[excess.part], engine=str(excess.engine_rank) if several else "")
        for excess in run.step_excess[:MOST_ENGINES]
    ]
    return Facts([FactRow("slow steps", texts)])


def engine_time_table(run: RunReport) -> Facts:
    """Return the states in which the engines spent their time, as shares of busy time."""
    several = run.config["engines"] > 1
    facts = []
    ranks = list(dict.fromkeys(share.engine_rank for share in run.engine_time))
    for rank in ranks[:MOST_ENGINES]:
        of_engine = [share for share in run.engine_time if share.engine_rank == rank]
        parts = [
            say("{state} {busy_frac:%}", share, state=ENGINE_STATES[share.state])
            for share in of_engine
            if share.busy_frac is not None
        ]
        idle, unknown = (
            sum(share.time_ms for share in of_engine if share.state == name)
            for name in ("idle", "not_recorded")
        )
        text = say(
            "{busy:ms} busy ({parts})[, {idle:ms} idle][, {unknown:ms} not recorded]",
            busy=sum(share.time_ms for share in of_engine if share.busy_frac is not None),
            parts=joined(parts, ", "),
            idle=idle,
            unknown=unknown or None,
        )
        facts.append(FactRow(f"engine {rank}" if several else "engine", [text]))
    if len(ranks) > MOST_ENGINES:
        facts.append(FactRow("others", [omission_note(len(ranks), MOST_ENGINES)]))
    return Facts(facts)


CAUSES: list[Field[CauseRow]] = [
    Field(
        "stopped or skipped",
        lambda row: Styled(
            say("{loop} {kind}: {cause:cause}{detail}", row, detail=in_brackets(row.detail)),
            None if row.refusal else Style.DIM,
        ),
    ),
    figure_field("times", lambda row: integer(row.exits)),
    figure_field("steps", lambda row: integer(row.steps)),
    figure_field("requests", lambda row: integer(row.requests or None)),
    figure_field("budget left\nmean tok", lambda row: integer(row.mean_budget_left)),
    Field("", lambda row: "inferred" if row.via == "inferred" else _line(row.location)),
]
"""Columns of the table of exits: where ``schedule()`` stopped or skipped, and which requests."""
CAPS: list[Field[CapRow]] = [
    Field("chunks made smaller by", lambda row: say("{cap:cause}", row)),
    figure_field("times", lambda row: integer(row.chunks)),
    figure_field("steps", lambda row: integer(row.steps)),
    figure_field("requests", lambda row: integer(row.requests)),
    figure_field("withheld\ntok", lambda row: integer(row.withheld_tokens)),
    figure_field("budget left\nmean tok", lambda row: integer(row.mean_budget_left)),
    Field("", lambda row: _line(row.location)),
]
"""Columns of the table of limits that made chunks smaller."""


def _line(location: str | None) -> Content:
    """Return a short location (``scheduler.py:924``); findings and JSON have the whole path."""
    if location is None:
        return ""
    return Styled(say("{line:code}", line=location.rpartition("/")[2]), Style.DIM)


def _class(row: ClassLatency) -> str:
    if row.by == "priority":
        return f"priority {row.name}"
    if row.by == "lora":
        return f"adapter {row.name}" if row.name else "base model"
    return "all requests"


LATENCY: list[Field[ClassLatency]] = [
    Field("latency", _class),
    figure_field("done", lambda row: integer(row.finished)),
    figure_field("queued", lambda row: percent(row.waiting_frac)),
    figure_field("queue ms\np50 / p99", lambda row: p50_p99(row.queue_ms)),
    figure_field("TTFT ms\np50 / p99", lambda row: p50_p99(row.ttft_ms)),
    figure_field("TPOT ms\np50 / p99", lambda row: p50_p99(row.tpot_ms)),
    figure_field("E2E ms\np50", lambda row: p50(row.e2e_ms)),
]
"""Columns of the table with a row per class of requests."""
DURATIONS: list[Field[tuple[str, Distribution]]] = [
    Field("ms", lambda row: row[0]),
    figure_field("count", lambda row: integer(row[1].count)),
    figure_field("mean", lambda row: number(row[1].mean)),
    figure_field("p50", lambda row: number(row[1].p50)),
    figure_field("p90", lambda row: number(row[1].p90)),
    figure_field("p99", lambda row: number(row[1].p99)),
    figure_field("max", lambda row: number(row[1].max)),
]
"""Columns of the table of step durations and times between tokens, with a row for each kind."""
ENGINES: list[Field[EngineFigures]] = [
    Field("engine", lambda row: "all" if row.engine_rank is None else str(row.engine_rank)),
    figure_field("done", lambda row: integer(row.requests_finished)),
    figure_field("steps", lambda row: integer(row.steps)),
    figure_field("running\nmean", lambda row: number(row.mean_running, 1)),
    figure_field("waiting\nmean", lambda row: number(row.mean_waiting, 1)),
    figure_field("output\ntok/s", lambda row: integer(row.output_tokens_per_s)),
    figure_field("KV\nused", lambda row: percent(row.kv_used_frac)),
    figure_field("preempted", lambda row: integer(row.preemptions)),
    figure_field("dummy\nbatches", lambda row: integer(row.dummy_batches)),
    figure_field("stalled\nms", lambda row: number(row.stalled_ms)),
]
MOST_SIDE_BY_SIDE = 16
"""Maximum number of engines shown; if there are more, those with the most and the fewest requests."""


def statistics_sections(statistics: Statistics) -> Iterator[Section]:
    """Yield the sections that have content."""
    if statistics.latency:
        yield table(statistics.latency, LATENCY, most=MOST_ROWS)
    durations = statistics.durations
    named = [
        ("step on the device", durations.device_ms),
        ("step start to start", durations.start_to_start_ms),
        ("between tokens", durations.inter_token_ms),
    ]
    if recorded := [(name, times) for name, times in named if times is not None]:
        yield table(recorded, DURATIONS)
    if len(statistics.engines) > 1:
        yield engines_table(statistics.engines)
    if facts := [*_counts(statistics)]:
        yield Facts(facts)


def engines_table(engines: list[EngineFigures], most: int = MOST_SIDE_BY_SIDE) -> Table:
    """Return a table of the data-parallel engines and their sum; if there are many, only of the extremes.

    Args:
        engines: Figures of each engine, followed by those of all engines together.
        most: Maximum number of rows, without the row for all.
    """
    *each, whole = engines
    shown = each
    if len(each) > most:  # those with the most and the fewest requests at a time, in their order
        by_load = sorted(each, key=lambda row: -((row.mean_running or 0) + (row.mean_waiting or 0)))
        extremes = [*by_load[: most - most // 2], *by_load[len(by_load) - most // 2 :]]
        shown = [row for row in each if row in extremes]
    less = len(each) - len(shown)
    more = f"{counted(less, 'engine')} between these: --format json lists them" if less else ""
    return table([*shown, whole], ENGINES, more)


def _counts(statistics: Statistics) -> Iterator[FactRow]:
    """Yield the use of the prefix cache and of drafts, and the outcomes of requests."""
    if statistics.prefix_cache:
        use = statistics.prefix_cache
        sources = [
            say("{tokens:n} {source}", tokens=tokens, source=source)
            for tokens, source in ((use.local_tokens, "local"), (use.external_tokens, "external"))
            if tokens is not None
        ]
        hits = say(
            "{hit_tokens:n} of {prompt_tokens:n prompt token} ({hit_frac:%}[: {sources}]); "
            "{requests_with_hit:n} of {requests:n request} found some",
            use,
            sources=joined(sources, ", "),
        )
        yield FactRow("cache", [hits])
    if statistics.drafts:
        accepted = say(
            "{accepted:n} of {drafts:n draft token} accepted ({accepted_frac:%}"
            "[, {invalid:n} forbidden by a grammar]); rejected ones were {wasted_frac:%} of all scheduled "
            "tokens",
            statistics.drafts,
        )
        yield FactRow("drafts", [accepted])
    if statistics.outcomes:
        ended = say(
            "[{there:n} were there, ]{arrived:n} arrived: {finished:n} finished, {aborted:n} aborted, "
            "{errored:n} ended otherwise[ ({by_scheduler:n} by the scheduler)], {unfinished:n} unfinished"
            "[, {unrecorded:n} left unrecorded]",
            statistics.outcomes,
            there=statistics.outcomes.present or 0,
            unrecorded=statistics.outcomes.unrecorded or 0,
        )
        yield FactRow("requests", [ended])


LEAST_SHOWN_FRAC = 0.01
"""Share of the run below which an estimated cost is within the error of the model of step times."""


def trials_page(run: RunReport) -> Page[RunReport]:
    """Return the page of a run's trials, shown when the run ends."""
    return Page(run, lambda shown: [trials_table(shown.trials)])


def details(run: RunReport) -> Iterator[Section]:
    """Yield the sections below the first screen: every table, and every finding with its symptoms."""
    yield trials_table(run.trials, log=run.config["exits_via"] is None)
    yield from log_figures(run)
    if run.strip:
        yield _strip(run)
    if run.request_time:
        yield request_time_table(run)
    if run.engine_time:
        yield engine_time_table(run)
    if run.step_excess:
        yield step_excess(run)
    if run.causes:
        yield table(run.causes, CAUSES, most=MOST_ROWS)
    if run.caps:
        yield table(run.caps, CAPS, most=MOST_ROWS)
    yield from finding_sections(run.findings, engines=run.config["engines"])
    if run.statistics is not None:
        yield from statistics_sections(run.statistics)
    if run.settings:
        yield table(run.settings, SETTINGS)
    yield from not_judged(run)


def finding_sections(findings: list[Finding], *, engines: int) -> Iterator[FindingSection]:
    """Yield every finding, followed by its symptoms."""
    for finding in findings:
        inferred = ", inferred" if finding.via == "inferred" else ""
        about = [say("cause {cause:cause}{inferred}", finding, inferred=inferred)] if finding.cause else []
        if engines > 1:
            about.append(say("{where}", where=on_engines(finding, engines)))
        paragraphs: list[Content] = [finding.message]
        if cost := _cost(finding):
            paragraphs.append(cost)
        paragraphs += finding.refuted
        paragraphs += [say("{line:code}", line=line) for line in getattr(finding.evidence, "stacks", [])]
        if finding.steps:
            paragraphs.append(Styled(_where(finding, engines), Style.DIM))
        yield FindingSection(
            severity_word(finding.severity),
            finding.code,
            joined(about, "  "),
            paragraphs,
            joined([action(advice) for advice in finding.advice]),
            finding.engine_rank,
        )
        yield from finding_sections(finding.symptoms, engines=engines)


def _strip(run: RunReport) -> Strip:
    """Return a strip of budget use over the run, with a band below it that marks waiting requests."""
    shares = [cell.waiting_frac for cell in run.strip if cell.waiting_frac is not None]
    use = Bars([cell.use_frac for cell in run.strip], Style.GOOD)
    waiting: Bars | str = Bars(shares, Style.WARNING)
    if not any(shares):
        waiting = "no request" if shares else "not recorded"
    whose = "engine 0's steps" if run.config["engines"] > 1 else "the steps"
    share = ", share with requests waiting" if shares else ""
    legend = f"equal parts of {whose}, first to last: highest use{share}"
    return Strip([Band("budget use", use), Band("waiting", waiting)], legend)


def _cost(finding: Finding) -> Message:
    """Return the finding's cost with its certainty; nothing if the cost is within the estimate's error."""
    if finding.cost_ms is None or finding.cost_frac is None:
        return NOTHING
    sure: Text = "measured"
    if finding.cost_error_frac is not None:
        if finding.cost_frac < LEAST_SHOWN_FRAC:
            return NOTHING
        sure = say("estimated; the model of step times is typically {cost_error_frac:%} off", finding)
    return say("cost: about {cost_ms:ms}, {cost_frac:%} of the {cost_of} ({sure})", finding, sure=sure)


def _where(finding: Finding, engines: int) -> Message:
    return say(
        "[At {location:code}. ]{steps}[{several:?} of engine {rank}].[ For instance {example}]",
        finding,
        steps=step_list(finding),
        several=engines > 1,
        rank=str(finding.engine_rank),
    )


def step_list(finding: Finding) -> Message:
    """Return the beginning of a sentence with the listed steps that show the finding."""
    return say("{steps}", steps=StepList(finding.steps, whole=len(finding.steps) < MAX_STEPS))


def action(advice: Advice) -> Message:
    """Return the advice and its cost as whole sentences."""
    end = "" if plain(advice.message).endswith(".") else "."
    return say("{message}{end}[ Costs: {costs}][ {tested}]", advice, end=end)


KIND: list[Field[FindingKind]] = [
    Field("finding", lambda kind: Styled(kind.code, Style.STRONG)),
    Field("meaning", lambda kind: kind.summary),
    Field("needs", lambda kind: Styled(", ".join(kind.needs), Style.DIM)),
]


def catalogue_page(catalogue: Catalogue) -> Page[Catalogue]:
    """Return the page of all kinds of findings, each with the facts that a record must contain for it."""
    return Page(catalogue, lambda shown: [table(shown.findings, KIND)])
