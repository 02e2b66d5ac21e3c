"""Waiting requests by cause over time, in characters."""

from collections import Counter
from dataclasses import dataclass

from schedtrace.watch.seen import Cell

GLYPHS = "█▓▒░#=+:"
"""One a cause, so that they differ without colour, too; the last one for all that follow."""


@dataclass(frozen=True)
class Chart:
    """Rows of characters, from above."""

    rows: list[list[str]]
    """Of each place the cause that is drawn there; empty: none."""
    causes: list[str]
    """Those that are drawn, the most frequent first."""
    order: list[str]
    """Causes by their character, which is also from below."""
    top: float
    """Requests at the upper end."""
    seconds: int
    """That all columns stand for, also if the last one's second one is still to come."""

    def glyph(self, cause: str) -> str:
        """How a cause is drawn."""
        return GLYPHS[min(self.order.index(cause), len(GLYPHS) - 1)] if cause else " "


def waiting_chart(cells: list[Cell], width: int, height: int, order: list[str], edge_s: int) -> Chart:
    """The last seconds, the last one on the right.

    Args:
        cells: A second each; what is missing at their begin stays empty.
        width: Columns; each is two seconds, or one where there is room for all of that.
        height: Rows.
        order: All causes; each keeps its place in it, so that its character does not change between looks.
        edge_s: The last second (Unix time): two seconds are the same two at each look, and so is their mean.
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
    return Chart(rows, causes, order, top, each * width)


def _mean(cells: list[Cell]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for cell in cells:
        for cause, count in cell.waiting.items():
            sums[cause] += count / len(cells)  # type: ignore[assignment]  # a mean
    return sums


def _column(mean: Counter[str], causes: list[str], top: float, height: int) -> list[str]:
    """From below: what waited is at least one row high, however little it was."""
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
