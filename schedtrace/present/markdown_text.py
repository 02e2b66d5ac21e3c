"""Data as Markdown that shows it as it is: no markup, links, HTML, mentions or emoji come of it."""

import re

from schedtrace.model.message import CauseWord, Code, Message, Request, Setting
from schedtrace.present.phrases import pieces

_SPECIAL = re.compile(
    r"[\\`*\[\]~#@$]|<[a-z/!?]|&[#\w]|(?<![^\W_])_|_(?![^\W_])|://|www\.|:[\w+-]+:", re.IGNORECASE
)
"""What Markdown, or a site that renders it, could take for more than text."""
_BEGINS_BLOCK = re.compile(r"[-+]+$|=+$|>|\||\d+[.)]$")
"""What Markdown, at the start of a line, could take for a list, a quotation, a rule or a heading."""
_NAMES = (Request, CauseWord, Setting, Code)
"""Arguments that stand as they are."""


def code(value: object) -> str:
    """A code span: nothing in it means anything, and nothing in it can end it."""
    text = str(value)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    inner = f" {text} " if text[:1] == "`" or text[-1:] == "`" or not text.strip() else text
    return f"{fence}{inner}{fence}"


def prose(text: str | Message) -> str:
    """Running text: names, and words that could be taken for more than text, become code spans.

    Code spans that touch become one, since their backticks would run together.
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
    """The same where a line may begin: it begins no list, quotation, rule or heading."""
    written = prose(text).strip(" ")
    first, space, rest = written.partition(" ")
    return code(first) + space + rest if rest and _BEGINS_BLOCK.match(first) else written


def cell(markdown: str) -> str:
    """Markdown for a cell of a table: it may end neither the cell nor the line."""
    return " ".join(markdown.replace("|", "\\|").split())
