"""Pages of a load under other settings: a replay's check, one change, every combination, or proposals.

A fleet's load may also be replayed through another router (``fleet_replay_page``).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from schedtrace.model.message import Message, given, joined, phrase
from schedtrace.model.numbers import integer, number, percent
from schedtrace.model.say import say
from schedtrace.model.what_if import CONCURRENCY, Bound, Configuration, Figure, Replays, as_options
from schedtrace.present.phrases import change_range
from schedtrace.present.sections import (
    Cell,
    Commands,
    Field,
    Headline,
    Note,
    Page,
    RootCauseSection,
    Section,
    Style,
    Styled,
    Table,
    answer_note,
    basis_note,
    figure_field,
    table,
)

LARGE_FRAC = 0.2
"""Share of extrapolated steps above which the page of a change warns."""
EXTRAPOLATED_FRAC = 0.05
"""Share of a configuration's extrapolated steps above which the page of a sweep warns."""
MOST_REFUSED = 10
WORSE_FRAC = 0.02
"""Minimum relative change of a figure that counts as a gain or a cost."""
UNKNOWN = number(None)
"""Placeholder of a missing value; a column of nothing but placeholders is left out."""


def replay_page(replays: Replays) -> Page[Replays]:
    """Return the page of one change, or of the unchanged replay."""
    return Page(replays, _replay)


def advise_page(replays: Replays) -> Page[Replays]:
    """Return the page of the proposed configurations."""
    return Page(replays, _advice)


def sweep_page(replays: Replays) -> Page[Replays]:
    """Return the page of all configurations, with the Pareto front marked."""
    return Page(replays, _sweep)


def tried_changes(replays: Replays, *, best: bool) -> Message:
    """Return every change that was tried, by setting, with its effect on the objective.

    Args:
        replays: Replays of ``analyze --predict``.
        best: Whether to return only the best value of each setting, and how many values were tried.
    """
    by_settings: dict[tuple[str, ...], list[Configuration]] = {}
    for row in replays.configurations:
        if not row.recorded:
            by_settings.setdefault(tuple(row.changes), []).append(row)
    worsening = partial(_worsening, objective=replays.objective)
    outcomes = []
    for rows in sorted(by_settings.values(), key=lambda rows: min(map(worsening, rows))):
        ordered = sorted(rows, key=worsening)
        shown = [_outcome(row, replays.objective) for row in (ordered[:1] if best else ordered)]
        words = "{outcomes}[ (best of {tried:n})]"
        outcomes.append(
            say(words, outcomes=joined(shown, ", "), tried=len(rows) if best and rows[1:] else None)
        )
    return say("[{objective} with {outcomes}.]", replays, outcomes=joined(outcomes, "; "))


def _worsening(row: Configuration, objective: str | None) -> float:
    """Return how much worse a change makes the objective; infinite if the change was not replayed."""
    shown = row.figure(objective or "")
    if shown is None or shown.change_frac is None:
        return math.inf
    return -shown.change_frac if shown.higher_is_better else shown.change_frac


def _outcome(row: Configuration, objective: str | None) -> Message:
    """Return a change with its effect on the objective, or why it could not be replayed."""
    dropped = [f"without --{name.replace('_', '-')}" for name, value in row.changes.items() if value is None]
    change = " ".join([*as_options(row.changes), *dropped])
    shown = row.figure(objective or "")
    if CONCURRENCY in row.changes:
        change = f"the client's {change}"
    if shown is None or shown.change_frac is None:
        return say("{change:code} is not possible", change=change)
    return say("{change:code} {change_frac:+%}", change=change, change_frac=shown.change_frac)


def _release_warning(replays: Replays) -> Iterator[Message]:
    recorded = replays.load.recorded_version
    # The build after the plus is another, such as the CPU's; the scheduler is the release's.
    if recorded is not None and recorded.partition("+")[0] != replays.vllm_version.partition("+")[0]:
        words = "Recorded with vLLM {recorded_version}, whose scheduler may decide otherwise."
        yield say(words, replays.load)


