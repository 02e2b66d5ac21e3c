"""What is held, free and needed at a refusal: of one step, so that it adds up."""

import random

import pytest

from schedtrace.diagnose.kv_cache import GroupUse, cache_use, group_use, need_at_refusals, shared_blocks
from schedtrace.model.trace import Exit, ScheduledRequest
from schedtrace.model.trace_facts import Admission, CacheGroup, HeadRefusal
from schedtrace.read.trace import read_trace
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, finish, header, step, write_trace

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


GROUPS = [CacheGroup("FullAttention", 10, 4), CacheGroup("Mamba", 100, 2)]


def got(name, computed, scheduled, phase="running"):
    return ScheduledRequest(name, computed, scheduled, phase)


def use(*values):
    return GroupUse(**dict(zip(GroupUse.__struct_fields__, values, strict=True)))


def lines(*refusals):
    """a has 38 tokens when step 2 is over (25, then 12, then 1), b 12."""
    return [
        step(0, requests=[got("a", 0, 25, "new")]),
        step(1, requests=[got("a", 25, 12)]),
        step(2, requests=[got("a", 37, 1), got("b", 0, 12, "new")], refusals=list(refusals)),
        step(3, requests=[got("a", 38, 1), got("b", 12, 1)]),
    ]


def test_what_each_request_holds_of_each_group(view_of):
    refusal = HeadRefusal("c", [5, 9], 3, ["a", "b"], [[4, 2], [30, 32]])
    assert group_use(view_of(*lines(refusal), cache_groups=GROUPS)) == [
        use("FullAttention", 3.0),
        use("Mamba", 31.0),
    ]


def test_means_over_refusals(view_of):
    first = HeadRefusal("c", [5, 9], 3, ["a"], [[4], [30]])
    second = HeadRefusal("d", [7, 1], 3, ["b"], [[2], []])
    [full, mamba] = group_use(view_of(*lines(first, second), cache_groups=GROUPS))
    assert (full.blocks_per_request, mamba.blocks_per_request) == (3, 30)


def test_nothing_is_known_without_refusals_or_groups(view_of):
    assert group_use(view_of(*lines(), cache_groups=GROUPS)) == []
    refusal = HeadRefusal("c", [5], 3, ["a"], [[4]])
    assert group_use(view_of(*lines(refusal))) == []
    assert group_use(view_of(*lines(HeadRefusal("c", [5])), cache_groups=GROUPS)) == []


@pytest.mark.parametrize(
    ("hashes", "expected"),
    [
        ([], []),
        (["aaaabbbb"], [0]),
        (["aaaabbbb", "aaaabbbb", "aaaacccc", "ddddbbbb"], [0, 2, 1, 0]),
        (["aaaaccccdddd", "aaaab", "aaaacccceeee", ""], [0, 1, 2, 0]),
        (["aaaabbbbcccc", "aaaabbbb", "aaaabbbbcccc"], [0, 2, 3]),
    ],
)
def test_blocks_shared_with_an_earlier_prompt(hashes, expected):
    assert shared_blocks(hashes) == expected


def plainly(hashes):
    def alike(one, other):
        blocks = min(len(one), len(other)) // 4
        return max(n for n in range(blocks + 1) if one[: 4 * n] == other[: 4 * n])

    return [
        max((alike(text, other) for other in hashes[:place]), default=0) for place, text in enumerate(hashes)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_the_same_as_comparing_all_of_them(seed):
    chance = random.Random(seed)  # noqa: S311  # cases, no secrets
    hashes = ["".join(4 * chance.choice("ab") for _ in range(chance.randrange(6))) for _ in range(40)]
    assert shared_blocks(hashes) == plainly(hashes)


def admitted(number, name, cached, hashes, prompt=35, miss=None, trial=None):
    return step(
        number,
        trial=trial,
        requests=[ScheduledRequest(name, cached, prompt - cached, "new")],
        arrived=[arrival(name, 0, prompt_tokens=prompt, prefix_hashes=hashes)],
        admitted=[Admission(name, cached, 0, len(hashes) // 4, miss=miss)],
    )


def test_what_was_found_and_could_have_been(view_of):
    view = view_of(
        admitted(0, "a", 0, "aaaabbbbcccc", miss="not_cached"),
        admitted(1, "b", 20, "aaaabbbbcccc"),
        admitted(2, "c", 0, "aaaabbbb", prompt=20, miss="not_cached"),
    )
    assert cache_use(view).drop("longest_tokens").rows() == [
        (0, None, "a", 35, 0, 0, 0, "not_cached", False),
        (1, None, "b", 35, 20, 30, 10, None, False),
        (2, None, "c", 20, 0, 10, 10, "not_cached", False),  # of two blocks vLLM computes the last one's end
    ]


def test_trials_are_apart(view_of):
    view = view_of(
        admitted(0, "t1-a", 0, "aaaa", trial=1), admitted(1, "t2-a", 0, "aaaa", trial=2), trial_ids=True
    )
    assert cache_use(view)["shareable_tokens"].to_list() == [0, 0]


def test_what_is_not_recorded_is_not_known(view_of):
    view = view_of(
        step(
            0,
            requests=[ScheduledRequest("a", 10, 25, "new")],
            arrived=[arrival("a", 0, prompt_tokens=35)],
        )
    )
    assert cache_use(view).drop("longest_tokens").rows() == [(0, None, "a", 35, 10, None, None, None, None)]
