"""Sums over ``request_states``: how much time had passed at a moment, and how many rows each step is in."""

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Preemption
from schedtrace.timeline.request_states import queue_times
from schedtrace.timeline.spans import steps_of, until
from tests.makers import arrival, step


def test_a_row_counts_from_its_begin_to_its_end():
    rows = pl.DataFrame({"begin_us": [15, 10], "end_us": [40, 20]})
    moments = [0, 10, 12, 18, 20, 30, 50]
    assert until(rows, moments) == [0, 0, 2, 8 + 3, 10 + 5, 10 + 15, 10 + 25]


def test_a_step_is_in_the_rows_from_their_first_to_their_last(view_of):
    view = view_of(*map(step, range(6)))
    rows = pl.DataFrame({"begin_step": [2, 1, 5, None], "end_step": [3, 2, 5, None]})
    assert steps_of(view.steps, rows).select("step", "requests").rows() == [(1, 1), (2, 2), (3, 1), (5, 1)]


def test_the_time_in_the_queue_ends_with_the_first_admission(view_of):
    """a comes 6 ms before step 1 and is taken by step 3; what it waits after a preemption is not counted."""
    waits = {"got": {"r": 1}, "waiting": 1, "ended": Cause.KV_BLOCKS}
    view = view_of(
        step(0, got={"r": 1}),
        step(1, **waits, arrived=[arrival("a", 4000, 4000)]),
        step(2, **waits),
        step(3, got={"a": 100}, new="a"),
        step(4, **waits, preempted=[Preemption("a", 100)]),
        step(5, got={"a": 100}, resumed="a"),
    )
    assert queue_times(view).select("request_id", "step", "queue_us").rows() == [("a", 3, 26_000)]
