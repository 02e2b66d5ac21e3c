"""Sums over the requests of a step are those over its rows."""

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from schedtrace.model.trace import ScheduledRequest
from schedtrace.timeline.timeline import context_tokens
from tests.makers import step


@pytest.fixture
def trace(trace_of):
    """A chunked prefill, decodes across blocks, a step without requests, a chunk of nothing, a gap."""
    got = [
        [("a", 0, 7, "new"), ("b", 12, 1)],
        [("a", 7, 7), ("b", 13, 1)],
        [("a", 14, 7), ("b", 14, 1), ("c", 5, 0, "new")],
        [],
        *([("a", 21 + n, 1), ("c", 5, 0), ("d", 30 * n, 30)] for n in range(9)),
    ]
    numbers = [*range(4), *range(6, 15)]
    return trace_of(
        *(
            step(number, requests=[ScheduledRequest(*row) for row in rows], total_requests=len(rows))
            for number, rows in zip(numbers, got, strict=True)
        )
    )


def by_rows(trace, **sums):
    rows = trace.requests().group_by("step").agg(**sums).collect()
    return trace.steps.select("step").join(rows, on="step", how="left").fill_null(0)


def test_context_is_what_the_requests_of_a_step_had_computed(trace):
    expected = by_rows(trace, context_tokens=pl.col("computed_tokens").sum())
    assert expected["context_tokens"].to_list()[:5] == [12, 20, 33, 0, 26]
    assert_frame_equal(context_tokens(trace.stretches(), trace.steps), expected)
