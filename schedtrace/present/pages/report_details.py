"""A report of runs: figures of the trials, where requests waited and why, findings."""

from collections.abc import Iterator

from schedtrace.model.message import NOTHING, Message, StepList, joined
from schedtrace.model.report import MAX_STEPS, Advice, Finding, RunReport
from schedtrace.model.say import say
from schedtrace.present.pages.report_tables import (
    CAPS,
    CAUSES,
    MOST_ROWS,
    engine_time,
    request_time_table,
    statistics_sections,
    step_excess,
    trials_table,
)
from schedtrace.present.pages.run_header import SETTINGS, log_figures, not_judged
from schedtrace.present.phrases import plain
from schedtrace.present.sections import (
    Band,
    Bars,
    Content,
    FindingSection,
    Page,
    Section,
    Strip,
    Style,
    Styled,
    Text,
    table,
)
from schedtrace.present.words import on_engines, severity

LEAST_SHOWN_FRAC = 0.01
"""An estimated cost below this share of the run is below what the model of step times resolves."""


def trials_page(run: RunReport) -> Page[RunReport]:
    """Return the trials of a run, as shown when it ends."""
    return Page(run, lambda shown: [trials_table(shown.trials)])


def details(run: RunReport) -> Iterator[Section]:
    """Yield what stands below the first screen: every table, and every finding with its symptoms."""
    yield trials_table(run.trials, log=run.config["exits_via"] is None)
    yield from log_figures(run)
    if run.strip:
        yield _strip(run)
    if run.request_time:
        yield request_time_table(run)
    if run.engine_time:
        yield engine_time(run)
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
        yield _finding(finding, engines)
        yield from finding_sections(finding.symptoms, engines=engines)


def _strip(run: RunReport) -> Strip:
    """Return budget use over the run, and below it where requests waited."""
    shares = [cell.waiting_frac for cell in run.strip if cell.waiting_frac is not None]
    use = Bars([cell.use_frac for cell in run.strip], Style.GOOD)
    waiting: Bars | str = Bars(shares, Style.WARNING)
    if not any(shares):
        waiting = "no request" if shares else "not recorded"
    whose = "engine 0's steps" if run.config["engines"] > 1 else "the steps"
    share = ", share with requests waiting" if shares else ""
    legend = f"equal parts of {whose}, first to last: highest use{share}"
    return Strip([Band("budget use", use), Band("waiting", waiting)], legend)


def _finding(finding: Finding, engines: int) -> FindingSection:
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
    return FindingSection(
        severity(finding.severity),
        finding.code,
        joined(about, "  "),
        paragraphs,
        joined([action(advice) for advice in finding.advice]),
        finding.engine_rank,
    )


def _cost(finding: Finding) -> Message:
    """Return the finding's cost and its certainty; nothing below an estimate's resolution."""
    if finding.cost_ms is None or finding.cost_frac is None:
        return NOTHING
    sure: Text = "measured"
    if finding.cost_error_frac is not None:
        if finding.cost_frac < LEAST_SHOWN_FRAC:
            return NOTHING
        sure = say("estimated; the model of step times is typically {cost_error_frac:%} off", finding)
    return say("cost: about {cost_ms:ms}, {cost_frac:%} of the {cost_of} ({sure})", finding, sure=sure)


def _where(finding: Finding, engines: int = 1) -> Message:
    return say(
        "[At {location:code}. ]{steps}[{several:?} of engine {rank}].[ For instance {example}]",
        finding,
        steps=step_list(finding),
        several=engines > 1,
        rank=str(finding.engine_rank),
    )


def step_list(finding: Finding) -> Message:
    """Return the steps that show the finding, as far as they are listed; at the start of a sentence."""
    return say("{steps}", steps=StepList(finding.steps, whole=len(finding.steps) < MAX_STEPS))


def action(advice: Advice) -> Message:
    """Return what to do, with what it costs, as whole sentences."""
    end = "" if plain(advice.message).endswith(".") else "."
    return say("{message}{end}[ Costs: {costs}][ {tested}]", advice, end=end)
