"""Work of the device for requests that were aborted, and waits for it: steps of 100 us, 80 of them busy."""

import polars as pl
import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit
from schedtrace.timeline.charges import ABORTED_WORK
from schedtrace.timeline.step_time import StepTime
from tests.makers import arrival, finish, step

STEPS = 10
MODEL = StepTime(20.0, 1.0, 30.0, 0.0, steps=STEPS, error_frac=0.0, most_base_us=20.0)
"""A step with two decodes takes 80 us: half of the 60 us beside its base are of each."""


def aborted(name, output_tokens=0, arrived_us=0):
    return finish(
        name, "ABORTED", finished_us=100 * STEPS, output_tokens=output_tokens, arrived_us=arrived_us
    )


def lines(*ends, others=("r",)):
    """x and others decode; w waits for a seat in each step, and x, y and z are aborted at the end."""
    got = dict.fromkeys(("x", *others), 1)
    steps = [
        step(
            number,
            start=100 * number,
            took=0,
            back=80,
            got=got,
            waiting=1,
            ended=Exit("waiting", "break", Cause.MAX_NUM_SEQS, "w"),
            decode_tokens=len(got),
            arrived=[] if number else [arrival(name, None, queued=0) for name in ("x", "r", "w", "y", "z")],
        )
        for number in range(STEPS)
    ]
    return [*steps, step(STEPS, start=100 * STEPS, took=0, got={"w": 1}, new=["w"], finished=[*ends])]


@pytest.fixture
def charged(view_of):
    """``charged(*lines)``: microseconds that w waited, by charge."""

    def charge(*every):
        timeline = view_of(*every)
        timeline.longer_step_time = MODEL
        rows = timeline.charges.filter(pl.col("request_id") == "w")
        return dict(rows.group_by("charge").agg(pl.col("time_us").sum()).iter_rows())

    return charge


def test_who_waits_while_the_device_works_for_aborted_requests_waits_for_that_work(charged):
    waits = charged(*lines(aborted("x"), aborted("y"), aborted("z")))
    assert waits == {Cause.MAX_NUM_SEQS: 700, ABORTED_WORK: 300}


def test_a_step_that_has_no_other_request_was_wholly_in_vain(charged):
    waits = charged(*lines(aborted("x"), aborted("y"), aborted("z"), others=()))
    assert waits == {Cause.MAX_NUM_SEQS: 200, ABORTED_WORK: 800}


@pytest.mark.parametrize(
    "ends",
    [
        [aborted("x"), aborted("y")],
        [aborted("x", 10, 0), aborted("y", 10, 400), aborted("z", 10, 800)],
        [finish("x", finished_us=1000), finish("y", finished_us=1000), finish("z", finished_us=1000)],
    ],
    ids=["fewer than three", "a stop string may have ended them", "finished"],
)
def test_answers_that_somebody_may_have_read_are_not_in_vain(charged, ends):
    assert charged(*lines(*ends)) == {Cause.MAX_NUM_SEQS: 1000}


def test_requests_that_are_aborted_at_the_same_age_had_a_timeout(charged):
    waits = charged(*lines(aborted("x", 10, 10), aborted("y", 10, 0), aborted("z", 10, 20)))
    assert waits == {Cause.MAX_NUM_SEQS: 700, ABORTED_WORK: 300}