def _notes(notes: Sequence[Message | str]) -> Iterator[Note]:
    for note in notes:
        yield Note(Styled(note, Style.DIM))


def _changes(configuration: Configuration, replays: Replays) -> str:
    """Return the changed settings with the values before and after the change."""
    return ", ".join(
        f"{name} {replays.settings[name]} -> {value}" for name, value in configuration.changes.items()
    )


def _change(shown: Figure) -> str:
    change = percent(shown.change_frac, signed=True)
    if shown.low_frac is None or shown.high_frac is None:
        return change
    return f"{change} ({change_range(shown.low_frac, shown.high_frac)})"


def _bound_name(bound: Bound) -> str:
    return f"{bound.latency.upper()} p{bound.percentile:g}"


def _replay(replays: Replays) -> Iterator[Section]:
    base, *changed = replays.configurations
    shown: Configuration = changed[0] if changed else base
    decides = say(
        "vLLM {vllm_version}'s own scheduler decides every step; only the step times are a model.", replays
    )
    title = say(
        "Replay of {label:code}: {requests:n request}, [with {changes:code}][{unchanged:?}as recorded]",
        replays.load,
        changes=_changes(shown, replays),
        unchanged=not changed,
    )
    yield Headline(title, "", [decides], list(_replay_warnings(replays, shown)))
    if replays.baseline is not None and replays.baseline.compared_steps:
        yield Note(
            say(
                "{same_steps:n} of {compared_steps:n} steps have the same requests with the same tokens as "
                "recorded.",
                replays.baseline,
            ),
            "Check:",
        )
    yield _figures_table("counts per trial", base, shown, decided=True)
    yield _figures_table("resulting times", base, shown, decided=False)
    yield from _notes(replays.notes)
    yield basis_note("Step times:", replays.step_times)
    origin = "as recorded" if shown.kv_blocks == base.kv_blocks else "as set"
    yield basis_note("KV cache:", say("{kv_blocks:n} blocks, {origin}.", shown, origin=origin))
    for configuration in replays.configurations:
        if configuration.folder is not None:
            yield Note(say("schedtrace analyze {folder:code}", configuration), "Next:")


def _replay_warnings(replays: Replays, shown: Configuration) -> Iterator[Message]:
    yield from _release_warning(replays)
    if (shown.extrapolated_frac or 0.0) >= LARGE_FRAC:
        yield say(
            "{extrapolated_frac:%} of the steps lie outside what was recorded: their times are extrapolated.",
            shown,
        )
    if not shown.recorded and replays.load.trials < 2:  # noqa: PLR2004  # for a spread
        yield say(
            "One trial does not show how far trials differ[{given:!}, so no interval is given][{given:?}: "
            "intervals use the misfit of its replay instead]: record {trials:setting}.",
            given=any(figure.low_frac is not None for figure in shown.figures),
            trials="--trials 3",
        )


@dataclass(frozen=True)
class _Row:
    """Row of a figure: recorded, replayed and, if there is a change, with the change."""

    recorded: float | None
    replayed: float | None
    shown: Figure


def _figures_table(heading: str, base: Configuration, shown: Configuration, *, decided: bool) -> Table:
    rows = []
    for each in (each for each in shown.figures if each.decided is decided):
        baseline = each if shown is base else base.figure(each.name)
        recorded = baseline.before if baseline is not None else None
        rows.append(_Row(recorded, each.value if shown is base else each.before, each))
    fields: list[Field[_Row]] = [
        Field(heading, lambda row: f"{row.shown.name} {row.shown.unit}".strip()),
        figure_field("recorded", lambda row: number(row.recorded)),
        figure_field("replayed", lambda row: number(row.replayed)),
    ]
    if shown is not base:
        fields.append(figure_field("changed", lambda row: number(row.shown.value)))
        fields.append(figure_field("change", lambda row: Styled(_change(row.shown), _style(row.shown))))
    return table([row for row in rows if row.recorded or row.replayed or row.shown.value], fields)


