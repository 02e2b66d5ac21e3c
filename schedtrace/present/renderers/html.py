"""Renderer of a page as HTML: a fragment for a larger document, or a document by itself.

Jinja2 escapes everything. There is no inline style and no event handler, so the document's policy can allow
only its one style sheet, by its hash.
"""

from base64 import b64encode
from collections import Counter
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from schedtrace.model.message import (
    CauseWord,
    Code,
    Duration,
    Request,
    Setting,
    Share,
    Steps,
    Value,
    pieces,
    plain,
)
from schedtrace.model.numbers import counted, percent, settled
from schedtrace.present.phrases import COLOURS, highest, state_characters, states_of
from schedtrace.present.sections import Bars, Headline, Page, Section, States, Style, Styled, Text

HERE = Path(__file__).parent
MOST_BARS = 120
MOST_RUNS = 240
"""Maximum number of cells in a picture of states; a reader could not distinguish more."""
LEAST_BAR = 3
"""Height of the smallest bar in percent, so that anything above 0 is visible."""


def render(page: Page[Any], *, width: int | None = None) -> str:  # noqa: ARG001  # a browser breaks the lines
    """Return a document that fetches nothing, because its policy forbids fetching."""
    head = next((section for section in page.sections if isinstance(section, Headline)), None)
    return template("html.jinja").render(
        title=f"{plain(head.title)} - schedtrace" if head else "schedtrace",
        css=Markup(style_sheet()),  # noqa: S704  # ours; the template reader would take "{#" for a comment
        style_source=source_of(style_sheet()),
        body=fragment(page.sections),
    )


def fragment(sections: Iterable[Section], *, rank: int | None = None, level: int = 1) -> Markup:
    """Return sections as HTML, whose style is in ``html.css``.

    Args:
        sections: Sections of a page, which are printable.
        rank: Rank for links such as ``#step=264&rank=0`` and ``#request=t1-3``, used for steps that name no
            engine. None for no links.
        level: Level of the headline; headings below it are one level lower.
    """
    module = template("sections.jinja").make_module({"level": level, "linked": rank is not None})
    return Markup().join(module.section(section, rank) for section in sections)  # type: ignore[attr-defined]  # a macro of the template


def style_sheet() -> str:
    """Return the CSS of the sections: both colour schemes as custom properties, and the rules using them."""
    colours = "".join(
        f"  --{name}: light-dark({light}, {dark});\n" for name, (light, dark) in COLOURS.items()
    )
    return f":root {{\n{colours}}}\n" + (HERE / "html.css").read_text(encoding="utf-8")


def source_of(text: str) -> str:
    """Return the source expression that allows this inline text in a Content-Security-Policy."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def step_link(step: int, rank: int) -> str:
    """Return the fragment of a URL that names a step: ``step=264&rank=0``."""
    return f"step={step}&rank={rank}"


def request_link(request_id: str) -> str:
    """Return the fragment of a URL that names a request, by its printable id: ``request=t1%2F3``."""
    return f"request={quote(request_id, safe='')}"


def template(name: str) -> Template:
    """Return a template from this folder, or from that of the page with a timeline."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader([HERE, HERE.parent / "report"]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"text": _text, "percent": percent}
    environment.globals |= {
        "kind": lambda value: type(value).__name__,
        "tops": _tops,
        "runs": _runs,
        "spoken": _spoken,
        "states_of": states_of,
        "steps_cell": _steps_cell,
    }
    return environment


def _text(content: Text | Styled, rank: int | None) -> Markup:
    """Return a text with its names marked and, if a rank is set, linked."""
    if isinstance(content, Styled):
        tag = "strong" if content.style is Style.STRONG else "span"
        inner = _text(content.text, rank)
        if not content.style or not inner:
            return inner
        return Markup('<{tag} class="{style}">{inner}</{tag}>').format(
            tag=tag, style=content.style, inner=inner
        )
    return Markup().join(_piece(words, value, rank) for words, value in pieces(content))


def _piece(words: str, value: Value | None, rank: int | None) -> Markup:  # noqa: PLR0911  # one kind a line
    match value:
        case Request(request_id):
            name = Markup('<bdi class="request">{}</bdi>').format(words)
            if rank is None:
                return name
            return Markup('<a href="#{}">{}</a>').format(request_link(request_id), name)
        case Steps(first, last) if rank is not None:
            return _steps_link(words, first, last, rank)
        case CauseWord(cause):
            return Markup('<code class="cause" data-cause="{}">{}</code>').format(cause, words)
        case Setting():
            return Markup('<code class="setting">{}</code>').format(words)
        case Code():
            return Markup("<code>{}</code>").format(words)
        case Duration() | Share():
            return Markup('<span class="figure">{}</span>').format(words)
        case _:
            return escape(words)


def _steps_link(words: str, first: int, last: int, rank: int) -> Markup:
    link = Markup('<a href="#{}" data-step="{}" data-last-step="{}" data-rank="{}">{}</a>')
    return link.format(step_link(first, rank), first, last, rank, words)


def _steps_cell(cell: str, rank: int | None) -> Markup:
    """Return a cell with a link to its step or steps (``3-5``); any other cell unchanged."""
    first, _, last = cell.partition("-")
    if rank is None or not first.isdecimal():
        return escape(cell)
    return _steps_link(cell, int(first), int(last or first), rank)


def _tops(bars: Bars) -> list[int]:
    """Return where each bar ends, in percent of the height from the top."""
    heights = highest(bars, MOST_BARS)
    return [100 - max(LEAST_BAR, int(settled(100 * height, 0))) if height > 0 else 100 for height in heights]


def _runs(states: States) -> list[tuple[str, str, int, int]]:
    """Return word, style, first cell and number of cells for each series of equal states."""
    runs, at = [], 0
    for state, group in groupby(state_characters(states, MOST_RUNS)):
        cells = len(list(group))
        runs.append((state.word, str(state.style), at, cells))
        at += cells
    return runs


def _spoken(drawn: Bars | States) -> str:
    """Return a picture's description for screen readers."""
    if isinstance(drawn, Bars):
        return f"highest {percent(max(drawn.heights, default=None))}"
    steps: Counter[str] = Counter()
    for state, count in drawn.runs:
        steps[state.word] += count
    return ", ".join(f"{word} {counted(count, 'step')}" for word, count in steps.items())
