"""Data as Markdown that shows it as it is: no markup, links, HTML, mentions or emoji come of it."""

import re

_SPECIAL = re.compile(
    r"[\\`*\[\]~#@$]|<[a-z/!?]|&[#\w]|(?<![^\W_])_|_(?![^\W_])|://|www\.|:[\w+-]+:", re.IGNORECASE
)
"""What Markdown, or a site that renders it, could take for more than text."""


def code(value: object) -> str:
    """A code span: nothing in it means anything, and nothing in it can end it."""
    text = str(value)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    inner = f" {text} " if text[:1] == "`" or text[-1:] == "`" or not text.strip() else text
    return f"{fence}{inner}{fence}"


def prose(text: str) -> str:
    """Running text; words that could be taken for more than text become code spans."""
    return " ".join(code(word) if _SPECIAL.search(word) else word for word in text.split(" "))


def cell(markdown: str) -> str:
    """Markdown for a cell of a table: it may end neither the cell nor the line."""
    return " ".join(markdown.replace("|", "\\|").split())
