"""Where the time of a run went, and the findings that one limit explains most of the waiting."""

import pytest

from schedtrace.diagnose.times import engine_time, request_time
from schedtrace.model.causes import Cause
from schedtrace.model.trace import ScheduledRequest
from schedtrace.present.phrases import plain
from tests.makers import arrival, finish, step


def waits(number, requests, cause, **fields):
    """A step, 100 us after the one before, in which these wait."""
    return step(number, start=100 * number, back=None, waiting=len(requests), ended=cause, **fields)


def came(names, at=0):
    return [arrival(name, None, queued=at) for name in names]


BLOCKED = [
    waits(
        0,
        "abc",
        Cause.KV_BLOCKS,
        arrived=came("abc"),
        kv_blocks_free_after=10,
        remaining_budget=900,
        running=1,
    ),
    waits(1, "c", Cause.MAX_NUM_SEQS, got={"a": 100, "b": 100}, new="ab"),
    step(2, start=200, back=None, got={"c": 100}, new="c"),
    step(3, start=300, back=None, finished=[finish(name, finished_us=300) for name in "abc"]),
]


def test_the_shares_of_all_states_add_up_to_the_requests_time(view_of):
    shares = request_time(view_of(*BLOCKED))
    told = [(share.state, share.cause, share.time_ms, share.requests) for share in shares]
    assert told == [
        ("prefill", None, 0.3, 3),
        ("waiting", "kv_blocks", 0.3, 3),
        ("stalled", "other", 0.2, 2),
        ("waiting", "max_num_seqs", 0.1, 1),
    ]
    assert sum(share.share_frac for share in shares) == pytest.approx(1)


def test_a_strip_shows_the_share_of_each_part_of_the_run(view_of):
    of = {(share.state, share.cause): share.strip for share in request_time(view_of(*BLOCKED))}
    assert of["waiting", "kv_blocks"] == [1, 0, 0, 0]
    assert of["waiting", "max_num_seqs"] == pytest.approx([0, 1 / 3, 0, 0])


def test_shares_of_an_engine_are_of_its_busy_time(view_of):
    view = view_of(
        step(0, start=0, took=20, back=100, got={"a": 1}, arrived=came("a"), update_us=30),
        step(1, start=600, took=20, back=None, finished=[finish("a", finished_us=150)]),
    )
    told = {share.state: (share.time_ms, share.busy_frac) for share in engine_time(view)}
    assert told == {
        "device": (0.08, 80 / 170),
        "schedule": (0.04, 40 / 170),
        "update": (0.03, 30 / 170),
        "host_gap": (0.02, 20 / 170),
        "idle": (0.45, None),
    }


def test_nothing_recorded_takes_no_time(view_of):
    assert request_time(view_of()) == engine_time(view_of()) == []


def test_the_limit_behind_most_of_the_waiting_binds_the_run(found):
    [finding] = found("kv-bound", *BLOCKED)
    assert finding.evidence.share_frac == 0.75
    assert finding.evidence.wait_ms == 0.3
    assert finding.evidence.mean_budget_left_frac == 0.9
    assert finding.evidence.mean_blocks_free_frac == 0.1
    assert finding.evidence.mean_seats_free_frac == 7 / 8
    assert (finding.count, finding.steps, finding.cause) == (1, [0], "kv_blocks")
    room = "90 % of the token budget, 10 % of the KV blocks and 88 % of the seats were free on average"
    assert f"Meanwhile {room}." in plain(finding.message)
    assert plain(finding.example) == "a waited 0.10 ms for it, in step 0."
    assert found("max-num-seqs-bound", *BLOCKED) == []
    assert found("token-budget-bound", *BLOCKED) == []


def test_exactly_half_is_not_most_of_it(found):
    lines = [waits(0, "a", Cause.KV_BLOCKS, arrived=came("a")), waits(1, "a", Cause.MAX_NUM_SEQS)]
    lines.append(step(2, start=200, back=None, got={"a": 1}, new="a"))
    assert found("kv-bound", *lines) == found("max-num-seqs-bound", *lines) == []


@pytest.mark.parametrize(("gone", "severity"), [(1000, "warning"), (1010, "info")])
def test_it_matters_if_requests_feel_it(found, gone, severity):
    lines = [
        waits(0, "a", Cause.KV_BLOCKS, arrived=came("a")),
        step(1, start=100, back=None, requests=[ScheduledRequest("a", 0, 100, "new")]),
        step(2, start=2000, back=None, finished=[finish("a", finished_us=gone)]),
    ]
    [finding] = found("kv-bound", *lines)
    assert (finding.evidence.of_time_in_engine_frac, finding.severity) == (100 / gone, severity)


def test_seats_are_named_by_the_limit_that_counts(found):
    lines = [waits(0, "a", Cause.MAX_NUM_SEQS, arrived=came("a")), step(1, start=100, got={"a": 1}, new="a")]
    [finding] = found("max-num-seqs-bound", *lines)
    assert "one of the 8 seats (max_num_seqs)" in plain(finding.message)
    [finding] = found("max-num-seqs-bound", *lines, scheduler_config={"max_num_active_seqs": 5})
    assert "one of the 5 seats (max_num_active_seqs)" in plain(finding.message)


def test_a_spent_budget_binds_too(found):
    lines = [
        waits(0, "a", Cause.TOKEN_BUDGET, arrived=came("a"), got={"x": 1000}),
        step(1, start=100, got={"a": 1}, new="a"),
    ]
    [finding] = found("token-budget-bound", *lines)
    assert finding.evidence.mean_budget_left_frac == 0.0
