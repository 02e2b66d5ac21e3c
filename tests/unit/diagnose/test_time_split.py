"""The requests' time as parts that add up, and the findings about the limits that it was waited for."""

import pytest

from schedtrace.diagnose.verdict import engine_split, engine_time, request_time, time_split
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


def test_a_limit_is_found_with_its_share_of_the_requests_time(found, recorded_words):
    [finding] = found("kv-bound", *BLOCKED)
    evidence = finding.evidence
    assert (finding.share_frac, evidence.wait_ms, evidence.requests) == (3 / 9, 0.3, 3)
    assert evidence.mean_budget_left_frac == 0.9
    assert (evidence.running, evidence.blocks_held, evidence.blocks_free) == (1, 89, 10)
    assert (finding.count, finding.steps, finding.cause) == (1, [0], "kv_blocks")
    recorded_words(finding.verdict)
    [seats] = found("max-num-seqs-bound", *BLOCKED)
    assert (seats.share_frac, seats.evidence.requests) == (1 / 9, 1)
    assert found("token-budget-bound", *BLOCKED) == []


def test_seats_are_named_by_the_limit_that_counts(found, recorded_words):
    lines = [waits(0, "a", Cause.MAX_NUM_SEQS, arrived=came("a")), step(1, start=100, got={"a": 1}, new="a")]
    [finding] = found("max-num-seqs-bound", *lines)
    assert finding.evidence.seats == 8
    recorded_words(finding.verdict)
    [finding] = found("max-num-seqs-bound", *lines, scheduler_config={"max_num_active_seqs": 5})
    assert finding.evidence.seats == 5
    recorded_words(finding.verdict)


def test_more_seats_alone_are_no_advice_where_the_kv_cache_or_vllm_has_no_room_for_them(
    found, recorded_words
):
    for fields, about in (
        ({"kv_blocks_free_after": 0}, {}),
        ({}, {"scheduler_config": {"max_num_batched_tokens": 8}}),
    ):
        came_too = [*came("a"), *came("b")]
        first = waits(0, "ab", Cause.MAX_NUM_SEQS, arrived=came_too, **{"running": 8, **fields})
        lines = [first, step(1, start=100, got={"a": 1, "b": 1}, new="ab")]
        [finding] = found("max-num-seqs-bound", *lines, **about)
        [advice] = finding.advice
        assert (finding.gain, advice.setting, advice.value) == (None, None, None)
        recorded_words(advice)


def test_a_spent_budget_is_a_limit_too(found):
    lines = [
        waits(0, "a", Cause.TOKEN_BUDGET, arrived=came("a"), got={"x": 1000}),
        step(1, start=100, got={"a": 1}, new="a"),
    ]
    [finding] = found("token-budget-bound", *lines)
    assert (finding.share_frac, finding.evidence.full_steps) == (100 / 2200, 1)