def _style(shown: Figure) -> Style | None:
    if shown.higher_is_better is None or not shown.change_frac:
        return None
    low, high = shown.low_frac, shown.high_frac
    if low is not None and high is not None and low < 0 < high:
        return Style.DIM
    return Style.GOOD if (shown.change_frac > 0) == shown.higher_is_better else Style.BAD


def _advice(replays: Replays) -> Iterator[Section]:
    base = replays.configurations[0]
    proposals = [row for row in replays.configurations if row.place]
    now = say(
        "As recorded (replayed): {bounds}; {goodput_requests_per_s:n2} requests/s meet {slo}.",
        base,
        bounds=_bounds(replays.slo, base),
        slo=", ".join(f"{_bound_name(bound)} <= {phrase(given(bound.limit_ms))} ms" for bound in replays.slo),
    )
    yield Headline(say("Advice for {label:code}", replays.load), "", [now], list(_release_warning(replays)))
    count = len(replays.configurations)
    if not proposals:
        tried = f"The objective is not met, and none of {count} configurations is better."
        yield Note("The objective is met: nothing to change." if base.meets_slo else tried)
    for proposal in proposals:
        yield _proposal(proposal, replays)
    if replays.commands:
        yield Commands("Try:", replays.commands)
    replayed = f"{count} configurations replayed with vLLM's scheduler. {replays.step_times}"
    yield from _notes([say("{replayed}", replayed=replayed), *replays.notes])


def _proposal(proposal: Configuration, replays: Replays) -> RootCauseSection:
    meets = "meets the objective" if proposal.meets_slo else "does not meet the objective"
    better, worse = (_moved(proposal.figures, worse=worse) for worse in (False, True))
    outside = proposal.extrapolated_frac if (proposal.extrapolated_frac or 0) >= LARGE_FRAC else None
    paragraphs = [
        say(
            "{bounds}; {goodput_requests_per_s:n2} requests/s meet it.",
            proposal,
            bounds=_bounds(replays.slo, proposal),
        ),
        say("[Gains: {better}.]", better=better),
        say("Costs: {worse}.", worse=worse or "nothing that was measured"),
        say("[Removes: {codes}.]", codes=", ".join(proposal.removed or [])),
        say("[Brings: {codes}.]", codes=", ".join(proposal.appeared or [])),
        say("[{outside:%} of its steps lie outside what was recorded.]", outside=outside),
    ]
    style = Style.GOOD if proposal.meets_slo else Style.WARNING
    changes = say("{changes:code}", changes=_changes(proposal, replays))
    return RootCauseSection(
        proposal.place or 0,
        Styled(changes, style),
        meets,
        [paragraph for paragraph in paragraphs if paragraph],
        [],
    )


def _moved(figures: Sequence[Figure], *, worse: bool) -> str:
    """Return the times that a change improves, or those that it worsens, with their changes."""
    return ", ".join(
        f"{each.name} {_change(each)}"
        for each in figures
        if not each.decided
        and each.change_frac is not None
        and each.higher_is_better is not None
        and abs(each.change_frac) >= WORSE_FRAC
        and ((each.change_frac > 0) != each.higher_is_better) is worse
    )


def _bounds(slo: Sequence[Bound], configuration: Configuration) -> str:
    values = zip(slo, configuration.bounds_ms, strict=True)
    return ", ".join(f"{_bound_name(bound)} {number(value)} ms" for bound, value in values)


@dataclass(frozen=True)
class _Column:
    """Column of a sweep; if all rows have the same value, it becomes a line above the table."""

    heading: str
    """Heading of the column, with line breaks to keep the column narrow."""
    text: Callable[[Configuration], str]
    name: str = ""
    """Name for use in a sentence; empty if equal to the heading."""


