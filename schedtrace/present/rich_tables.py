"""A table at any width: columns side by side where they fit, else a block for each row."""

from collections.abc import Iterator
from typing import Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from schedtrace.present.phrases import plain
from schedtrace.present.sections import Bars, Cell, Content, States, Style, Styled, Table
from schedtrace.present.strips import bar_characters, state_characters

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
    """A text in its style; it may be folded, never cropped."""
    text, style = (content.text, content.style) if isinstance(content, Styled) else (content, None)
    return Text(plain(text), style=STYLES[style] if style else "", overflow="fold")


def drawn(picture: Cell | States, width: int) -> Text:
    """A text, or a picture of at most this width."""
    if isinstance(picture, Bars):
        return Text(bar_characters(picture, width), style=STYLES[picture.style])
    if isinstance(picture, States):
        shown = Text()
        for state in state_characters(picture, width):
            shown.append(state.character, style=STYLES[state.style])
        return shown
    return written(picture)


def longest_word(text: Text) -> int:
    """Width of the longest word: with less, it would be broken."""
    return max((Text(word).cell_len for word in text.plain.split()), default=0)


def longest_line(text: Text) -> int:
    """Width of the longest line."""
    return max((Text(line).cell_len for line in text.plain.splitlines()), default=0)


GAPS = (2, 1)
"""Columns between two columns: the first with which the table fits."""
LEAST_BARS = 8
SHORT = 24
"""Columns that want no more are names and figures; what wants more is prose, which may be folded."""
INDENT = 2


def table_view(table: Table, width: int) -> RenderableType:
    """The table, no word or figure of it broken unless it is longer than a line."""
    least = [_width(table, at, narrow=True) for at in range(len(table.columns))]
    most = [_width(table, at, narrow=False) for at in range(len(table.columns))]
    rooms = ((gap, width - gap * (len(least) - 1)) for gap in GAPS)
    fitting = [(gap, room) for gap, room in rooms if sum(least) <= room]
    roomy = [(gap, room) for gap, room in fitting if sum(most) <= room]
    more = [written(table.more)] if table.more else []
    if not fitting:
        return Group(*_blocks(table, width), *more)
    gap, room = (roomy or fitting[::-1])[0]
    return Group(_columns(table, _shared(least, most, room), gap), *more)


def least_width(table: Table) -> int:
    """With less, a word would be broken even in blocks."""
    words = [longest_word(drawn(cell, LEAST_BARS)) for row in table.rows for cell in row]
    return INDENT + max(words, default=0)


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
    """The least for each column; then what short columns want, from the left; then the long ones' shares."""
    widths, spare = [*least], room - sum(least)
    for at, wanted in enumerate(most):
        if wanted <= SHORT:
            more = min(spare, wanted - widths[at])
            widths[at], spare = widths[at] + more, spare - more
    lacking = [high - width for high, width in zip(most, widths, strict=True)]
    given = min(spare, sum(lacking))
    return [
        width + (lack * given // sum(lacking) if lack else 0)
        for width, lack in zip(widths, lacking, strict=True)
    ]


def _columns(table: Table, widths: list[int], gap: int) -> RichTable:
    shown = RichTable(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style=STYLES[Style.STRONG])
    shown.show_header = any(column.heading for column in table.columns)
    for column, width in zip(table.columns, widths, strict=True):
        justify: Literal["left", "right"] = "right" if column.numeric else "left"
        shown.add_column(Text(column.heading), justify=justify, width=width, overflow="fold")
    for row in table.rows:
        shown.add_row(*(drawn(cell, width) for cell, width in zip(row, widths, strict=True)))
    return shown


def _blocks(table: Table, width: int) -> Iterator[RenderableType]:
    """Each row's first cell, and below it every other one behind its heading."""
    first, *others = ((column.heading.replace("\n", " "), column) for column in table.columns)
    before = f"{first[0]} " if first[1].numeric else ""
    if first[0] and not before:
        yield Text(first[0], style=STYLES[Style.STRONG], overflow="fold")
    for row in table.rows:
        yield Text(before, overflow="fold").append_text(drawn(row[0], width))
        figures, pictures = Text(overflow="fold"), []
        for (heading, _), cell in zip(others, row[1:], strict=True):
            shown = drawn(cell, width - INDENT)
            if isinstance(cell, Bars):
                pictures.append(shown)
            elif shown.plain:
                figures.append("; " if figures.plain else "").append(f"{heading} " if heading else "")
                figures.append_text(shown)
        for text in (figures, *pictures):
            if text.plain:
                yield Padding(text, (0, 0, 0, INDENT), expand=False)
