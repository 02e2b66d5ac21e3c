import pytest

from schedtrace.diagnose.rules import RULES
from schedtrace.diagnose.rules.queue_order import held_up_requests, priority_inversions
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, Preemption
from schedtrace.model.trace_facts import CacheGroup
from tests.makers import arrival, step

CODE = "head-of-line"
WHOLE = {
    "max_num_seqs": 8,
    "enable_chunked_prefill": True,
    "policy": "fcfs",
    "scheduler_reserve_full_isl": True,
}


def refused(head, cause=Cause.KV_BLOCKS, **fields):
    return Exit("waiting", "break", cause, head, **fields)


def blocked(number, head="L", free=5, **fields):
    """A step that ran one decode and refused ``head``; three more wait behind it unless told."""
    given = {"got": {"r": 1}, "waiting": 4, "ended": refused(head), "kv_blocks_free_after": free}
    return step(number, **{**given, **fields})


def came(*sizes, start=0):
    """Requests ``L``, ``a``, ``b``, ``c`` with prompts of these sizes, in this order."""
    return [arrival(name, start, prompt_tokens=size) for name, size in zip("Labc", sizes, strict=False)]


def everybody(number):
    return step(number, got=dict.fromkeys("Labc", 10), new="Labc")


@pytest.fixture
def rows(view_of):
    """Return the requests that a head held up, if the rule finds any."""
    names = ("step", "head", "request_id", "tokens", "blocks", "waited_us")

    def of(*lines, **header):
        view = view_of(*lines, **header)
        return held_up_requests(view).select(names).rows() if RULES[CODE](view) else []

    return of


def test_those_behind_who_fit_are_counted_in_the_order_of_the_queue(found, rows):
    """5 blocks of 10 tokens are free: b (2) and c (3) fit, a (6) does not."""
    lines = blocked(0, arrived=came(200, 60, 15, 25)), blocked(1), everybody(2)
    [finding] = found(CODE, *lines)
    assert (finding.cause, finding.severity, finding.count) == ("kv_blocks", "critical", 2)
    assert (finding.steps, finding.tokens, finding.trials) == ([0, 1], 0, [])
    assert rows(*lines) == [(0, "L", "b", 15, 2, 20_000), (0, "L", "c", 25, 3, 20_000)]
    evidence = finding.evidence
    assert (evidence.requests, evidence.heads, evidence.longest_ms) == (2, 1, 20.0)
    assert (evidence.head, evidence.head_tokens, evidence.blocks_free) == ("L", 200, 5)


@pytest.mark.parametrize(
    ("reserve", "chunked", "advice"), [(True, True, 3), (False, True, 2), (True, False, 2)]
)
def test_a_first_chunk_is_advised_only_where_whole_prompts_are_reserved(
    found, reserve, chunked, advice, recorded_words
):
    """Three steps do not show whether fuller steps help, so that no number of blocks is named."""
    config = {**WHOLE, "scheduler_reserve_full_isl": reserve, "enable_chunked_prefill": chunked}
    lines = [blocked(0, arrived=came(200, 60, 15, 25)), blocked(1), everybody(2)]
    [finding] = found(CODE, *lines, scheduler_config=config)
    assert [(one.setting, one.value) for one in finding.advice] == [(None, None)] * advice
    recorded_words(finding.advice)


def once(*sizes, **fields):
    """One step that refuses ``L``; the next one takes everybody."""
    return [blocked(0, arrived=came(*sizes), **fields), everybody(1)]


