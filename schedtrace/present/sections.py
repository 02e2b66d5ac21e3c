"""Sections of a page and their tables (``Column``, ``Field``), as data that a renderer draws.

Every text is a ``str`` or a ``Message``, plain or with a named style. Sections contain no markup, no widths,
and no line breaks except in column headings. No renderer is imported here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Generic, TypeVar

from schedtrace.model.message import Message
from schedtrace.model.numbers import integer
from schedtrace.model.printable import printable

_D = TypeVar("_D")
_R = TypeVar("_R")


class Style(StrEnum):
    """Style of a text; a renderer shows it as far as it can."""

    STRONG = "strong"
    DIM = "dim"
    GOOD = "good"
    BAD = "bad"
    WARNING = "warning"
    CRITICAL = "critical"
    INFO = "info"
    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"


Text = str | Message


@dataclass(frozen=True)
class Styled:
    """Text with a style."""

    text: Text
    style: Style | None


Content = Text | Styled


def unstyled(content: Content) -> Text:
    """Return the content as text without a style."""
    return content.text if isinstance(content, Styled) else content


@dataclass(frozen=True)
class Bars:
    """Heights over time, each from 0 to 1; a renderer with less room shows the highest of each group."""

    heights: list[float]
    style: Style


@dataclass(frozen=True)
class State:
    """State that a request can be in, with the word, character and style that show it."""

    word: str
    character: str
    style: Style
    prominent: bool = False
    """Whether the state is shown even among many steps of other states."""


@dataclass(frozen=True)
class States:
    """States over time, each with its number of steps."""

    runs: list[tuple[State, int]]


Cell = Content | Bars


@dataclass(frozen=True)
class Column:
    """Column of a table."""

    heading: str
    """Heading of the column, with line breaks to keep the column narrow."""
    numeric: bool = False
    """Whether cells are figures, which are right-aligned and never broken."""
    of_steps: bool = False
    """Whether cells are numbers or ranges of steps, of the engine that the page is about."""


@dataclass(frozen=True)
class Table:
    """Table whose first column names each row."""

    columns: list[Column]
    rows: list[list[Cell]]
    more: Text = ""
    """Note on omitted rows and how to see them."""


@dataclass(frozen=True)
class Field(Generic[_R]):
    """Column of a table, with the function that fills its cells."""

    heading: str
    cell: Callable[[_R], Cell]
    numeric: bool = False
    of_steps: bool = False


def figure_field(heading: str, cell: Callable[[_R], Cell], *, of_steps: bool = False) -> Field[_R]:
    """Return a column of figures."""
    return Field(heading, cell, numeric=True, of_steps=of_steps)


def table(
    things: Sequence[_R],
    fields: Sequence[Field[_R]],
    more: Text = "",
    *,
    most: int | None = None,
    how: str = "--format json lists them all",
) -> Table:
    """Return a table with a row for each item.

    Args:
        things: Items with a row each.
        fields: Columns of the table.
        more: Note on omitted rows, if ``most`` does not produce one.
        most: Maximum number of rows; a note then states how many are left out. None for all.
        how: Text after the number of items that are left out.
    """
    columns = [Column(field.heading, field.numeric, field.of_steps) for field in fields]
    rows = [[field.cell(thing) for field in fields] for thing in things[:most]]
    return Table(columns, rows, omission_note(len(things), most, how) or more)


def omission_note(count: int, most: int | None, how: str = "--format json lists them all") -> str:
    """Return a note on how many of ``count`` items are left out; an empty string if none are."""
    return f"{integer(count - most)} more: {how}" if most is not None and count > most else ""


@dataclass(frozen=True)
class Band:
    """Row of a strip, with its label."""

    label: str
    drawn: Bars | States | Content


@dataclass(frozen=True)
class Strip:
    """Strip of pictures over time, one above the other, with a legend."""

    bands: list[Band]
    legend: Text
    """Legend, to which a renderer adds the key of the states."""


@dataclass(frozen=True)
class FactRow:
    """Label with its value."""

    label: str
    content: "list[Content | Table | Strip]"


@dataclass(frozen=True)
class Facts:
    """Several facts, with their labels below each other."""

    facts: list[FactRow]


@dataclass(frozen=True)
class Headline:
    """Subject of the page."""

    title: Text
    about: Text = ""
    """Text after the title."""
    lines: list[Content] = field(default_factory=list)
    warnings: list[Text] = field(default_factory=list)
    """Caveats for the sections that follow."""


@dataclass(frozen=True)
class FindingSection:
    """Finding with its severity, its name, its statement and its advice."""

    level: Styled
    code: str
    about: Text
    paragraphs: list[Content]
    action: Text = ""
    engine_rank: int = 0
    """Rank of the engine whose steps the texts refer to."""


@dataclass(frozen=True)
class Part:
    """Part of a whole."""

    label: Text
    share_frac: float
    style: Style
    kind: str = ""
    """Word of the part or, for a wait, of its cause, which determines the colour in pictures."""


@dataclass(frozen=True)
class Shares:
    """Parts of a whole, as bars."""

    title: str
    parts: list[Part]


@dataclass(frozen=True)
class RootCauseSection:
    """Root cause with its title, its gain, its evidence and its advice."""

    number: int
    title: Content
    gain: Text
    """Gain, at the end of the title's line."""
    paragraphs: list[Content]
    actions: list[Text]
    """Alternative actions, the best first."""
    engine_rank: int = 0
    """Rank of the engine whose steps the texts refer to."""
    steps: Text = ""
    """Steps that show the root cause, for a renderer that can link to them."""


@dataclass(frozen=True)
class Note:
    """Paragraph, optionally after a label."""

    text: Content
    label: str = ""


def answer_note(text: Text) -> Note:
    """Return the paragraph with the answer of a page, below its headline."""
    return Note(Styled(text, Style.STRONG))


def basis_note(label: str, text: Text) -> Note:
    """Return a dim paragraph about the basis of figures."""
    return Note(Styled(text, Style.DIM), label)


@dataclass(frozen=True)
class Commands:
    """Next commands after a label, one line each, never broken, so that each can be copied."""

    label: str
    commands: list[str]


Section = Headline | Facts | Table | Strip | FindingSection | Shares | RootCauseSection | Note | Commands


class Page(Generic[_D]):
    """Document of ``model/`` and the sections that show it.

    Because the data is untrusted, all sections are made from a printable copy of the document.

    Args:
        document: A struct of ``model/`` with its texts unchanged.
        make: Function from the document to its sections.
    """

    def __init__(self, document: _D, make: Callable[[_D], Iterable[Section]]) -> None:
        self.document = document
        self._make = make

    @cached_property
    def sections(self) -> list[Section]:
        """Sections of the page in reading order."""
        return list(self._make(printable(self.document)))
