"""``long-tail``: what is advised depends on whether the longest request could have begun sooner."""

import pytest

from schedtrace.diagnose.rules.long_tail import RULE
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, finish, step

SHORT = [*"abcdefghijklmnopqrst"]


@pytest.mark.parametrize("began_us", [0, 1400, 1500, 9000, None])
def test_the_longest_first_is_no_advice_where_it_was_the_first(trace_of, began_us, recorded_words):
    """A twentieth of the 29 ms is 1,450 us; 20 requests end after 9 ms, another one runs alone."""
    names = [*SHORT, "x"]
    trace = trace_of(
        step(0, got=dict.fromkeys(names, 10), new=names, arrived=[arrival(name, 0) for name in names]),
        step(1, got={"x": 1}, finished=[finish(name, finished_us=9_000) for name in SHORT]),
        step(2, got={"x": 1}),
        step(3, finished=[finish("x", output_tokens=100, finished_us=29_000, scheduled_us=began_us)]),
    )
    [found] = RULE(make_timeline(trace))
    assert (found.evidence.requests, found.evidence.tail_ms) == (["x"], 20)
    recorded_words(found.advice[0].message)
