"""Renderer of a page as text for a terminal of any width; text is never cropped, words rarely broken.

All strings are printed literally: rich interprets no markup, emoji names or patterns in them.
"""

from collections.abc import Iterator
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from schedtrace.model.message import plain
from schedtrace.model.numbers import percent
from schedtrace.present.phrases import bar_characters, horizontal_bar, legend_with_key, state_characters
from schedtrace.present.sections import (
    Bars,
    Cell,
    Commands,
    Content,
    FactRow,
    Facts,
    FindingSection,
    Headline,
    Note,
    Page,
    RootCauseSection,
    Section,
    Shares,
    States,
    Strip,
    Style,
    Styled,
    Table,
)


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console for one of the standard streams; no other code makes consoles.

    Args:
        stderr: Whether to use stderr instead of stdout.
        width: Width in columns; None for the terminal's.
    """
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


STYLES = {
    Style.STRONG: "bold",
    Style.DIM: "dim",
    Style.GOOD: "green",
    Style.BAD: "red",
    Style.WARNING: "yellow",
    Style.CRITICAL: "bold red",
    Style.INFO: "cyan",
    Style.PREFILL: "green",
    Style.DECODE: "cyan",
    Style.RECOMPUTE: "magenta",
}


def written(content: Content) -> Text:
    """Return a text in its style; it may be folded, never cropped."""
    text, style = (content.text, content.style) if isinstance(content, Styled) else (content, None)
    return Text(plain(text), style=STYLES[style] if style else "", overflow="fold")


def drawn(picture: Cell | States, width: int) -> Text:
    """Return a text, or a picture of at most this width, as rich text."""
    if isinstance(picture, Bars):
        return Text(bar_characters(picture, width), style=STYLES[picture.style])
    if isinstance(picture, States):
        shown = Text()
        for state in state_characters(picture, width):
            shown.append(state.character, style=STYLES[state.style])
        return shown
    return written(picture)


def longest_word(text: Text) -> int:
    """Return the length of the longest word, which is the least width that does not break it."""
    return max((Text(word).cell_len for word in text.plain.split()), default=0)


def longest_line(text: Text) -> int:
    """Return the width of the longest line."""
    return max((Text(line).cell_len for line in text.plain.splitlines()), default=0)


GAPS = (2, 1)
"""Numbers of spaces between two columns; the first one with which the table fits is used."""
LEAST_BARS = 8
SHORT = 24
"""Maximum width of a column of names and figures; wider columns are prose, which may be folded."""


def table_view(table: Table, width: int) -> RenderableType:
    """Return the table at any width: columns side by side if they fit, else a block per row.

    No word or figure is broken unless it is longer than a line.
    """
    least = [_width(table, at, narrow=True) for at in range(len(table.columns))]
    most = [_width(table, at, narrow=False) for at in range(len(table.columns))]
    rooms = ((gap, width - gap * (len(least) - 1)) for gap in GAPS)
    fitting = [(gap, room) for gap, room in rooms if sum(least) <= room]
    roomy = [(gap, room) for gap, room in fitting if sum(most) <= room]
    more = [written(table.more)] if table.more else []
    if not fitting:
        return Group(*_blocks(table, width), *more)
    gap, room = (roomy or fitting[::-1])[0]
    widths = _shared(least, most, room)
    shown = RichTable(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style=STYLES[Style.STRONG])
    shown.show_header = any(column.heading for column in table.columns)
    for column, column_width in zip(table.columns, widths, strict=True):
        justify: Literal["left", "right"] = "right" if column.numeric else "left"
        shown.add_column(Text(column.heading), justify=justify, width=column_width, overflow="fold")
    for row in table.rows:
        shown.add_row(*(drawn(cell, cell_width) for cell, cell_width in zip(row, widths, strict=True)))
    return Group(shown, *more)


def _width(table: Table, at: int, *, narrow: bool) -> int:
    column = table.columns[at]
    heading = Text(column.heading)
    wide = [longest_word(heading) if narrow else longest_line(heading)]
    for row in table.rows:
        cell = row[at]
        if isinstance(cell, Bars):
            wide.append(min(LEAST_BARS, len(cell.heights)) if narrow else len(cell.heights))
        else:
            text = written(cell)
            wide.append(longest_word(text) if narrow and not column.numeric else longest_line(text))
    return max(wide)


def _shared(least: list[int], most: list[int], room: int) -> list[int]:
    """Return the columns' widths: minimums, then what short columns need, then shares for long columns."""
    widths, spare = [*least], room - sum(least)
    for at, wanted in enumerate(most):
        if wanted <= SHORT:
            more = min(spare, wanted - widths[at])
            widths[at], spare = widths[at] + more, spare - more
    lacking = [high - width for high, width in zip(most, widths, strict=True)]
    granted = min(spare, sum(lacking))
    return [
        width + (lack * granted // sum(lacking) if lack else 0)
        for width, lack in zip(widths, lacking, strict=True)
    ]


def _blocks(table: Table, width: int) -> Iterator[RenderableType]:
    """Yield each row as a block: its first cell, then every other cell after its column heading."""
    first, *further = ((column.heading.replace("\n", " "), column) for column in table.columns)
    before = f"{first[0]} " if first[1].numeric else ""
    if first[0] and not before:
        yield Text(first[0], style=STYLES[Style.STRONG], overflow="fold")
    for row in table.rows:
        yield Text(before, overflow="fold").append_text(drawn(row[0], width))
        figures, pictures = Text(overflow="fold"), []
        for (heading, _), cell in zip(further, row[1:], strict=True):
            shown = drawn(cell, width - INDENT)
            if isinstance(cell, Bars):
                pictures.append(shown)
            elif shown.plain:
                figures.append("; " if figures.plain else "").append(f"{heading} " if heading else "")
                figures.append_text(shown)
        for text in (figures, *pictures):
            if text.plain:
                yield Padding(text, (0, 0, 0, INDENT), expand=False)


INDENT = 2
LABELS = 9
"""Width, in columns, of labels of facts and of levels of findings."""
BAND_LABELS = 12
SHARE, BAR = 6, 30
"""Widths, in columns, of a share in percent and of a bar for 100 %."""


def render(page: Page[Any], *, width: int | None = None) -> str:
    """Return sections as text, with a blank line between them."""
    console = make_console(width=width)
    with console.capture() as captured:
        for at, section in enumerate(page.sections):
            console.print(*([Text()] if at else []), view(section, console.width), sep="\n", crop=False)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().split("\n")[:-1])


