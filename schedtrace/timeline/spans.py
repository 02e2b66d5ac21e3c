"""Sums over spans of time or steps: the level at each moment, and the part of a row within spans."""

import polars as pl

LENGTH_US = pl.col("end_us") - pl.col("begin_us")
"""Expression for the length of a row with ``begin_us`` and ``end_us``, in microseconds."""


def total_us(spans: pl.DataFrame) -> int:
    """Return the total length of spans, in microseconds."""
    return int((spans["end_us"] - spans["begin_us"]).sum())


def level(
    spans: pl.DataFrame | pl.LazyFrame,
    begin: str | pl.Expr = "begin_us",
    end: str | pl.Expr = "end_us",
    **counts: str | int | pl.Expr,
) -> pl.DataFrame:
    """Return the sum of the spans' values after each moment at which a span begins or ends.

    Args:
        spans: Table with one row per span.
        begin: First moment, or first step, of each span.
        end: First moment, or first step, after each span.
        counts: Value that each span adds, by the name of the result's column; 1 counts the spans.

    Returns:
        ``at``, sorted; the columns ``counts``; and ``until``, the next ``at``, null in the last row.
    """
    import numpy as np  # noqa: PLC0415  # the command line must answer before it is loaded

    rows = spans.lazy().select(begin_at=begin, end_at=end, **counts).collect()
    moments = np.concatenate([rows[name].to_numpy() for name in ("begin_at", "end_at")])
    at, places = np.unique(moments, return_inverse=True)
    columns = [pl.Series("at", at)]
    for name in counts:
        values = np.nan_to_num(rows[name].to_numpy())
        changes = np.zeros(len(at), values.dtype)
        np.add.at(changes, places, np.concatenate([values, -values]))
        columns.append(pl.Series(name, changes.cumsum(), dtype=rows.schema[name], strict=False))
    last = pl.Series([None][: len(at)], dtype=columns[0].dtype)
    return pl.DataFrame([*columns, columns[0][1:].append(last).alias("until")])


def at_steps(levels: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Add to each step, in order, the ``level`` of the spans of steps that cover it."""
    import numpy as np  # noqa: PLC0415  # as above

    steps = steps.sort("step")
    places = np.searchsorted(levels["at"].to_numpy(), steps["step"].to_numpy(), side="right")
    sums = [levels[name] for name in levels.columns if name not in {"at", "until"}]
    return steps.hstack([pl.Series(of.name, np.insert(of.to_numpy(), 0, 0)[places]) for of in sums])


def steps_of(steps: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the steps in which rows of ``request_states`` lie, with the number of such rows (``requests``).

    Args:
        steps: Steps of the timeline, with ``step`` and the requested columns.
        rows: Rows with ``begin_step`` and ``end_step``; null if no step had the request.
    """
    spans = rows.drop_nulls(["begin_step", "end_step"])
    levels = level(spans, "begin_step", pl.col("end_step") + 1, requests=1)
    return at_steps(levels, steps).filter(pl.col("requests") > 0)


def time_within(rows: pl.DataFrame, spans: pl.DataFrame, kinds: dict[str, pl.Expr]) -> pl.DataFrame:
    """Return the microseconds of each of ``rows`` that lie in the spans of each kind, rounded.

    The time up to a moment consists of the whole spans before it and part of one span; a row's time is the
    difference between its two ends. The cost is therefore proportional to rows plus spans.

    Args:
        rows: Rows with ``begin_us`` and ``end_us``.
        spans: Spans with ``begin_us`` and ``end_us``, which do not overlap, and the columns that ``kinds``
            reads.
        kinds: Condition on ``spans``, or share of a span that counts, by the name of the result's column.
    """
    import numpy as np  # noqa: PLC0415  # as above

    if spans.is_empty() or rows.is_empty():
        return pl.DataFrame({name: np.zeros(rows.height, dtype=np.int64) for name in kinds})
    order = np.argsort(spans["begin_us"].to_numpy(), kind="stable")
    begins, lasts = (spans[name].to_numpy()[order] for name in ("begin_us", "end_us"))
    shares = spans.select(**{name: share.cast(pl.Float64).fill_null(0.0) for name, share in kinds.items()})
    moments = [rows[name].to_numpy() for name in ("begin_us", "end_us")]
    places = [np.searchsorted(begins, us, side="right") - 1 for us in moments]
    into = [np.minimum(us, lasts[at]) - begins[at] for us, at in zip(moments, places, strict=True)]
    times = {}
    for name in kinds:
        share = np.broadcast_to(shares[name], len(begins))[order]
        before = np.concatenate([[0.0], np.cumsum((lasts - begins) * share)])
        begin, end = (
            np.where((at >= 0) & ~np.isnan(us), before[at] + share[at] * part, 0.0)
            for us, at, part in zip(moments, places, into, strict=True)
        )
        times[name] = (end - begin).round().astype(np.int64)
    return pl.DataFrame(times)


def overlap_us(rows: pl.DataFrame, spans: pl.DataFrame) -> pl.Series:
    """Return how many microseconds of each row lie in spans, which must not overlap each other."""
    return time_within(rows, spans, {"us": pl.lit(value=True)})["us"]


def until(rows: pl.DataFrame, moments: list[int]) -> list[float]:
    """Return the total time of all ``rows`` before each moment, in microseconds.

    A row contributes the time since its beginning minus, once it is over, the time since its end.
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
    """Return the spans' union, in order (``begin_us``, ``end_us``); spans that touch become one."""
    import numpy as np  # noqa: PLC0415  # as above

    if spans.is_empty():
        return pl.DataFrame(schema={"begin_us": pl.Int64, "end_us": pl.Int64})
    begins, ends = (spans[name].to_numpy().astype(np.int64) for name in ("begin_us", "end_us"))
    order = np.argsort(begins, kind="stable")
    begins, latest = begins[order], np.maximum.accumulate(ends[order])
    firsts = np.flatnonzero(np.insert(begins[1:] > latest[:-1], 0, True))
    lasts = np.append(firsts[1:], len(begins)) - 1
    return pl.DataFrame({"begin_us": begins[firsts], "end_us": latest[lasts]})


def merged(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the spans sorted by time, each cut to begin no earlier than the span before it ends."""
    if spans.is_empty():
        return spans
    before = pl.col("end_us").cum_max().shift(1).fill_null(pl.col("begin_us").min())
    cut = pl.max_horizontal("begin_us", before)
    return spans.sort("begin_us", "end_us").with_columns(begin_us=cut).filter(LENGTH_US > 0)
