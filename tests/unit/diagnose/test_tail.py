"""What makes the slowest requests slow, on lives of which every moment is known."""

import pytest

from schedtrace.diagnose.tail import tails
from schedtrace.present.words import tail_sentence
from tests.makers import arrival, finish, step


def one_each(count, *, slow=(), took=1000, extra=49_000, tokens=1):
    """Step ``n`` computes the prompt of request ``n``, of which that is all; some take far longer."""
    lines, now = [], 0
    for number in range(count):
        name = f"r{number}"
        length = took + (extra if number in slow else 0)
        lines.append(
            step(
                number,
                start=now,
                took=10,
                back=length - 10,
                got={name: tokens},
                new=[name],
                arrived=[arrival(name, now - 20, now - 10)],
                finished=[
                    finish(
                        f"r{number - 1}",
                        arrived_us=before - 20,
                        first_token_us=back,
                        last_token_us=back,
                        finished_us=back + 20,
                    )
                ]
                if number
                else [],
            )
        )
        before, back = now, now + length
        now += length + 100
    return lines


def test_there_is_no_tail_where_all_take_about_as_long(view_of):
    assert tails(view_of(*one_each(40))) == []


def test_a_slow_step_makes_the_tail_of_the_request_in_it(view_of):
    [ttft, e2e] = tails(view_of(*one_each(41, slow={20})))
    assert (ttft.metric, e2e.metric) == ("ttft_ms", "e2e_ms")
    assert (ttft.requests, ttft.slowest, ttft.slowest_request) == (40, 1, "r20")
    assert ttft.slowest_ms == pytest.approx(50.02)
    assert ttft.median_ms == pytest.approx(1.02)
    [part] = ttft.parts
    assert (part.state, part.cause, part.share_frac) == ("interrupted", "scattered", 1.0)
    assert part.time_ms == pytest.approx(49.0)
    assert (ttft.first_step, ttft.last_step) == (20, 20)


def test_fewer_requests_have_no_tail(view_of):
    assert tails(view_of(*one_each(20, slow={10}))) == []