def view(section: Section, width: int) -> RenderableType:  # noqa: PLR0911  # one kind of section a line
    """Return a section as rich displays it."""
    match section:
        case Headline():
            return Group(*_headline(section))
        case Facts(facts):
            return Group(*(_fact(fact, width) for fact in facts))
        case Table():
            return table_view(section, width)
        case Strip():
            return Group(*_strip(section, width))
        case FindingSection():
            return Group(*_finding(section, width))
        case Shares():
            return Group(*_shares(section, width))
        case RootCauseSection():
            return Group(*_cause(section, width))
        case Note(text, label):
            return _labelled(label, written(text)) if label else written(text)
        case Commands(label, commands):
            lines = [
                Text(f"{' ' * INDENT}{command}", no_wrap=True, overflow="ignore") for command in commands
            ]
            return Group(Text(label, style=STYLES[Style.STRONG]), *lines)


def _headline(headline: Headline) -> Iterator[RenderableType]:
    about = plain(headline.about)
    yield Text.assemble((plain(headline.title), STYLES[Style.STRONG]), about, overflow="fold")
    for line in headline.lines:
        yield Padding(written(line), (0, 0, 0, INDENT), expand=False)
    for warning in headline.warnings:
        yield _labelled("!", written(Styled(warning, Style.WARNING)), Style.WARNING)


def _labelled(label: str, text: Text, style: Style = Style.STRONG) -> Text:
    return Text.assemble((f"{label} ", STYLES[style]), text, overflow="fold")


