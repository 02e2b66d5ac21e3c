"""Sums over spans of time or of steps: what they add up to at each moment, and how much lies in others.

Also the pieces of requests' lives, since when each was in which state: ``request_states.py`` puts them
together. A piece has no end: it lasts until the request's next one begins. So the pieces of a request can
neither overlap nor leave a gap.
"""

from typing import Any

import polars as pl

PIECE_SCHEMA = {
    "request_id": pl.String,
    "at": pl.Int64,
    "rank": pl.Int8,
    "us": pl.Int64,
    "state": pl.String,
    "cause": pl.String,
    "begin_step": pl.Int64,
    "end_step": pl.Int64,
    "tokens": pl.Int64,
}
"""Columns of a table of pieces. ``at`` is the place, among the engine's steps, of the step that began it (-1:
none did) and ``rank`` its order among pieces of that step; with several steps in flight these give the order
of events, and ``us`` may not. ``begin_step`` to ``end_step`` are the steps that it is made of, null where no
step knew of the request, and ``tokens`` what these scheduled of it."""

LENGTH_US = pl.col("end_us") - pl.col("begin_us")
"""Of a row of ``request_states`` or ``engine_states``."""

ARRIVES, WAITS, COMPUTES, DECODES, TOLD = range(5)
"""``rank``: a step first refuses or skips a request, or admits it; its output makes it decode. What is told
of who is there comes after all of the step before."""


def pieces(frame: pl.DataFrame, **columns: pl.Expr) -> pl.DataFrame:
    """A table of pieces: columns by name; those missing are null, and ``tokens`` 0."""
    missing = {name: pl.lit(None) for name in ("cause", "begin_step", "end_step")} | {"tokens": pl.lit(0)}
    made = missing | columns
    own = {name: made.get(name, pl.col(name)).cast(dtype) for name, dtype in PIECE_SCHEMA.items()}
    return frame.select(**own)


def placed(steps: pl.DataFrame) -> pl.DataFrame:
    """``step`` (sorted), ``at`` (its place), ``start_us`` and ``output_us`` of each step of an engine."""
    return steps.select("step", "start_us", "output_us").with_row_index("at").cast({"at": pl.Int64})


def place_of(rows: pl.DataFrame, steps: pl.DataFrame, column: str, name: str) -> pl.DataFrame:
    """Rows with the place of the first step numbered ``column`` or higher; the number of steps if none is."""
    numbers = steps["step"]
    return rows.with_columns(pl.Series(name, numbers.search_sorted(rows[column], side="left")).cast(pl.Int64))


def level(
    spans: pl.DataFrame | pl.LazyFrame,
    begin: str | pl.Expr = "begin_us",
    end: str | pl.Expr = "end_us",
    **counts: str | int | pl.Expr,
) -> pl.DataFrame:
    """What the spans that last add up to, from each moment at which one begins or ends.

    Args:
        spans: One row each.
        begin: The first moment, or the first step, of each.
        end: The first moment, or the first step, after it.
        counts: Name of a result's column to what each span adds to it: 1 counts the spans.

    Returns:
        ``at``, sorted; the columns ``counts``; and ``until``, the next ``at``, null in the last row.
    """
    begins, ends = (spans.lazy().select(at=at, **counts) for at in (begin, end))
    return (
        pl.concat([begins, ends.with_columns(-pl.exclude("at"))], how="vertical_relaxed")
        .group_by("at")
        .agg(pl.all().sum())
        .sort("at")
        .with_columns(pl.exclude("at").cum_sum(), until=pl.col("at").shift(-1))
        .collect()
    )


