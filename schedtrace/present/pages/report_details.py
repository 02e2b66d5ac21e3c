"""A report of runs: figures of the trials, where requests waited and why, findings."""

from collections.abc import Iterator

from schedtrace.model.message import Duration, Message, Share, StepList, joined
from schedtrace.model.report import MAX_STEPS, Advice, RunReport
from schedtrace.model.report import Finding as Found
from schedtrace.model.say import say
from schedtrace.present.pages.names import on_engines
from schedtrace.present.pages.report_tables import (
    cap_table,
    cause_table,
    engine_time,
    request_time_table,
    trials_table,
)
from schedtrace.present.pages.run_header import log_figures, not_judged, settings_table
from schedtrace.present.pages.statistics import statistics_sections
from schedtrace.present.phrases import plain
from schedtrace.present.sections import (
    Band,
    Bars,
    Content,
    Finding,
    Page,
    Section,
    Strip,
    Style,
    Styled,
    Text,
)
from schedtrace.present.words import severity

LEAST_SHOWN_FRAC = 0.01
"""An estimated cost below this share of the run is below what the model of step times resolves."""


def trials_page(run: RunReport) -> Page[RunReport]:
    """The trials of a run, as they are shown when it ends."""
    return Page(run, lambda shown: [trials_table(shown.trials)])


def details(run: RunReport) -> Iterator[Section]:
    """What stands below the first screen: every table, and every finding with its symptoms."""
    yield trials_table(run.trials, log=run.config["exits_via"] is None)
    yield from log_figures(run)
    if run.strip:
        yield _strip(run)
    if run.request_time:
        yield request_time_table(run)
    if run.engine_time:
        yield engine_time(run)
    yield from (make(run) for make in (cause_table, cap_table) if make(run).rows)
    yield from finding_sections(run.findings, engines=run.config["engines"])
    if run.statistics is not None:
        yield from statistics_sections(run.statistics)
    if run.settings:
        yield settings_table(run.settings)
    yield from not_judged(run)


def finding_sections(findings: list[Found], *, engines: int) -> Iterator[Finding]:
    """Every finding, its symptoms after it."""
    for finding in findings:
        yield _finding(finding, engines)
        yield from finding_sections(finding.symptoms, engines=engines)


def _strip(run: RunReport) -> Strip:
    """Budget use over the run, and below it where requests waited."""
    known = [cell.waiting_frac for cell in run.strip if cell.waiting_frac is not None]
    use = Bars([cell.use_frac for cell in run.strip], Style.GOOD)
    waiting: Bars | str = Bars(known, Style.WARNING)
    if not any(known):
        waiting = "no request" if known else "not recorded"
    whose = "engine 0's steps" if run.config["engines"] > 1 else "the steps"
    share = ", share with requests waiting" if known else ""
    legend = f"equal parts of {whose}, first to last: highest use{share}"
    return Strip([Band("budget use", use), Band("waiting", waiting)], legend)


def _finding(found: Found, engines: int) -> Finding:
    about: list[Text] = []
    if found.cause:
        inferred = ", inferred" if found.via == "inferred" else ""
        about.append(say("cause {cause:cause}{inferred}", cause=found.cause, inferred=inferred))
    if engines > 1:
        about.append(on_engines(found, engines))
    paragraphs: list[Content] = [found.message]
    if cost := _cost(found):
        paragraphs.append(cost)
    paragraphs += found.refuted
    if found.steps:
        paragraphs.append(Styled(_where(found, engines), Style.DIM))
    names = {f"a{at}": part for at, part in enumerate(about)}
    return Finding(
        severity(found.severity),
        found.code,
        say("  ".join(f"{{{name}}}" for name in names), **names),
        paragraphs,
        joined([action(advice) for advice in found.advice]),
        found.engine_rank,
    )


def _cost(found: Found) -> Text:
    """What it cost, and how sure that is; nothing below what an estimate resolves."""
    if found.cost_ms is None or found.cost_frac is None:
        return ""
    sure: Text = "measured"
    if found.cost_error_frac is not None:
        if found.cost_frac < LEAST_SHOWN_FRAC:
            return ""
        off = Share(found.cost_error_frac)
        sure = say("estimated; the model of step times is typically {off} off", off=off)
    cost, share = Duration(1e3 * found.cost_ms), Share(found.cost_frac)
    of = found.cost_of
    return say("cost: about {cost}, {share} of the {of} ({sure})", cost=cost, share=share, of=of, sure=sure)


def _where(found: Found, engines: int = 1) -> Text:
    place = say("At {location:code}. ", location=found.location) if found.location else ""
    instance = say(" For instance {example}", example=found.example) if found.example else ""
    engine = f" of engine {found.engine_rank}" if engines > 1 else ""
    return say(
        "{place}{steps}{engine}.{instance}",
        place=place,
        steps=step_list(found),
        engine=engine,
        instance=instance,
    )


def step_list(found: Found) -> Message:
    """The steps that show it, as far as they are listed; at the start of a sentence."""
    return say("{steps}", steps=StepList(found.steps, whole=len(found.steps) < MAX_STEPS))


def action(advice: Advice) -> Message:
    """What to do, with what it costs, as whole sentences."""
    costs = say(" Costs: {costs}", costs=advice.costs) if advice.costs else Message("")
    costs = joined([costs, say(" {tested}", tested=advice.tested)], "") if advice.tested else costs
    end = "" if plain(advice.message).endswith(".") else "."
    return say("{advice}{end}{costs}", advice=advice.message, end=end, costs=costs)
