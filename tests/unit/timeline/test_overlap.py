"""Time of rows within spans."""

import polars as pl

from schedtrace.timeline.spans import time_within

SPANS = pl.DataFrame(
    {"begin_us": [0, 10, 40], "end_us": [10, 30, 50], "kind": ["a", "b", "a"], "share": [0.3, 0.5, 1.0]}
)


def within(begin: int, end: int, **kinds: pl.Expr) -> tuple[int, ...]:
    rows = pl.DataFrame({"begin_us": [begin], "end_us": [end]})
    return time_within(rows, SPANS, kinds).row(0)


def test_the_kinds_that_a_row_touches() -> None:
    assert within(5, 45, a=pl.col("kind") == "a", b=pl.col("kind") == "b") == (10, 20)


def test_a_gap_between_spans_is_in_none() -> None:
    assert within(30, 40, a=pl.lit(value=True)) == (0,)


def test_time_outside_all_spans_is_in_none() -> None:
    assert within(45, 99, a=pl.col("kind") == "a") == (5,)


def test_a_span_counts_by_its_share() -> None:
    assert within(0, 30, us=pl.col("share")) == (13,)
