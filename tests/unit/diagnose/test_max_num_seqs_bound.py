"""``max-num-seqs-bound``: requests that waited for a seat."""

import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit
from tests.makers import arrival, step

NO_SEAT = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "a")


def two_seats_taken(full_steps):
    """20 steps while a third request waits; after so many of them 10 of 100 blocks are free, else 80."""
    lines = [
        step(
            n,
            got={"r": 1, "s": 1},
            waiting=1,
            ended=NO_SEAT,
            kv_blocks_free_after=10 if n < full_steps else 80,
        )
        for n in range(20)
    ]
    lines[0].arrived = [arrival(name, None, 0) for name in "rsa"]
    return lines


@pytest.mark.parametrize(("full_steps", "fit"), [(0, 10), (1, 10), (2, 2), (20, 2)])
def test_one_full_step_does_not_decide_how_many_requests_the_kv_cache_holds(found, full_steps, fit):
    [finding] = found("max-num-seqs-bound", *two_seats_taken(full_steps), max_num_running_reqs=2)
    assert finding.evidence.seats_that_fit == fit
