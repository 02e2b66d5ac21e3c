"""The states of requests as pieces that the page draws, of all requests or of an even sample."""

from collections.abc import Collection

import polars as pl

from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.timeline import Timeline

MOST_REQUESTS, MOST_PIECES = 8_000, 50_000
"""Requests and pieces of their lives in a page, at most."""


def lives_of(
    timeline: Timeline, steps: pl.DataFrame, named: Collection[str], engines: int
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Requests to draw, by arrival, with ``first_us`` and ``pieces``; and the pieces of all lives.

    Pieces are rows of ``request_states``. Waits that follow each other and have at each moment the cause
    that the step of the moment had are one piece, ``by_step``: of a long queue this is most of the table.
    """
    run_of_cause = steps.select(
        pl.col("step").cast(pl.Int64), cause_of_step="cause", same=pl.col("cause").rle_id()
    )
    last = run_of_cause.select(end_step="step", same_to_end="same")
    by_step = (
        pl.col("state").is_in(QUEUED)
        & pl.col("cause").eq(pl.col("cause_of_step"))
        & pl.col("same").eq(pl.col("same_to_end"))
    ).fill_null(value=False)
    pieces = (
        timeline.request_states.lazy()
        .join(run_of_cause.lazy(), left_on="begin_step", right_on="step", how="left", maintain_order="left")
        .join(last.lazy(), on="end_step", how="left", maintain_order="left")
        .select("request_id", "begin_us", "end_us", "state", "cause", "tokens", by_step=by_step)
        .with_columns(
            row=pl.when("by_step")
            .then(pl.struct("request_id", "state").rle_id())
            .otherwise(-1 - pl.int_range(pl.len()))
        )
        .with_columns(row=pl.struct("row", "by_step").rle_id())
        .group_by("row", maintain_order=True)
        .agg(
            pl.col("request_id", "begin_us", "state", "cause", "by_step").first(),
            pl.col("end_us").last(),
            pl.col("tokens").sum(),
        )
        .collect()
    )
    requests = (
        pieces.group_by("request_id", maintain_order=True)
        .agg(first_us=pl.col("begin_us").first(), pieces=pl.len())
        .sort("first_us", maintain_order=True)
    )
    a_request = max(1.0, pieces.height / max(1, requests.height))
    room = int(min(MOST_REQUESTS, MOST_PIECES / a_request)) // engines
    every = max(1.0, requests.height / max(1, room))
    place = pl.int_range(pl.len())
    even = (place / every).floor() != ((place - 1) / every).floor()
    return requests.filter(even | pl.col("request_id").is_in(list(named))), pieces