def _fact(fact: FactRow, width: int) -> RenderableType:
    """Return the label beside the content or, where a word of the content would be broken, above it."""
    indent = LABELS + INDENT
    fits = True
    for part in fact.content:
        if isinstance(part, Table):  # below its widest word it would be broken even as blocks
            words = [longest_word(drawn(cell, LEAST_BARS)) for row in part.rows for cell in row]
            fits &= INDENT + max(words, default=0) <= width - indent
        else:
            text = written(legend_with_key(part) if isinstance(part, Strip) else part)
            fits &= longest_word(text) <= width - indent
    room = width - indent if fits else width - INDENT
    parts = [view(part, room) if isinstance(part, Table | Strip) else written(part) for part in fact.content]
    label = Text(fact.label, style=STYLES[Style.STRONG])
    if not fits:
        below = Padding(Group(*parts), (0, 0, 0, INDENT), expand=False)
        return Group(label, below) if fact.label else below
    grid = RichTable.grid(padding=(0, INDENT, 0, 0))
    grid.add_column(width=LABELS)
    grid.add_column()
    grid.add_row(label, Group(*parts))
    return grid


def _strip(strip: Strip, width: int) -> Iterator[RenderableType]:
    """Yield the bands one below another, followed by the legend."""
    indent = BAND_LABELS if any(band.label for band in strip.bands) else 0
    for band in strip.bands:
        label = Text(f"{band.label:<{indent}}", style=STYLES[Style.STRONG])
        yield Text.assemble(label, drawn(band.drawn, width - indent))
    yield Padding(written(Styled(legend_with_key(strip), Style.DIM)), (0, 0, 0, indent), expand=False)


def _finding(finding: FindingSection, width: int) -> Iterator[RenderableType]:
    level = written(finding.level)
    level.append(" " * (LABELS - level.cell_len))
    code = (finding.code, STYLES[Style.STRONG])
    yield Text.assemble(level, code, f"  {plain(finding.about)}" if finding.about else "", overflow="fold")
    paragraphs = [written(paragraph) for paragraph in finding.paragraphs]
    if finding.action:
        paragraphs.append(_labelled("try:", written(finding.action)))
    fits = all(longest_word(paragraph) <= width - LABELS for paragraph in paragraphs)
    yield Padding(Group(*paragraphs), (0, 0, 0, LABELS if fits else INDENT), expand=False)


def _shares(shares: Shares, width: int) -> Iterator[RenderableType]:
    """Yield a title, followed by one line per part: its label, its share and a bar."""
    yield Text(shares.title, style=STYLES[Style.STRONG])
    labels = max((Text(plain(part.label)).cell_len for part in shares.parts), default=0)
    for part in shares.parts:
        label = Text(plain(part.label))
        label.pad_right(labels - label.cell_len)
        room = max(0, width - INDENT - labels - SHARE - 2 * INDENT)
        yield Text.assemble(
            " " * INDENT,
            label,
            f"{percent(part.share_frac):>{SHARE}}" + " " * INDENT,
            (horizontal_bar(part.share_frac, min(room, BAR)), STYLES[part.style]),
            overflow="fold",
        )


def _cause(cause: RootCauseSection, width: int) -> Iterator[RenderableType]:
    """Yield the title with the gain at the line's end, or below it; then the evidence and the advice."""
    number, gain = f"{cause.number}. ", Text(plain(cause.gain), style=STYLES[Style.STRONG])
    title = Text.assemble(number, written(cause.title))
    title.stylize(STYLES[Style.STRONG])
    between = width - title.cell_len - gain.cell_len
    paragraphs = [written(paragraph) for paragraph in cause.paragraphs]
    if between > 1:
        yield Text.assemble(title, " " * between, gain)
    else:
        yield title
        paragraphs.insert(0, gain)
    for at, action in enumerate(cause.actions):
        paragraphs.append(_labelled("or  " if at else "Try:", written(action)))
    indent = len(number) if all(longest_word(text) <= width - len(number) for text in paragraphs) else 0
    yield Padding(Group(*paragraphs), (0, 0, 0, indent), expand=False)