BY_PRIORITY = [
    arrival("L", 0, prompt_tokens=200, priority=1),
    arrival("a", 0, prompt_tokens=10, priority=0),
    arrival("b", 0, prompt_tokens=10, priority=2),
    arrival("c", 0, prompt_tokens=90, priority=1),
]
ONE_TOKEN = [*came(200), arrival("a", 0, prompt_tokens=40, max_tokens=1), *came(0, 0, 60, 60)[2:]]
SKIPPED = Exit("waiting", "continue", Cause.KV_BLOCKS, "L")
NOT_READY = Exit("waiting", "continue", Cause.GRAMMAR_PENDING, "a")
PASSED = {
    "little room": (once(200, 20, 20, 20, free=1), {}, []),
    "all are large": (once(200, 60, 60, 60), {}, []),
    # a takes 4 of 5 blocks in step 0 and keeps them in step 1, so b never fits.
    "room is given away once": (
        [blocked(0, arrived=came(200, 40, 40, 40)), blocked(1), everybody(2)],
        {},
        [("a", 40, 4)],
    ),
    "it would have lost its room again": (
        [blocked(0, arrived=came(200, 40, 60, 60)), blocked(1, free=3), everybody(2)],
        {},
        [],
    ),
    # 40 tokens fill 4 blocks: in step 1 a holds 41 tokens, for which 4 free blocks are too few.
    "it grows by a token a step": (
        [blocked(0, free=4, arrived=came(200, 40, 60, 60)), blocked(1, free=4), everybody(2)],
        {},
        [],
    ),
    "its only token is not computed": (
        [blocked(0, free=4, arrived=ONE_TOKEN), blocked(1, free=4), everybody(2)],
        {},
        [("a", 40, 4)],
    ),
    "a skip ends no loop": (
        once(200, 20, 20, 20, ended=Exit("waiting", "continue", Cause.KV_BLOCKS, "L")),
        {},
        [],
    ),
    # A tenth of 100 blocks stays free.
    "a watermark": (once(200, 30, 30, 20, free=12), {"watermark": 0.1}, [("c", 20, 2)]),
    "one seat": (once(200, 10, 10, 10, running=7), {}, [("a", 10, 1)]),
    "drafts take room": (once(200, 20, 10, 10, free=2, draft_tokens=1), {}, [("b", 10, 2)]),
    "all are ready": (once(200, 10, 60, 60), {}, [("a", 10, 1)]),
    "a is not ready": (once(200, 10, 60, 60, exits=[NOT_READY, refused("L")]), {}, []),
    "somebody is not ready": (once(200, 10, 10, 10, num_not_ready_after=1), {}, []),
    "more wait than are known": (once(200, 10, 10, 10, waiting=5), {}, []),
    "by priority": (
        [blocked(0, arrived=BY_PRIORITY), everybody(1)],
        {"policy": "priority"},
        [("b", 10, 1)],
    ),
}
"""Steps, settings, and who would have been admitted, with the tokens and blocks of each."""


@pytest.mark.parametrize(("lines", "config", "passed"), PASSED.values(), ids=PASSED)
def test_who_would_have_been_admitted(rows, lines, config, passed):
    assert [row[2:5] for row in rows(*lines, scheduler_config=WHOLE | config)] == passed


FULL = CacheGroup("FullAttention", 10, 1)
WINDOW = CacheGroup("SlidingWindow", 10, 1, window=20, admission_cap=4)
RING = CacheGroup("CircularBuffer", 10, 1)
REFUSED_24 = refused("L", blocks_needed=24, blocks_free=17)
GROUPS = {
    # 20 tokens take 2 blocks of each group, 30 take 3.
    "two of full attention": ([FULL, FULL], once(200, 30, 20, 20), [("b", 20, 4)]),
    # Whole, 200 tokens need 20 + 4 blocks and 120 need 12 + 4, not 24; the first chunk is of 20.
    "a sliding window": (
        [FULL, WINDOW],
        once(200, 120, 140, 140, free=17, budget=21, ended=REFUSED_24),
        [("a", 20, 16)],
    ),
    # With 7 blocks free, 300 tokens in chunks of 70 fit into a window's 7: all at once they fill 30.
    "windows alone": (
        [CacheGroup("SlidingWindow", 10, 1, window=11, admission_cap=7), RING],
        once(200, 300, 20, 20, free=8, budget=71),
        [("a", 70, 8)],
    ),
    # 200 tokens need more than the 20 blocks that the header's group explains: others are not counted.
    "a refusal that contradicts the count": (
        [FULL],
        once(200, 30, 20, 20, ended=refused("L", blocks_needed=40, blocks_free=5)),
        [],
    ),
    "a group of an unknown kind": ([FULL, CacheGroup("Other", 10, 1)], once(200, 30, 20, 20), []),
}
"""Cache groups, steps, and who would have been admitted."""


@pytest.mark.parametrize(("groups", "lines", "passed"), GROUPS.values(), ids=GROUPS)
def test_blocks_are_counted_by_cache_group(rows, groups, lines, passed):
    assert [row[2:5] for row in rows(*lines, scheduler_config=WHOLE, cache_groups=groups)] == passed


