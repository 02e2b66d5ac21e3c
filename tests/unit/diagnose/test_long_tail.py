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


@pytest.mark.parametrize(
    ("tokens", "stops", "time_us", "reported"),
    [(30, 20, 40_000, True), (29, 20, 40_000, False), (30, 18, 40_000, False), (30, 20, 9_000, False)],
    ids=["three times the usual output", "less", "few that stop", "little time"],
)
def test_requests_that_run_to_max_tokens_while_others_stop(
    trace_of, tokens, stops, time_us, reported, recorded_words
):
    """20 requests stop after 10 tokens and 1 ms; x runs to its limit, and its prompt comes again as y."""
    names = [*SHORT[:stops], "x", "y"]
    hashes = {"x": "same", "y": "same"}
    came = [arrival(name, 0, prompt_tokens=5, prefix_hashes=hashes.get(name, name * 4)) for name in names]
    early = [finish(name, "STOPPED", output_tokens=10, finished_us=1_000) for name in [*SHORT[:stops], "y"]]
    late = finish("x", "LENGTH_CAPPED", output_tokens=tokens, finished_us=time_us)
    trace = trace_of(
        step(0, start=0, got=dict.fromkeys(names, 10), new=names, arrived=came),
        step(1, start=1_100, got={"x": 1}, finished=early[:stops]),
        step(2, start=time_us + 100, finished=[late, *early[stops:]]),
    )
    unbounded = [finding for finding in RULE(make_timeline(trace)) if hasattr(finding.evidence, "capped")]
    assert [
        (each.evidence.capped, each.evidence.stopped, each.evidence.again, each.share_frac)
        for each in unbounded
    ] == ([(1, 21, 1, None)] if reported else [])
    for each in unbounded:
        recorded_words(each.verdict, each.advice)