def _sweep(replays: Replays) -> Iterator[Section]:
    shown = [row for row in replays.configurations if row.refused is None]
    refused = [row for row in replays.configurations if row.refused is not None]
    settings = [_setting(name, replays) for name in replays.settings]
    varying, alike = _split(settings + _columns(replays.slo), shown)
    yield _sweep_headline(replays, shown, alike)
    if shown:
        fields = [
            Field("", _mark),
            *(figure_field(column.heading, partial(_cell, column)) for column in varying),
        ]
        yield table(shown, fields)
        latencies = ", ".join(
            name.replace("_", " ").upper().replace(" P", " p") for name in replays.objectives[1:]
        )
        recorded = " R: as recorded." if replays.recorded_configuration is not None else ""
        good = " good req/s: requests a second that meet every bound themselves." if replays.slo else ""
        legend = f"Times in ms. * Pareto front of output tok/s against {latencies}.{recorded}{good}"
        yield Note(Styled(legend, Style.DIM))
    if refused:
        more = len(refused) - MOST_REFUSED
        left_out = f"... and {more} more: --format json" if more > 0 else ""
        fields = [
            Field("refused", lambda row: " ".join(f"{each.name}={each.text(row)}" for each in settings)),
            Field("why", lambda row: row.refused or ""),
        ]
        yield table(refused[:MOST_REFUSED], fields, left_out)
    yield from _notes(replays.notes)


def _sweep_headline(replays: Replays, shown: list[Configuration], alike: list[tuple[str, str]]) -> Headline:
    rows = replays.configurations
    title = say("Sweep of {label:code}: {rows:n configuration}", replays.load, rows=len(rows))
    load = say(
        "{requests:n request}[{several:?}, {trials:n trial}], {prompt_tokens:n prompt token} and "
        "{output_tokens:n output token}, scheduled by vLLM {vllm_version} in virtual time",
        replays.load,
        several=replays.load.trials > 1,
        vllm_version=replays.vllm_version,
    )
    varied = [
        name
        for name, value in replays.settings.items()
        if len({str(row.changes.get(name, value)) for row in rows}) > 1
    ]
    lines: list[Message | str] = [load, f"Varied: {', '.join(varied)}. {replays.step_times}"]
    if alike:
        lines.append(f"In all of them: {', '.join(f'{name} {text}' for name, text in alike)}.")
    return Headline(title, "", list(lines), [*_release_warning(replays), *_sweep_warnings(replays, shown)])


def _sweep_warnings(replays: Replays, shown: list[Configuration]) -> Iterator[Message | str]:
    outside = [row for row in shown if (row.extrapolated_frac or 0) >= EXTRAPOLATED_FRAC]
    if outside:
        yield say(
            "In {rows:n} of {all:n configuration}, {least:%} of the steps or more lie outside "
            "the recorded range (column extrapol.): their times are extrapolated.",
            rows=len(outside),
            all=len(shown),
            least=EXTRAPOLATED_FRAC,
        )
    unfinished = [row for row in shown if (row.finished or 0) < replays.load.requests]
    if unfinished:
        yield say(
            "In {rows:n configuration} not every request finishes (aborted when recorded, or "
            "refused for its length): figures are of those that do.",
            rows=len(unfinished),
        )
    if replays.slo and not any(row.meets_slo for row in shown):
        yield "No configuration meets every bound."


def _setting(name: str, replays: Replays) -> _Column:
    """Return the column of a setting, with values such as ``4096``, as on a command line."""

    def formatted_value(row: Configuration) -> str:
        value = row.changes.get(name, replays.settings[name])
        return "default" if value is None else str(value)

    return _Column(name.replace("_", "\n"), formatted_value, name)


def _columns(slo: Sequence[Bound]) -> list[_Column]:
    columns = [_latency("output\ntok/s", "output")]
    columns += [
        _latency(name.replace(" ", "\n"), name)
        for name in ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p99")
    ]
    usual = {"ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p99"}
    columns += [_bound(at, bound) for at, bound in enumerate(slo) if bound.name not in usual]
    if slo:
        columns.append(_Column("good\nreq/s", lambda row: number(row.goodput_requests_per_s)))
        columns.append(_Column("SLO\nmet", lambda row: "yes" if row.meets_slo else "no"))
    return [
        *columns,
        _Column("pre-\nempt.", lambda row: integer(row.preemptions), "preemptions"),
        _Column("extra-\npol.", lambda row: percent(row.extrapolated_frac), "extrapolated steps"),
        _Column("finished", lambda row: integer(row.finished)),
    ]


