"""Renderer of a page as Markdown, for a pull request or an issue. All text appears literally."""

import re
from collections.abc import Iterator
from typing import Any

from schedtrace.model.message import CauseWord, Code, Message, Request, Setting, pieces, plain
from schedtrace.model.numbers import percent
from schedtrace.present.phrases import bar_characters, legend_with_key, state_characters
from schedtrace.present.sections import (
    Bars,
    Cell,
    Commands,
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
    unstyled,
)

_SPECIAL = re.compile(
    r"[\\`*\[\]~#@$]|<[a-z/!?]|&[#\w]|(?<![^\W_])_|_(?![^\W_])|://|www\.|:[\w+-]+:", re.IGNORECASE
)
"""Pattern of characters that Markdown, or a site that renders it, could interpret."""
_BEGINS_BLOCK = re.compile(r"[-+]+$|=+$|>|\||\d+[.)]$")
"""Pattern of beginnings of a line that Markdown could read as a list, a quotation, a rule or a heading."""
_NAMES = (Request, CauseWord, Setting, Code)
"""Styles of arguments that are names and therefore stay unchanged."""


def code(value: object) -> str:
    """Return a code span, whose content has no special meaning and cannot end it."""
    text = str(value)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    inner = f" {text} " if text[:1] == "`" or text[-1:] == "`" or not text.strip() else text
    return f"{fence}{inner}{fence}"


def prose(text: str | Message) -> str:
    """Return running text; names, and words that Markdown could interpret, become code spans.

    Adjacent code spans become one, because their backticks would merge.
    """
    parts: list[tuple[str, bool]] = []
    for words, value in pieces(text):
        if isinstance(value, _NAMES) and words:
            parts.append((words, True))
        else:
            split = re.split("( )", words)
            parts += [(word, bool(_SPECIAL.search(word))) for word in split if word]
    merged: list[tuple[str, bool]] = []
    for words, coded in parts:
        if merged and coded and merged[-1][1]:
            merged[-1] = (merged[-1][0] + words, True)
        else:
            merged.append((words, coded))
    return "".join(code(words) if coded else words for words, coded in merged)


def paragraph(text: str | Message) -> str:
    """Return text for the start of a line, where it begins no list, quotation, rule or heading."""
    written = prose(text).strip(" ")
    first, space, rest = written.partition(" ")
    return code(first) + space + rest if rest and _BEGINS_BLOCK.match(first) else written


def cell(markdown: str) -> str:
    """Return Markdown for a table's cell, which ends neither the cell nor the line."""
    return " ".join(markdown.replace("|", "\\|").split())


WIDTH = 60
"""Width of pictures in characters."""


def render(page: Page[Any], *, width: int | None = None) -> str:  # noqa: ARG001  # a site breaks the lines
    """Return sections with a blank line between them."""
    return "\n\n".join("\n\n".join(_blocks(section)) for section in page.sections) + "\n"


def _blocks(section: Section) -> Iterator[str]:  # noqa: C901, PLR0912  # one kind of section after the other
    match section:
        case Headline(title, about, lines, warnings):
            yield f"**{paragraph(title)}** {prose(about).strip()}".rstrip()
            if points := [f"* {_text(line)}" for line in [*lines, *warnings]]:
                yield "\n".join(points)
        case Facts(facts):
            for fact in facts:
                yield from _fact(fact)
        case Table():
            head = [column.heading.replace("\n", " ") for column in section.columns]
            sides = ["---:" if column.numeric else "---" for column in section.columns]
            rows = [[_text(value) for value in row] for row in section.rows]
            yield "\n".join(f"| {' | '.join(map(cell, row))} |" for row in (head, sides, *rows))
            if section.more:
                yield _text(section.more)
        case Strip(bands, _):
            pictures = [f"* {band.label} {_text(band.drawn)}".replace("*  ", "* ") for band in bands]
            yield "\n".join([*pictures, f"* {_text(legend_with_key(section))}"])
        case FindingSection(level, name, about, paragraphs, action):
            yield f"**{prose(level.text)}: {prose(name)}** {prose(about).strip()}".rstrip()
            yield from (_text(text) for text in paragraphs)
            if action:
                yield f"Try: {_text(action)}"
        case Shares(title, parts):
            yield "\n".join(
                [
                    f"**{title}**",
                    "",
                    *(f"* {_text(part.label)}: {percent(part.share_frac)}" for part in parts),
                ]
            )
        case RootCauseSection(number, title, gain, paragraphs, actions):
            yield f"**{number}. {prose(unstyled(title))}** {prose(gain)}".rstrip()
            yield from (_text(text) for text in paragraphs)
            if actions:
                yield "\n".join(f"* Try: {_text(action)}" for action in actions)
        case Note(text, label):
            yield f"**{_text(label)}** {_text(text)}" if label else _text(text)
        case Commands(label, commands):
            yield "\n".join([f"**{_text(label)}**", "", *(f"* {code(command)}" for command in commands)])


def _fact(fact: FactRow) -> Iterator[str]:
    label = f"**{fact.label}**: " if fact.label else ""
    for part in fact.content:
        if isinstance(part, Table | Strip):
            if label:
                yield label.rstrip(": ")
            yield from _blocks(part)
        else:
            yield label + _text(part)
        label = ""


def _text(value: Cell | States) -> str:
    """Return a text or a picture, safe anywhere in a line, with emphasis on strong and bad values."""
    if isinstance(value, Bars):
        return code(bar_characters(value, WIDTH).replace(" ", "·"))  # spaces would be lost
    if isinstance(value, States):
        return code("".join(state.character for state in state_characters(value, WIDTH)))
    if isinstance(value, Styled):
        marked = value.style in {Style.STRONG, Style.BAD, Style.GOOD} and plain(value.text)
        return f"**{paragraph(value.text)}**" if marked else paragraph(value.text)
    return paragraph(value)
