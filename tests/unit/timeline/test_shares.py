"""Sums over ``request_states``: how much time had passed at a moment, and how many rows each step is in."""

import polars as pl

from schedtrace.timeline.shares import per_step, until
from tests.makers import step


def test_a_row_counts_from_its_begin_to_its_end():
    rows = pl.DataFrame({"begin_us": [15, 10], "end_us": [40, 20]})
    moments = [0, 10, 12, 18, 20, 30, 50]
    assert until(rows, moments) == [0, 0, 2, 8 + 3, 10 + 5, 10 + 15, 10 + 25]


def test_a_step_is_in_the_rows_from_their_first_to_their_last(view_of):
    view = view_of(*map(step, range(6)))
    rows = pl.DataFrame({"begin_step": [2, 1, 5, None], "end_step": [3, 2, 5, None]})
    assert per_step(view, rows).select("step", "requests").rows() == [(1, 1), (2, 2), (3, 1), (5, 1)]
