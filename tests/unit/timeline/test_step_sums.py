"""Sums over the requests of a step are those over its rows."""

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from schedtrace.model.trace import ScheduledRequest
from schedtrace.timeline.admission import blocks_needed
from schedtrace.timeline.timeline import _context_tokens as context_tokens
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


@pytest.mark.parametrize("block_size", [1, 2, 4, 7, 16, 100])
def test_blocks_are_those_that_the_tokens_of_a_step_fill(trace, block_size):
    ends = pl.col("computed_tokens") + pl.col("scheduled_tokens")
    blocks = ((ends + block_size - 1) // block_size).sum()
    expected = by_rows(trace, requests=pl.len(), blocks=blocks)
    found = blocks_needed(trace.stretches(), trace.steps, block_size)
    assert_frame_equal(found, expected, check_dtypes=False)


def test_a_stretch_of_many_steps_takes_a_block_whenever_the_last_is_full(trace_of):
    many = [step(n, requests=[ScheduledRequest("a", 3 + n, 1)], total_requests=1) for n in range(20)]
    trace = trace_of(*many)
    assert trace.stretches().collect().height == 1
    found = blocks_needed(trace.stretches(), trace.steps, 8)
    assert found["blocks"].to_list() == [1] * 5 + [2] * 8 + [3] * 7