@pytest.mark.parametrize(
    "cause",
    [Cause.MAX_NUM_SEQS, Cause.TOKEN_BUDGET, Cause.PREEMPTED_THIS_STEP, Cause.QUEUE_EMPTY, Cause.OTHER],
)
def test_causes_that_refuse_anybody_are_none(found, cause):
    lines = [blocked(0, ended=refused("L", cause), arrived=came(200, 20, 20, 20)), everybody(1)]
    assert found(CODE, *lines) == []


def test_without_chunked_prefill_a_prompt_must_fit_into_the_budget_left(found, rows):
    """999 tokens of budget are left, and blocks enough."""
    off = {"max_num_seqs": 8, "enable_chunked_prefill": False, "policy": "fcfs"}
    ended = refused("L", Cause.CHUNKED_PREFILL_OFF)
    lines = [
        blocked(0, ended=ended, free=300, arrived=came(1500, 1000, 900, 100), kv_blocks_total=300),
        everybody(1),
    ]
    [finding] = found(CODE, *lines, scheduler_config=off)
    assert (finding.cause, finding.severity) == ("chunked_prefill_off", "warning")
    assert rows(*lines, scheduler_config=off) == [(0, "L", "b", 900, 90, 10_000)]
    assert finding.advice[0].setting == "enable_chunked_prefill"


def test_only_the_first_chunk_needs_room_unless_the_whole_prompt_is_reserved(found, rows):
    """A long-prefill threshold of 30 tokens makes the first chunk 3 blocks."""
    config = {"max_num_seqs": 8, "enable_chunked_prefill": True, "long_prefill_token_threshold": 30}
    lines = [blocked(0, free=4, arrived=came(200, 900, 900, 900)), everybody(1)]
    assert rows(*lines, scheduler_config=config) == [(0, "L", "a", 30, 3, 10_000)]
    assert found(CODE, *lines, scheduler_config={**config, "scheduler_reserve_full_isl": True}) == []


@pytest.mark.parametrize("header", [{"block_size": None}, {"kv_blocks_total": None}])
def test_unknown_blocks(found, header):
    known = header.get("block_size", 10) is not None
    lines = [blocked(0, free=None, arrived=came(200, 10, 10, 10)), everybody(1)]
    assert found(CODE, *lines, **header) == []
    assert known or found(CODE, blocked(0, arrived=came(200, 10, 10, 10)), everybody(1), **header) == []


def test_a_preempted_request_stands_at_the_head(found, rows):
    """r comes back before everybody: it wants the 30 tokens that it had and the one after."""
    lines = [
        step(0, got={"r": 30}, new="r", arrived=[arrival("r", 0, prompt_tokens=20)]),
        step(1, got={"x": 1}, waiting=4, preempted=[Preemption("r", 30)], arrived=came(10, 10, 50, 50)[:3]),
        blocked(2, head="r", free=3, got={"x": 1}),
        step(3, got={"r": 31, "L": 10, "a": 10}, new="La", resumed="r", waiting=1),
    ]
    [finding] = found(CODE, *lines)
    assert rows(*lines) == [(2, "r", "L", 10, 1, 10_000), (2, "r", "a", 10, 1, 10_000)]
    assert finding.evidence.head_tokens == 31


def test_a_wait_that_never_ends_lasts_to_the_last_output(found, rows, recorded_words):
    lines = blocked(0, arrived=came(200, 10, 60, 60)), blocked(1)
    [finding] = found(CODE, *lines)
    assert rows(*lines) == [(0, "L", "a", 10, 1, 11_000)]
    assert (finding.evidence.head, finding.evidence.head_tokens) == ("L", 200)
    recorded_words(finding.example)


@pytest.mark.parametrize(
    ("priority", "policy", "named", "rows"),
    [
        (4, "priority", [], [(0, "a", 4, "r", 5)]),
        (5, "priority", [], []),
        (4, "fcfs", [], []),
        (4, "priority", [NOT_READY], []),
    ],
    ids=["more urgent", "as urgent", "no priorities", "not ready"],
)
def test_a_less_urgent_request_is_admitted_before_a_more_urgent_one(view_of, priority, policy, named, rows):
    """Step 0 admits r, of priority 5, and leaves a in the queue."""
    came = [arrival("a", -20, priority=priority), arrival("r", -10, priority=5)]
    lines = [
        step(0, got={"r": 1}, new="r", waiting=1, arrived=came, exits=named),
        step(1, got={"r": 1, "a": 1}, new="a"),
    ]
    inversions = priority_inversions(view_of(*lines, scheduler_config={"policy": policy}))
    assert inversions.drop("trial").rows() == rows
