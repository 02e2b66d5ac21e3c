"""Lines of the watch's screen, with styles."""

import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from textual.content import Content

from schedtrace.model.numbers import integer, number, percent
from schedtrace.model.printable import visible
from schedtrace.present.phrases import COLOURS
from schedtrace.watch.plain_lines import (
    long,
    moment,
    name_of,
    running,
    shown_id,
    state_text,
    verdict_text,
    window_title,
)
from schedtrace.watch.seen import Cell, LiveFigures, Seen, Slow

GLYPHS = "█▓▒░#=+:"
"""Characters by cause, so that causes differ without colour; the last one is for all further causes."""


@dataclass(frozen=True)
class WaitingChart:
    """Chart of waiting requests as rows of characters, top row first."""

    rows: list[list[str]]
    """Cause drawn at each place; empty for none."""
    causes: list[str]
    """Drawn causes, the most frequent first."""
    order: list[str]
    """Causes in the order of their characters, and of their place in the chart from bottom to top."""
    top: float
    """Number of requests at the chart's upper end."""
    seconds: int
    """Seconds that all columns cover, including the current second."""

    def glyph(self, cause: str) -> str:
        """Return the character of a cause."""
        return GLYPHS[min(self.order.index(cause), len(GLYPHS) - 1)] if cause else " "


def waiting_chart(cells: list[Cell], width: int, height: int, order: list[str], edge_s: int) -> WaitingChart:
    """Return the chart of the last seconds, with the latest on the right.

    Args:
        cells: Cells of one second each; a missing beginning stays empty.
        width: Number of columns; each covers two seconds, or one second if the cells are too few for that.
        height: Height in rows.
        order: All causes; each keeps its place, so that its character does not change between observations.
        edge_s: Last second (Unix time); columns of two seconds begin at even seconds, so that their means do
            not change between observations.
    """
    each = 2 if 2 * width <= len(cells) else 1
    seconds = each * width - (edge_s + 1) % each
    shown = [Cell()] * max(0, seconds - len(cells)) + cells[-seconds:]
    means = [_mean(shown[at : at + each]) for at in range(0, len(shown), each)]
    totals: Counter[str] = Counter()
    for mean in means:
        totals.update(mean)
    causes = [cause for cause, _ in totals.most_common()]
    top = max((sum(mean.values()) for mean in means), default=0.0)
    columns = [_column(mean, order, top, height) for mean in means]
    rows = [[column[height - 1 - row] for column in columns] for row in range(height)]
    return WaitingChart(rows, causes, order, top, each * width)