def _bound(at: int, bound: Bound) -> _Column:
    return _Column(_bound_name(bound).replace(" ", "\n"), lambda row: number(row.bounds_ms[at]))


def _latency(heading: str, name: str) -> _Column:
    def formatted_value(row: Configuration) -> str:
        shown = row.figure(name)
        return number(None if shown is None else shown.value)

    return _Column(heading, formatted_value)


def _split(columns: list[_Column], rows: list[Configuration]) -> tuple[list[_Column], list[tuple[str, str]]]:
    """Return the columns whose rows differ, and the other columns with their common value."""
    varying, alike = [], []
    for column in columns:
        texts = {column.text(row) for row in rows}
        if len(texts) == 1 and len(rows) > 1:
            name = column.name or column.heading.replace("\n", " ")
            alike += [(name, text) for text in texts if text != UNKNOWN]
        else:
            varying.append(column)
    return varying, alike


def _mark(row: Configuration) -> Cell:
    mark = f"{'*' if row.pareto else ''}{'R' if row.recorded else ''}"
    return Styled(mark, Style.GOOD) if row.pareto else mark


def _cell(column: _Column, row: Configuration) -> Cell:
    text = column.text(row)
    return Styled(text, Style.STRONG) if row.pareto else text


ENGINES, ROUTER = "data_parallel_size", "router"

ROUTER_WORDS = {
    "better": "The router is to blame: behind {router:code},",
    "worse": "The router is not to blame: behind {router:code},",
    "unclear": "The router is not to blame as far as this replay can tell: behind {router:code},",
}
ENGINES_WORDS = {
    "better": "{now:n engine} instead of {before:n} serve requests faster:",
    "worse": "{now:n engine} instead of {before:n} serve requests more slowly:",
    "unclear": "{now:n engine} instead of {before:n} would do as far as this replay can tell:",
}


def fleet_replay_page(replays: Replays) -> Page[Replays]:
    """Return the page of a fleet's replay: the answer, the figures, and the basis of the answer."""
    return Page(replays, _sections)


def _sections(replays: Replays) -> Iterator[Section]:
    shown = replays.configurations[1]
    for section in replay_page(replays).sections:
        if isinstance(section, Headline):
            words = "{requests:n request} of {engines:n engine}, replayed on {now:n} behind {router:code}"
            title = say(
                words,
                replays.load,
                engines=replays.settings[ENGINES],
                now=shown.changes[ENGINES],
                router=shown.changes[ROUTER],
            )
            # The load of a fleet has no trials, of which a warning may ask for more.
            warnings = [
                warning
                for warning in section.warnings
                if not (isinstance(warning, Message) and "trials" in warning.arguments)
            ]
            yield Headline(title, section.about, section.lines, warnings)
            yield answer_note(fleet_answer(replays))
            if replays.load.part is not None:
                yield basis_note("Replayed:", say("{part}.", part=replays.load.part.words))
        else:
            yield section


def fleet_answer(replays: Replays) -> Message:
    """Return whether this number of engines is enough, and whether the router is to blame."""
    shown, judged = replays.configurations[1], replays.baseline and replays.baseline.judged_by
    figure = shown.figure(judged or "")
    if figure is None or figure.change_frac is None:
        return say("The replay has no latency by which to judge.")
    low, high = figure.low_frac, figure.high_frac
    interval, effect = "", "unclear"
    if low is not None and high is not None:
        interval = change_range(low, high)
        effect = "worse" if low > 0 else "better" if high < 0 else "unclear"
    before, now = replays.settings[ENGINES], shown.changes[ENGINES]
    words = ROUTER_WORDS if now == before else ENGINES_WORDS
    return say(
        f"{words[effect]} {{name}} changes by {{change_frac:+%}}[ (90 % interval: {{interval}})].",
        figure,
        **({"router": shown.changes[ROUTER]} if now == before else {"now": now, "before": before}),
        interval=interval,
    )
