"""The requests' time as parts that add up."""

import pytest

from schedtrace.diagnose.time_split import engine_split, time_split
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, Preemption
from tests.makers import arrival, finish, step


def at(number, **fields):
    """A step whose device works 80 of 100 us."""
    return step(number, start=100 * number, took=20, back=100, **fields)


def parts(*views):
    return {
        (part.part, part.cause): (part.time_ms, part.share_frac)
        for part in time_split([*map(engine_split, views)])
    }


WAITS = [
    at(0, waiting=1, ended=Cause.KV_BLOCKS, arrived=[arrival("a", None, 0)]),
    at(1, got={"a": 100}, new="a"),
    at(2, finished=[finish("a", finished_us=200)]),
]


def test_waiting_and_computing(view_of):
    """a waits 100 us, and computes for 100 us, in 20 of which the engine schedules."""
    assert parts(view_of(*WAITS)) == {
        ("waiting", "kv_blocks"): (0.1, 0.5),
        ("prefill", None): (0.08, pytest.approx(0.4)),
        ("between_steps", None): (0.02, pytest.approx(0.1)),
    }


def test_engines_are_added_up(view_of):
    assert parts(view_of(*WAITS), view_of(*WAITS))["waiting", "kv_blocks"] == (0.2, 0.5)


def test_what_follows_from_a_preemption_is_waiting_for_kv_blocks(view_of):
    lines = [
        at(0, got={"a": 100}, new="a", arrived=[arrival("a", None, 0)]),
        at(
            1,
            waiting=1,
            ended=Exit("waiting", "break", Cause.PREEMPTED_THIS_STEP, "a"),
            preempted=[Preemption("a", 100)],
        ),
        at(2, got={"a": 100}, resumed="a", recomputed_tokens=100),
        at(3, finished=[finish("a", finished_us=300)]),
    ]
    found = parts(view_of(*lines))
    assert found["waiting", "kv_blocks"][0] == 0.1
    assert found["recompute", None][0] == 0.08


def test_the_parts_add_up_to_1_the_largest_first(view_of):
    split = time_split([engine_split(view_of(*WAITS))])
    shares = [part.share_frac for part in split]
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)


def test_without_requests_there_are_no_parts(view_of):
    assert time_split([engine_split(view_of(step(0)))]) == []
