"""Runs of steps with the same cause, cut to the steps in which a request waited."""

import polars as pl

from schedtrace.timeline.pieces import cause_runs, placed

STEPS = placed(
    pl.DataFrame({"step": range(6), "start_us": range(0, 600, 100), "output_us": range(50, 650, 100)})
)
USUAL = pl.Series(["a", "a", "a", "a", "b", "b"])
WITHIN_A_RUN, OVER_TWO, EMPTY = ("x", 1, 3), ("y", 2, 6), ("z", 4, 4)
SPANS = pl.DataFrame(
    [WITHIN_A_RUN, OVER_TWO, EMPTY],
    schema={"request_id": pl.String, "first": pl.Int64, "end": pl.Int64},
    orient="row",
)


def runs(*named):
    """Return each run as request, first and last place, and cause; ``named``: step, request and cause."""
    columns = {"step": pl.Int64, "request_id": pl.String, "cause": pl.String}
    rows = cause_runs(SPANS, USUAL, pl.DataFrame(named, schema=columns, orient="row"), STEPS)
    return rows.select("request_id", "place", "last", "cause").rows()


def test_a_run_begins_and_ends_with_the_span():
    assert runs() == [("x", 1, 2, "a"), ("y", 2, 3, "a"), ("y", 4, 5, "b")]


def test_a_step_that_names_a_request_has_a_run_of_its_own():
    """After it, the usual cause of the next step holds again; a request without a span is left out."""
    assert runs((3, "y", "c"), (2, "x", "c"), (5, "y", "d"), (1, "w", "c")) == [
        ("x", 1, 1, "a"),
        ("x", 2, 2, "c"),
        ("y", 2, 2, "a"),
        ("y", 3, 3, "c"),
        ("y", 4, 4, "b"),
        ("y", 5, 5, "d"),
    ]