def at_steps(levels: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Each step, in their order, with the ``level`` of spans of steps that holds there."""
    return (
        steps.sort("step")
        .join_asof(levels, left_on="step", right_on="at")
        .with_columns(pl.col(set(levels.columns) - {"at", "until"}).fill_null(0))
        .drop("at", "until")
    )


def steps_of(steps: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """The steps that rows of ``request_states`` are made of, with ``requests``: in how many rows each is.

    Args:
        steps: Of the timeline: the columns that are wanted, ``step`` among them.
        rows: With ``begin_step`` and ``end_step``; null where no step knew of it.
    """
    known = rows.drop_nulls(["begin_step", "end_step"])
    levels = level(known, "begin_step", pl.col("end_step") + 1, requests=1)
    return at_steps(levels, steps).filter(pl.col("requests") > 0)


def time_within(rows: pl.DataFrame, spans: pl.DataFrame, kinds: dict[str, pl.Expr]) -> pl.DataFrame:
    """One row per row of ``rows``: for each kind the microseconds of it that lie in its spans, rounded.

    The time up to a moment is that of the whole spans before it and of a part of one; a row's time is the
    difference between its two ends. So the cost is that of rows plus spans.

    Args:
        rows: With ``begin_us`` and ``end_us``.
        spans: With ``begin_us`` and ``end_us``, which do not overlap each other, and what ``kinds`` reads.
        kinds: Name of a result's column to a condition on ``spans``, or to the share of a span that counts.
    """
    import numpy as np  # noqa: PLC0415  # the command line must answer before it is loaded

    if spans.is_empty():
        return pl.DataFrame({name: np.zeros(rows.height, dtype=np.int64) for name in kinds})
    ordered = spans.sort("begin_us")
    begins, lasts = (ordered[name].to_numpy() for name in ("begin_us", "end_us"))
    shares = ordered.select(**{name: share.cast(pl.Float64).fill_null(0.0) for name, share in kinds.items()})
    moments = [rows[name].to_numpy() for name in ("begin_us", "end_us")]
    places = [np.searchsorted(begins, us, side="right") - 1 for us in moments]
    into = [np.minimum(us, lasts[at]) - begins[at] for us, at in zip(moments, places, strict=True)]

    def within(share: Any) -> Any:
        before = np.concatenate([[0.0], np.cumsum((lasts - begins) * share)])
        begin, end = (
            np.where((at >= 0) & ~np.isnan(us), before[at] + share[at] * part, 0.0)
            for us, at, part in zip(moments, places, into, strict=True)
        )
        return (end - begin).round().astype(np.int64)

    return pl.DataFrame({name: within(np.broadcast_to(shares[name], len(begins))) for name in kinds})


def overlap_us(rows: pl.DataFrame, spans: pl.DataFrame) -> pl.Series:
    """How many microseconds of each row lie in spans that do not overlap each other."""
    return time_within(rows, spans, {"us": pl.lit(value=True)})["us"]


def until(rows: pl.DataFrame, moments: list[int]) -> list[float]:
    """How much of the time of ``rows`` lies before each moment, in microseconds.

    A row adds what of it has passed: the time since its begin, less, once it is over, the time since its end.
    """
    import numpy as np  # noqa: PLC0415  # as above

    moments_us, sums = np.array(moments, dtype=float), []
    for column in ("begin_us", "end_us"):
        sorted_us = np.sort(rows[column].to_numpy().astype(float))
        total = np.concatenate([[0.0], np.cumsum(sorted_us)])
        count = np.searchsorted(sorted_us, moments_us, side="left")
        sums.append(count * moments_us - total[count])
    passed: list[float] = (sums[0] - sums[1]).tolist()
    return passed


def united(spans: pl.DataFrame) -> pl.DataFrame:
    """The moments of any span, as spans that do not touch: ``begin_us`` and ``end_us``, in their order."""
    spans = spans.select(pl.col("begin_us", "end_us").cast(pl.Int64))
    if spans.is_empty():
        return spans
    latest = pl.col("end_us").cum_max()
    return (
        spans.sort("begin_us")
        .with_columns(part=(pl.col("begin_us") > latest.shift(1)).fill_null(value=True).cum_sum())
        .group_by("part", maintain_order=True)
        .agg(pl.col("begin_us").min(), pl.col("end_us").max())
        .drop("part")
    )


def merged(spans: pl.DataFrame) -> pl.DataFrame:
    """Spans in order of time, each cut where the one before still lasts."""
    if spans.is_empty():
        return spans
    before = pl.col("end_us").cum_max().shift(1).fill_null(pl.col("begin_us").min())
    cut = pl.max_horizontal("begin_us", before)
    return spans.sort("begin_us", "end_us").with_columns(begin_us=cut).filter(LENGTH_US > 0)
