"""Seconds of engines: what ``per_step`` tells, added up."""

from collections import Counter, defaultdict

import polars as pl

from schedtrace.watch.seen import Cell

UNNAMED = "other"
"""What those wait for whom no step refused."""


def seconds(rows: pl.DataFrame) -> dict[int, Cell]:
    """Second to what happened in it.

    Args:
        rows: ``per_step``, in Unix time.
    """
    found: dict[int, Cell] = {}
    sums: defaultdict[int, Counter[str]] = defaultdict(Counter)
    columns = ("begin_us", "running", "waiting", "cause")
    for begin_us, running, waiting, cause in rows.select(columns).iter_rows():
        second = begin_us // 1_000_000
        cell = found.setdefault(second, Cell())
        cell.steps += 1
        cell.left = {cause or UNNAMED: waiting} if waiting and running else {}
        if waiting:
            sums[second][cause or UNNAMED] += waiting
    for second, cell in found.items():
        cell.waiting = {cause: count / cell.steps for cause, count in sums[second].items()}
    return found


def added(one: Cell, other: Cell) -> Cell:
    """Two parts of a second of one engine, the later one last."""
    steps = one.steps + other.steps
    causes = [*one.waiting, *(cause for cause in other.waiting if cause not in one.waiting)]
    return Cell(
        steps=steps,
        waiting={
            cause: _mean(one.waiting.get(cause, 0.0), one.steps, other.waiting.get(cause, 0.0), other.steps)
            for cause in causes
        },
        left=other.left if other.steps else one.left,
    )


def _mean(one: float, of: int, other: float, others: int) -> float:
    return (one * of + other * others) / (of + others) if of + others else 0.0


def together(engines: list[dict[int, Cell]], edge_s: int, seconds_shown: int) -> list[Cell]:
    """The last seconds of all engines; in one without a step those wait whom the last step before left.

    Args:
        engines: Of each, second to what happened in it.
        edge_s: The last second.
        seconds_shown: How many.
    """
    shown = [Cell() for _ in range(seconds_shown)]
    for engine in engines:
        before = Cell()
        for place, second in enumerate(range(edge_s - seconds_shown + 1, edge_s + 1)):
            cell = engine.get(second)
            if cell is None:
                cell = Cell(waiting=before.left, left=before.left)
            before = cell
            whole = shown[place]
            whole.steps += cell.steps
            for cause, count in cell.waiting.items():
                whole.waiting[cause] = whole.waiting.get(cause, 0.0) + count
    return shown
