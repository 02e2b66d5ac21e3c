"""Two runs compared: the verdict first, then what it rests on."""

from collections.abc import Iterator

from schedtrace.model.comparison import CauseChange, Comparison, ConfigChange, FindingChange
from schedtrace.model.message import CauseWord, Code, Message, Share, message
from schedtrace.present.numbers import integer, percent
from schedtrace.present.pages.decisions import decisions_sections
from schedtrace.present.pages.metrics import legend, metrics_table, noise_floors
from schedtrace.present.pages.report_tables import left_out
from schedtrace.present.sections import (
    Cell,
    Column,
    Finding,
    Headline,
    Note,
    Page,
    Section,
    Style,
    Styled,
    Table,
    Text,
)
from schedtrace.present.words import CHANGES

MOST_SETTINGS = 15
MOST_CAUSES = 10


def comparison_page(comparison: Comparison) -> Page[Comparison]:
    """A comparison."""
    return Page(comparison, _sections)


def _sections(comparison: Comparison) -> Iterator[Section]:
    base = _side("base", comparison.base_label, comparison.base_path)
    new = _side("new", comparison.new_label, comparison.new_path)
    title = message("Verdict: {verdict}", verdict=comparison.verdict)
    yield Headline(title, "", [base, new], list(comparison.notes))
    yield _settings(comparison.config)
    yield metrics_table(comparison.metrics)
    if floors := noise_floors(comparison.metrics):
        yield Note(floors)
    yield Note(Styled(legend(comparison), Style.DIM))
    yield from decisions_sections(comparison.decisions)
    yield _causes(comparison.causes)
    if not comparison.findings:
        yield Note("No findings on either side.")
    yield from (_finding(change) for change in comparison.findings)


def _side(side: str, label: str, path: str) -> Message:
    where = "" if label == path else message(", {path}", path=Code(path))
    return message("{side}: {label}{where}", side=side, label=Code(label), where=where)


def _settings(changes: list[ConfigChange]) -> Table | Note:
    if not changes:
        return Note("No setting differs.")
    columns = [Column("setting that differs"), Column("base"), Column("new"), Column("")]
    rows: list[list[Cell]] = [
        [
            message("{name}", name=Code(change.name)),
            message("{value}", value=Code(str(change.base))),
            message("{value}", value=Code(str(change.new))),
            Styled(_origins(change), Style.DIM),
        ]
        for change in changes[:MOST_SETTINGS]
    ]
    return Table(columns, rows, left_out(len(changes), MOST_SETTINGS))


def _origins(change: ConfigChange) -> Text:
    """Where both values come from, as far as it is known."""
    if not (change.base_origin and change.new_origin):
        return "given" if change.given else "resolved"
    return message("{base} / {new}", base=change.base_origin, new=change.new_origin)


def _causes(changes: list[CauseChange] | None) -> Table | Note:
    """Who was refused more or less often."""
    if changes is None:
        return Note("One side does not record who was refused.")
    if not changes:
        return Note("Nobody was refused on either side.")
    columns = [
        Column("refused or skipped, share of steps"),
        Column("base", numeric=True),
        Column("new", numeric=True),
        Column("times"),
    ]
    rows: list[list[Cell]] = [
        [
            message(
                "{loop}: {cause}{detail}",
                loop=change.loop,
                cause=CauseWord(change.cause),
                detail=f" ({change.detail})" if change.detail else "",
            ),
            percent(change.base_steps_frac),
            percent(change.new_steps_frac),
            Styled(f"{integer(change.base_exits)} -> {integer(change.new_exits)}", Style.DIM),
        ]
        for change in changes[:MOST_CAUSES]
    ]
    return Table(columns, rows, left_out(len(changes), MOST_CAUSES))


def _finding(change: FindingChange) -> Finding:
    cause = message("cause {cause}  ", cause=CauseWord(change.cause)) if change.cause else ""
    about = message("{cause}{values}", cause=cause, values=_values(change))
    level = Styled(change.state, CHANGES[change.state])
    # What is below its threshold now has no words of the new run.
    of_base = change.state == "stayed" and not change.new_count
    told = message("base: {told}", told=change.message) if of_base else change.message
    return Finding(level, change.code, about, [Styled(told, Style.DIM)])


def _values(change: FindingChange) -> Text:
    """Of both sides: shares where one crossed its threshold, else how often it was found."""
    if change.state != "stayed" or (change.base_count and change.new_count):
        return f"{integer(change.base_count)} -> {integer(change.new_count)}"
    least = message("below {least}", least=Share(change.threshold_frac))
    base, new = (
        least if frac is None else message("{share}", share=Share(frac))
        for frac in (change.base_frac, change.new_frac)
    )
    limit = message("(found from {least} on)", least=Share(change.threshold_frac))
    return message("{base} -> {new} {limit}", base=base, new=new, limit=limit)
