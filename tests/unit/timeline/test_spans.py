"""Sums over spans: how many there are at a time or in a step, and how much of a row lies in others."""

import polars as pl
import pytest

from schedtrace.timeline.spans import level, merged, steps_of, time_within, united, until

SPANS = pl.DataFrame(
    {"begin_us": [0, 10, 40], "end_us": [10, 30, 50], "kind": ["a", "b", "a"], "share": [0.3, 0.5, 1.0]}
)
A, B = pl.col("kind") == "a", pl.col("kind") == "b"


@pytest.mark.parametrize(
    ("begin", "end", "kinds", "expected"),
    [
        (5, 45, {"a": A, "b": B}, (10, 20)),
        (30, 40, {"us": pl.lit(value=True)}, (0,)),
        (45, 99, {"a": A}, (5,)),
        (0, 30, {"us": pl.col("share")}, (13,)),
    ],
    ids=["of each kind", "a gap between spans", "beyond all spans", "a span counts by its share"],
)
def test_time_of_rows_within_spans(begin, end, kinds, expected):
    rows = pl.DataFrame({"begin_us": [begin], "end_us": [end]})
    assert time_within(rows, SPANS, kinds).row(0) == expected


def test_without_spans_no_time_is_within():
    assert time_within(SPANS, SPANS.clear(), {"us": pl.lit(value=True)})["us"].to_list() == [0, 0, 0]


def test_a_row_counts_from_its_begin_to_its_end():
    rows = pl.DataFrame({"begin_us": [15, 10], "end_us": [40, 20]})
    moments = [0, 10, 12, 18, 20, 30, 50]
    assert until(rows, moments) == [0, 0, 2, 8 + 3, 10 + 5, 10 + 15, 10 + 25]


OVERLAPPING = pl.DataFrame({"begin_us": [0, 5, 20, 30], "end_us": [10, 15, 30, 40]})


def test_a_level_changes_where_a_span_begins_or_ends():
    spans = OVERLAPPING.with_columns(weight=pl.int_range(pl.len()) + 1)
    levels = level(spans.head(2), count=1, weight="weight").select("at", "until", "count", "weight")
    assert levels.rows() == [(0, 5, 1, 1), (5, 10, 2, 3), (10, 15, 1, 2), (15, None, 0, 0)]


def test_overlapping_spans_are_joined_or_cut():
    assert united(OVERLAPPING).rows() == [(0, 15), (20, 40)]
    assert merged(OVERLAPPING).rows() == [(0, 10), (10, 15), (20, 30), (30, 40)]


def test_a_step_is_in_the_rows_from_their_first_to_their_last():
    rows = pl.DataFrame({"begin_step": [2, 1, 5, None], "end_step": [3, 2, 5, None]})
    steps = steps_of(pl.DataFrame({"step": range(6)}), rows)
    assert steps.rows() == [(1, 1), (2, 2), (3, 1), (5, 1)]
