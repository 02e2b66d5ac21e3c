"""How much of each row's time lies in spans of a kind, by prefix sums: never rows times spans."""

import polars as pl

from schedtrace.timeline.pieces import LENGTH_US


def time_within(rows: pl.DataFrame, spans: pl.DataFrame, kinds: dict[str, pl.Expr]) -> pl.DataFrame:
    """One row per row of ``rows``: for each kind the microseconds of it that lie in its spans, rounded.

    The time up to a moment is that of the whole spans before it and of a part of one; a row's time is the
    difference between its two ends. So the cost is that of rows plus spans.

    Args:
        rows: With ``begin_us`` and ``end_us``.
        spans: With ``begin_us`` and ``end_us``, which do not overlap each other, and what ``kinds`` reads.
        kinds: Name of a result's column to a condition on ``spans``, or to the share of a span that counts.
    """
    shares = {name: of.cast(pl.Float64).fill_null(0.0) for name, of in kinds.items()}
    sums = spans.sort("begin_us").select(
        "begin_us",
        *(share.alias(f"in_{name}") for name, share in shares.items()),
        *(
            (LENGTH_US * share).cum_sum().shift(1, fill_value=0.0).alias(name)
            for name, share in shares.items()
        ),
        last_us="end_us",
    )

    def until(column: str) -> pl.DataFrame:
        moments = rows.select(moment_us=pl.col(column)).with_row_index("row").sort("moment_us")
        into = pl.min_horizontal("moment_us", "last_us") - pl.col("begin_us")
        return (
            moments.join_asof(sums, left_on="moment_us", right_on="begin_us", coalesce=False)
            .select(
                "row",
                *((pl.col(name) + pl.col(f"in_{name}") * into).fill_null(0.0).alias(name) for name in kinds),
            )
            .sort("row")
            .drop("row")
        )

    begin, end = until("begin_us"), until("end_us")
    return pl.DataFrame([(end[name] - begin[name]).round().cast(pl.Int64) for name in kinds])
