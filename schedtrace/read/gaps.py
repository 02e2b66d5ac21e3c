"""Gaps of a trace: times of which nothing is recorded, for steps or parts are missing."""

from bisect import bisect_left
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
"""Columns of a table of gaps, in their order: numbers of the missing steps (none: ``last_step`` is the
smaller one), from when to when nothing is known, the first step after them, a kind, and the time for which
the recorder told who was there (null: it did not)."""
TOLD = "told"
"""The recorder told who was there when it was over."""
DROPPED = "dropped"
"""The recorder dropped steps, and told who came and went in them."""
LOST = "lost"
"""Nothing is known of who came and went."""


def gaps_of(
    steps: pl.DataFrame, begun_anew: Sequence[tuple[int, int]], events: Sequence[Any]
) -> pl.DataFrame:
    """Return the gaps between a trace's steps.

    Args:
        steps: All that are there, by their numbers.
        begun_anew: ``WholeLines.begun_anew``.
        events: All ``events`` lines.
    """
    if steps.is_empty():
        return pl.DataFrame(schema=GAP_SCHEMA)
    over = pl.max_horizontal(
        pl.col("start_us") + pl.col("schedule_us"), pl.col("output_us") + pl.col("update_us").fill_null(0)
    )
    known = (
        steps.sort("step")
        .select(pl.col("step", "start_us").cast(pl.Int64), over_us=over.cast(pl.Int64))
        .with_columns(before=pl.col("step").shift(1), since_us=pl.col("over_us").shift(1))
        .with_row_index("place")
    )
    numbers = [number for number, _ in begun_anew]
    places = known["step"].search_sorted(pl.Series(numbers, dtype=pl.Int64), side="left").to_list()
    told = {
        place: at_us for place, (_, at_us) in zip(places, begun_anew, strict=True) if 0 < place < known.height
    }
    missing = known.filter((pl.col("step") > pl.col("before") + 1) | pl.col("place").is_in(list(told)))
    dropped = sorted(line.at_us for line in events if line.dropped_steps)
    rows = []
    for place, number, start_us, _, before, since_us in missing.iter_rows():
        told_us = told.get(place)
        to_us = start_us if told_us is None else min(start_us, told_us)
        from_us = min(since_us, to_us)
        at = bisect_left(dropped, from_us)
        kind = DROPPED if at < len(dropped) and dropped[at] <= to_us else LOST
        rows.append(
            (before + 1, number - 1, from_us, to_us, number, kind if told_us is None else TOLD, told_us)
        )
    return pl.DataFrame(rows, schema=GAP_SCHEMA, orient="row")
