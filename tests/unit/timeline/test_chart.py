"""What pictures show of each step."""

from schedtrace.model.trace import Exit, Preemption, ScheduledRequest
from schedtrace.timeline.timeline import CHART_SCHEMA, make_timeline, per_step
from tests.makers import step


def rows(trace, offset_us=0):
    return per_step(make_timeline(trace), offset_us).to_dicts()


def test_tokens_of_a_step_add_up_to_its_budget(trace_of):
    got = [
        ScheduledRequest("a", 0, 40, "new"),
        ScheduledRequest("b", 10, 30, "resumed"),
        ScheduledRequest("c", 9, 1),
    ]
    one = step(
        0,
        start=1_000,
        back=500,
        requests=got,
        total_requests=3,
        budget=100,
        remaining_budget=29,
        prefill_tokens=60,
        recomputed_tokens=25,
        decode_tokens=1,
    )
    (row,) = rows(trace_of(one), offset_us=7)
    assert list(row) == list(CHART_SCHEMA)
    parts = {name: row[name] for name in row if name.endswith("_tokens")}
    assert parts == {"decode_tokens": 1, "prefill_tokens": 45, "recompute_tokens": 25, "unused_tokens": 29}
    assert (row["token_budget"], row["begin_us"], row["requests"]) == (100, 1_007, 3)


def test_a_cause_is_told_only_where_somebody_was_left_waiting(trace_of):
    refused = Exit("waiting", "break", "kv_blocks", "a.py:1", budget_left=5)
    empty = Exit("waiting", "end", "queue_empty", "a.py:2", budget_left=5)
    trace = trace_of(
        step(0, waiting=3, exits=[refused], preempted=[Preemption("v", 9), Preemption("w", 9)]),
        step(1, exits=[empty]),
    )
    first, second = rows(trace)
    assert (first["cause"], first["waiting"], first["preempted"]) == ("kv_blocks", 3, 2)
    assert (second["cause"], second["waiting"], second["preempted"]) == (None, 0, 0)