def _mean(cells: list[Cell]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for cell in cells:
        for cause, count in cell.waiting.items():
            sums[cause] += count / len(cells)  # type: ignore[assignment]  # a mean
    return sums


def _column(mean: Counter[str], causes: list[str], top: float, height: int) -> list[str]:
    """Return a column from the bottom up; if any request waits, it is at least one row high."""
    column, reached = [""] * height, 0.0
    for cause in causes:
        count = float(mean.get(cause, 0))
        if not count:
            continue
        begin, reached = reached, reached + count
        first, last = round(height * begin / top), round(height * reached / top)
        for row in range(first, min(height, max(last, first + (begin == 0)))):
            column[row] = cause
    return column


LABEL = 7
"""Number of columns left of the chart, for its scale."""
ENGINE: list[tuple[str, int, Callable[[LiveFigures], str]]] = [
    ("running", 9, running),
    ("waiting", 8, lambda figures: integer(figures.waiting)),
    ("KV", 6, lambda figures: percent(figures.kv_frac)),
    ("budget", 7, lambda figures: percent(figures.budget_frac)),
    ("out tok/s", 10, lambda figures: number(figures.output_per_s)),
    ("preempt/s", 10, lambda figures: number(figures.preempted_per_s)),
    ("steps/s", 8, lambda figures: number(figures.steps_per_s)),
]
"""Headings of an engine's figures, with their widths."""
HEAD = " " * 8 + "".join(f"{heading:>{room}}" for heading, room, _ in ENGINE) + " "


def colour(cause: str, *, dark: bool) -> str:
    """Return the colour of a cause on a dark or light background."""
    return COLOURS.get(cause, COLOURS["other"])[dark]


def head_line(seen: Seen, width: int, *, paused: bool) -> Content:
    """Return the top line: the run, its state and the time."""
    total = seen.total()
    how = "paused" if paused else "waiting for a trace" if total is None else total.state or "live"
    right = f"{how}  {moment(seen.at_s)}"
    left = shown_id(seen.name or "schedtrace watch", max(8, width - len(right) - 2))
    return Content.assemble((left, "bold"), " " * max(2, width - len(left) - len(right)), (right, "bold"))


def verdicts(seen: Seen, width: int, room: int) -> Content:
    """Return the verdicts in ``room`` lines, old ones dim; without engines, what the watch waits for.

    Verdicts are shown in full if there is room; otherwise, each is reduced to its first sentence and its
    advice, and cut if still too long.
    """
    if not seen.engines:
        return Content("\n".join(textwrap.wrap(visible(seen.awaited), width)[:room]))
    full, brief = (
        [
            textwrap.wrap(
                f"{window_title(verdict, seen.at_s)}  {verdict_text(verdict, brief=brief)}",
                width,
                break_on_hyphens=False,
            )
            for verdict in seen.verdicts
        ]
        for brief in (False, True)
    )
    texts = full if sum(map(len, full)) <= room else brief
    heights = [len(text) for text in texts]
    while sum(heights) > max(room, len(heights)):
        heights[heights.index(max(heights))] -= 1
    lines = []
    for verdict, text, height in zip(seen.verdicts, texts, heights, strict=True):
        shown = text
        if len(text) > height:
            shown = [*text[: height - 1], f"{text[height - 1][: width - 4]} ..."]
        bold = len(window_title(verdict, seen.at_s))
        first = Content.assemble((shown[0][:bold], "bold"), shown[0][bold:])
        styled = [first, *map(Content, shown[1:])]
        lines += [line.stylize("dim") for line in styled] if verdict.old(seen.at_s) else styled
    return Content("\n").join(lines)


def engine_line(figures: LiveFigures, width: int) -> Content:
    """Return a row of figures below ``HEAD``."""
    cells = "".join(f"{cell(figures):>{room}}" for _, room, cell in ENGINE)
    text = f"{name_of(figures):8}{cells} "
    return Content((text + figures.state)[:width])


def chart(seen: Seen, rank: int | None, width: int, height: int, *, dark: bool) -> Content:
    """Return a chart of waiting requests by cause, over time, with a legend."""
    drawn = waiting_chart(
        seen.cells.get(rank, []), max(1, width - LABEL), max(1, height - 1), seen.causes, seen.edge_s
    )
    whose = "" if rank is None else f", rank {rank}"
    legend: list[str | tuple[str, str]] = [f"Waiting requests{whose}, last {drawn.seconds} s: "]
    for cause in drawn.causes:
        legend += [(drawn.glyph(cause), colour(cause, dark=dark)), f" {visible(cause)}  "]
    if drawn.causes:
        lines = [Content.assemble(*legend).truncate(width, ellipsis=True)]
    else:
        lines = [Content(f"{legend[0]}none"[:width])]
    top = number(drawn.top, 0 if drawn.top >= 1 else 2) if drawn.top else ""
    for at, row in enumerate(drawn.rows):
        scale = top if at == 0 else "0" if at == len(drawn.rows) - 1 else ""
        parts = [
            (drawn.glyph(cause) * len(list(run)), colour(cause, dark=dark) if cause else "")
            for cause, run in groupby(row)
        ]
        lines.append(Content.assemble(f"{scale:>{LABEL - 1}}│", *parts))
    return Content("\n").join(lines)


def request_line(slow: Slow, width: int, *, ranks: bool) -> Content:
    """Return the line of a request."""
    rank = f"rank {slow.rank}  " if ranks else ""
    before = f"{long(slow.age_us):>8}  {rank}"
    does = state_text(slow)
    room = max(12, width - len(before) - len(does) - 2)
    return Content(f"{before}{shown_id(slow.request_id, room)}  {does}"[:width])
