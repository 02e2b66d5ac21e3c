"""What is held, free and needed at a refusal: of one step, so that it adds up."""

import pytest

from schedtrace.diagnose.kv_cache import need_at_refusals
from schedtrace.model.trace import Exit
from schedtrace.model.trace_facts import HeadRefusal
from schedtrace.read.trace import read_trace
from schedtrace.timeline.timeline import make_timeline
from tests.makers import finish, header, step, write_trace

TOTAL = 64


def refusing(number, *, free, needed, running, request_id="w", holders=None):
    """A step whose head needs so many blocks; ``holders``: request to blocks, where they are recorded."""
    ended = Exit("waiting", "break", "kv_blocks", request_id, blocks_needed=needed, blocks_free=free)
    refusals = []
    if holders:
        refusals = [HeadRefusal(request_id, [needed], free, list(holders), [list(holders.values())])]
    return step(
        number,
        running=running,
        waiting=1,
        ended=ended,
        kv_blocks_total=TOTAL,
        kv_blocks_free_after=free,
        refusals=refusals,
    )


@pytest.fixture
def need_of(tmp_path):
    def need(*lines, request_id=None):
        path = write_trace(tmp_path / "engine-0.jsonl", header(kv_blocks_total=TOTAL), *lines)
        found = need_at_refusals(make_timeline(read_trace(path)), request_id)
        assert found.blocks_held + found.blocks_free == TOTAL - 1  # one is vLLM's null block
        return found.held_step, found.running, found.blocks_held, found.blocks_free, found.blocks_needed

    return need


STEPS = [
    refusing(0, free=0, needed=1, running=9),
    refusing(1, free=1, needed=4, running=5),
    refusing(2, free=3, needed=9, running=2),
    step(3, kv_blocks_total=TOTAL, kv_blocks_free_after=60),
]


def test_it_is_the_step_with_the_median_of_blocks_held(need_of):
    """Medians of their own would be 5 running, 62 held, 1 free, and 4 needed of other steps."""
    assert need_of(*STEPS) == (1, 5, 62, 1, 4)
    assert need_of(*STEPS[:2]) == (1, 5, 62, 1, 4)


def test_of_one_request_it_is_one_of_its_refusals(need_of):
    other = refusing(4, free=7, needed=8, running=3, request_id="x")
    assert need_of(*STEPS, other, request_id="x") == (4, 3, 56, 7, 8)


def test_where_nobody_was_refused_it_is_a_step_of_all(need_of):
    lines = [
        step(number, running=number, kv_blocks_total=TOTAL, kv_blocks_free_after=free)
        for number, free in enumerate([20, 10, 30])
    ]
    assert need_of(*lines) == (0, 0, 43, 20, None)


def test_where_holders_are_recorded_it_is_the_refusal_that_lasted_longest(tmp_path):
    lines = [
        refusing(0, free=0, needed=1, running=9, holders={"a": 9}),
        refusing(1, free=1, needed=4, running=5, request_id="y", holders={"b": 40, "a": 3}),
        refusing(2, free=1, needed=4, running=5, request_id="y"),
        refusing(3, free=3, needed=9, running=2, holders={"c": 5}),
    ]
    path = write_trace(tmp_path / "engine-0.jsonl", header(kv_blocks_total=TOTAL), *lines)
    found = need_at_refusals(make_timeline(read_trace(path)))
    assert (found.held_step, found.running, found.blocks_held, found.blocks_free) == (1, 5, 62, 1)
    assert (found.largest_holder, found.largest_holder_blocks) == ("b", 40)


def test_large_requests_in_a_row_need_more_than_mean_ones(tmp_path):
    """Two seats; requests of 1, 1, 9, 9 and 1 blocks: two mean ones need 8 blocks, the two large ones 18."""
    sizes = [16, 16, 144, 144, 16]
    done = [
        finish(f"r{at}", prompt_tokens=size - 10, output_tokens=10, scheduled_us=at)
        for at, size in enumerate(sizes)
    ]
    lines = [step(0, running=2, waiting=3, kv_blocks_total=12), step(1, running=0, finished=done)]
    head = header(kv_blocks_total=12, max_num_running_reqs=2, block_size=16)
    path = write_trace(tmp_path / "engine-0.jsonl", head, *lines)
    assert need_at_refusals(make_timeline(read_trace(path))).blocks_for_all == 18 + 1
