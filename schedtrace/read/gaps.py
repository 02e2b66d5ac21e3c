"""Gaps of a trace: periods without a record, because steps or parts are missing."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import polars as pl

GAP_SCHEMA = {
    "first_step": pl.Int64,
    "last_step": pl.Int64,
    "from_us": pl.Int64,
    "to_us": pl.Int64,
    "next_step": pl.Int64,
    "kind": pl.String,
    "told_us": pl.Int64,
}
"""Columns of a table of gaps, in order: the first and last missing step (if none is missing, ``last_step`` is
the smaller one), the beginning and end of the unknown period, the first step after it, the kind of gap, and
the time at which the recorder listed the requests present (null if it did not).
"""
TOLD = "told"
"""Kind of a gap after which the recorder listed the requests present."""
DROPPED = "dropped"
"""Kind of a gap in which the recorder dropped steps but recorded arrivals and departures."""
LOST = "lost"
"""Kind of a gap whose arrivals and departures are unknown."""


def gaps_of(
    steps: pl.DataFrame,
    begun_anew: Sequence[tuple[int, int]],
    events: Sequence[Any],
    first_step: int | None = None,
) -> pl.DataFrame:
    """Return the gaps between a trace's steps.

    Args:
        steps: All that are there, by their numbers.
        begun_anew: ``WholeLines.begun_anew``.
        events: All ``events`` lines.
        first_step: Number of the first step that the trace had; None: that of the first one that is there.
    """
    if steps.is_empty():
        return pl.DataFrame(schema=GAP_SCHEMA)
    over = pl.max_horizontal(pl.col("start_us") + pl.col("schedule_us"), pl.col("output_us"))
    numbered = (
        steps.sort("step")
        .select(pl.col("step", "start_us").cast(pl.Int64), over_us=over.cast(pl.Int64))
        .with_columns(before=pl.col("step").shift(1), since_us=pl.col("over_us").shift(1))
        .with_row_index("place")
    )
    restarts: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for first, at_us in sorted(begun_anew):
        restarts[int(numbered["step"].search_sorted(first, side="left"))].append((first, at_us))
    dropped = sorted(line.at_us for line in events if line.dropped_steps)
    follows = pl.col("step") <= pl.col("before") + 1
    missing = numbered.filter(~follows | (pl.col("place") == 0) | pl.col("place").is_in(list(restarts)))
    rows: list[tuple[Any, ...]] = []
    for place, number, start_us, _, before, since_us in missing.iter_rows():
        first, from_us = (number if before is None else before + 1), min(since_us or 0, start_us)
        if before is None and first_step is not None and first_step < number:
            anew = {at_us for _, at_us in begun_anew}
            there_us = next((line.at_us for line in events if line.present and line.at_us not in anew), 0)
            first, from_us = first_step, min(there_us, start_us)
        for behind, told_us in restarts.get(place, ()) if before is not None or first < number else ():
            to_us = max(from_us, min(start_us, told_us))
            rows.append((first, behind - 1, from_us, to_us, behind, TOLD, told_us))
            first, from_us = behind, to_us
        if first < number:
            at = bisect_left(dropped, from_us)
            kind = DROPPED if at < len(dropped) and dropped[at] <= start_us else LOST
            rows.append((first, number - 1, from_us, start_us, number, kind, None))
    return pl.DataFrame(rows, schema=GAP_SCHEMA, orient="row")
