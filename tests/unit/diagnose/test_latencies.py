import random

import polars as pl
import pytest

from schedtrace.diagnose.run_statistics import engine_sums
from schedtrace.diagnose.serving_metrics import distribution, inter_token, request_latencies, tails
from schedtrace.model.trace import Preemption, ScheduledRequest
from schedtrace.timeline.window import Window, windowed
from tests.makers import arrival, finish, step


def weighted(*rows):
    return pl.DataFrame(
        rows, schema={"us": pl.Float64, "weight": pl.Int64}, orient="row", infer_schema_length=None
    )


def test_a_weight_is_so_many_values():
    chance = random.Random(4)  # noqa: S311  # figures, no secret
    rows = [(float(chance.randrange(40)), chance.randrange(4)) for _ in range(200)]
    found = distribution(weighted(*rows))
    whole = pl.Series([us / 1e3 for us, weight in rows for _ in range(weight)])
    assert found.count == len(whole)
    assert found.mean == pytest.approx(whole.mean())
    assert [found.p50, found.p90, found.p99] == pytest.approx(
        [whole.quantile(part, "linear") for part in (0.5, 0.9, 0.99)]
    )
    assert found.max == whole.max()


def test_unknown_values_and_none_at_all():
    assert distribution(weighted((None, 3), (5.0, 0))) is None
    assert distribution(weighted((2000.0, 1), (None, 1))).p99 == 2.0


def rows(view):
    """Time in ms to how many had it."""
    found = inter_token(view).filter(pl.col("weight") > 0).drop_nulls()
    return dict(
        sorted((us / 1e3, n) for us, n in found.group_by("us").agg(pl.col("weight").sum()).iter_rows())
    )


def got(number, *requests, **fields):
    """A step from ``(id, computed, scheduled, phase, drafts)``."""
    rows = [ScheduledRequest(*request) for request in requests]
    return step(number, got={row.request_id: row.scheduled_tokens for row in rows}, requests=rows, **fields)


def came(*ids):
    return {"arrived": [arrival(one, -20, prompt_tokens=100) for one in ids]}


def test_a_chunked_prompt_gives_one_token(view_of):
    """Three chunks, then two decodes; the outputs of steps 2, 3 and 4 are tokens."""
    steps = [
        got(0, ("a", 0, 40, "new"), **came("a")),
        got(1, ("a", 40, 40)),
        got(2, ("a", 80, 20), back=2000),
        got(3, ("a", 100, 1)),
        got(4, ("a", 101, 1)),
    ]
    assert rows(view_of(*steps)) == {9.0: 1, 10.0: 1}


def test_each_request_of_a_step_counts(view_of):
    """From step 1 on a and b decode; b gets nothing in step 3."""
    steps = [got(0, ("a", 0, 100, "new"), ("b", 0, 100, "new"), **came("a", "b"))]
    steps += [got(n, ("a", 99 + n, 1), ("b", 99 + n, 1)) for n in (1, 2)]
    steps += [got(3, ("a", 102, 1), back=4000), got(4, ("a", 103, 1), ("b", 102, 1))]
    assert rows(view_of(*steps)) == {7.0: 1, 10.0: 4, 13.0: 1, 20.0: 1}


def test_a_preemption_in_between_counts_as_time(view_of):
    """Token at 1 ms and 11 ms; 101 tokens are computed again in two chunks, the next token is at 61 ms."""
    steps = [
        got(0, ("a", 0, 100, "new"), **came("a")),
        got(1, ("a", 100, 1)),
        step(2, preempted=[Preemption("a", 101, "b")], waiting=1),
        *(step(n, waiting=1) for n in (3, 4)),
        got(5, ("a", 0, 80, "resumed")),
        got(6, ("a", 80, 22)),
        got(7, ("a", 102, 1)),
    ]
    assert rows(view_of(*steps)) == {10.0: 2, 50.0: 1}


def test_an_output_with_drafts_is_one(view_of):
    steps = [
        got(0, ("a", 0, 100, "new"), **came("a")),
        got(1, ("a", 100, 4, "running", 3)),
        got(2, ("a", 102, 4, "running", 3)),
    ]
    assert rows(view_of(*steps)) == {10.0: 2}


def test_an_output_that_is_not_back(view_of):
    steps = [got(n, ("a", 99 + n, 1)) for n in range(1, 4)]
    steps[1].output_us = None
    assert rows(view_of(got(0, ("a", 0, 100, "new"), **came("a")), *steps)) == {10.0: 1}


def latencies(view, *columns):
    return dict(request_latencies(view).select("request_id", pl.concat_list(columns)).iter_rows())


SURVIVORS = [
    got(
        0,
        ("done", 0, 100, "new"),
        ("gone", 0, 100, "new"),
        ("stays", 0, 100, "new"),
        ("chunk", 0, 50, "new"),
        arrived=[arrival(one, -20) for one in ("done", "gone", "stays", "chunk", "never")],
        waiting=1,
    ),
    got(
        1,
        ("done", 100, 1),
        ("gone", 100, 1),
        ("stays", 100, 1),
        ("chunk", 50, 10),
        waiting=1,
        finished=[
            finish(
                "done", arrived_us=-20, first_token_us=1000, last_token_us=11_000, output_tokens=2,
                finished_us=11_000,
            ),
            finish(
                "gone", "ABORTED", arrived_us=-20, first_token_us=1000, last_token_us=1000, output_tokens=1,
                finished_us=11_000,
            ),
            finish("never", "ABORTED", arrived_us=-20, output_tokens=0, finished_us=11_000),
        ],
    ),
]  # fmt: skip


def test_who_had_a_first_token_counts_for_ttft_however_it_ended(view_of):
    """``chunk`` has computed 60 of its 100 prompt tokens when the trace ends."""
    found = latencies(view_of(*SURVIVORS), "ttft_us", "tpot_us", "e2e_us")
    assert found == {
        "done": [1020, 10_000, 11_020],
        "gone": [1020, None, None],
        "never": [None] * 3,
        "stays": [1020, None, None],
        "chunk": [None] * 3,
    }


def test_a_first_token_before_the_window_is_one(view_of):
    window = windowed(view_of(*SURVIVORS[:1], got(1, ("stays", 100, 1))), Window(begin_us=5000))
    assert latencies(window, "ttft_us")["stays"] == [None]
    assert engine_sums(window).requests.filter(request_id="stays")["has_token"].to_list() == [True]


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
