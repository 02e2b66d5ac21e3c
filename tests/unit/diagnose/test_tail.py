"""What makes the slowest requests slow, on lives of which every moment is known."""

import pytest

from schedtrace.diagnose.latencies import tails
from schedtrace.model.trace import ScheduledRequest
from tests.makers import arrival, finish, step


def one_each(count, *, slow, took=1000, extra=49_000):
    """Step ``n`` computes the prompt of request ``n``, of which that is all; one takes far longer."""
    lines, begin, back = [], 0, 0
    for number in range(count):
        length = took + (extra if number == slow else 0)
        ended = finish(
            f"r{number - 1}",
            arrived_us=begin - 20,
            first_token_us=back,
            last_token_us=back,
            finished_us=back + 20,
        )
        begin = back + 100 if number else 0
        lines.append(
            step(
                number,
                start=begin,
                took=10,
                back=length - 10,
                got={f"r{number}": 1},
                prefill_tokens=1,
                new=[f"r{number}"],
                arrived=[arrival(f"r{number}", begin - 20, begin - 10)],
                finished=[ended] if number else [],
            )
        )
        back = begin + length
    return lines


def test_there_is_no_tail_where_all_take_about_as_long(view_of):
    assert tails(view_of(*one_each(40, slow=None))) == []


def test_a_slow_step_makes_the_tail_of_the_request_in_it(view_of):
    [ttft, e2e] = tails(view_of(*one_each(41, slow=20)))
    assert (ttft.metric, e2e.metric) == ("ttft_ms", "e2e_ms")
    assert (ttft.requests, ttft.slowest, ttft.slowest_request) == (40, 1, "r20")
    assert ttft.slowest_ms == pytest.approx(50.02)
    assert ttft.median_ms == pytest.approx(1.02)
    [part] = ttft.parts
    assert (part.state, part.cause) == ("interrupted", "scattered")
    assert part.share_frac == pytest.approx(1.0, abs=1e-4)  # the length of a usual step is fitted
    assert part.time_ms == pytest.approx(49.0, abs=0.01)
    assert (ttft.first_step, ttft.last_step) == (20, 20)


def test_fewer_requests_have_no_tail(view_of):
    assert tails(view_of(*one_each(20, slow=10))) == []


def test_a_prompt_counts_without_what_was_cached(view_of):
    lines = one_each(40, slow=20)
    for number, line in enumerate(lines):
        line.requests = [ScheduledRequest(f"r{number}", 0 if number == 20 else 90, 1, "new")]
    [ttft, _] = tails(view_of(*lines))
    assert (ttft.prefill_tokens, ttft.usual_prefill_tokens) == (100, 10)
