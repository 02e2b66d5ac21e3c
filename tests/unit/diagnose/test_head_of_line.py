import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, Preemption
from schedtrace.present.phrases import plain
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
    return [arrival(name, start, prompt_tokens=size) for name, size in zip("Labc", sizes, strict=True)]


def everybody(number):
    return step(number, got=dict.fromkeys("Labc", 10), new="Labc")


def rows(finding):
    names = ("step", "head", "request_id", "tokens", "blocks", "waited_us")
    return [tuple(getattr(one, name) for name in names) for one in finding.evidence.examples]


def test_those_behind_who_fit_are_counted_in_the_order_of_the_queue(found):
    """5 blocks of 10 tokens are free: b (2) and c (3) fit, a (6) does not."""
    [finding] = found(CODE, blocked(0, arrived=came(200, 60, 15, 25)), blocked(1), everybody(2))
    assert (finding.cause, finding.severity, finding.count) == ("kv_blocks", "critical", 2)
    assert (finding.steps, finding.tokens, finding.trials) == ([0, 1], 0, [])
    assert rows(finding) == [(0, "L", "b", 15, 2, 20_000), (0, "L", "c", 25, 3, 20_000)]
    evidence = finding.evidence
    assert (evidence.requests_held_up, evidence.refused_steps, evidence.heads) == (2, 2, 1)
    assert (evidence.held_up_ms, evidence.longest_ms) == (40.0, 20.0)
    assert (evidence.head, evidence.head_tokens, evidence.blocks_free) == ("L", 200, 5)


@pytest.mark.parametrize(
    ("reserve", "chunked", "advised"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_first_chunk_is_advised_only_where_whole_prompts_are_reserved(found, reserve, chunked, advised):
    config = {**WHOLE, "scheduler_reserve_full_isl": reserve, "enable_chunked_prefill": chunked}
    lines = [blocked(0, arrived=came(200, 60, 15, 25)), blocked(1), everybody(2)]
    [finding] = found(CODE, *lines, scheduler_config=config)
    first_chunk = "--no-scheduler-reserve-full-isl (now on) admits it with its first chunk"
    assert [plain(one.message) for one in finding.advice] == [
        "--kv-cache-memory-bytes: 200 blocks instead of 100",
        *([first_chunk] if advised else []),
        "send long prompts to an engine of their own",
    ]


@pytest.mark.parametrize(
    ("free", "sizes"), [(1, (200, 20, 20, 20)), (5, (200, 60, 60, 60))], ids=["little room", "all large"]
)
def test_nobody_is_held_up_where_nobody_behind_would_have_fitted(found, free, sizes):
    assert found(CODE, blocked(0, free=free, arrived=came(*sizes)), everybody(1)) == []


def test_room_is_given_away_only_once(found):
    """a takes 4 of 5 blocks in step 0 and keeps them in step 1, so b never fits."""
    [finding] = found(CODE, blocked(0, arrived=came(200, 40, 40, 40)), blocked(1), everybody(2))
    assert rows(finding) == [(0, "L", "a", 40, 4, 20_000)]


def test_one_that_would_have_lost_its_room_again_is_not_counted(found):
    lines = [blocked(0, arrived=came(200, 40, 60, 60)), blocked(1, free=3), everybody(2)]
    assert found(CODE, *lines) == []


def test_what_was_let_pass_grows_by_a_token_a_step(found):
    """40 tokens fill 4 blocks: in step 1 a holds 41 tokens, for which 4 free blocks are too few."""
    lines = [blocked(0, free=4, arrived=came(200, 40, 60, 60)), blocked(1, free=4), everybody(2)]
    assert found(CODE, *lines) == []
    only_one = [arrival("a", 0, prompt_tokens=40, max_tokens=1), *came(200, 60, 60, 60)[2:]]
    lines[0] = blocked(0, free=4, arrived=[came(200, 0, 0, 0)[0], *only_one])
    assert len(found(CODE, *lines)) == 1


@pytest.mark.parametrize(
    "cause",
    [Cause.MAX_NUM_SEQS, Cause.TOKEN_BUDGET, Cause.PREEMPTED_THIS_STEP, Cause.QUEUE_EMPTY, Cause.OTHER],
)
def test_causes_that_refuse_anybody_are_none(found, cause):
    lines = [blocked(0, ended=refused("L", cause), arrived=came(200, 20, 20, 20)), everybody(1)]
    assert found(CODE, *lines) == []


def test_a_skip_ends_no_loop(found):
    skip = Exit("waiting", "continue", Cause.KV_BLOCKS, "L")
    assert found(CODE, blocked(0, ended=skip, arrived=came(200, 20, 20, 20)), everybody(1)) == []


def test_without_chunked_prefill_a_prompt_must_fit_into_the_budget_left(found):
    """999 tokens of budget are left, and blocks enough."""
    off = {"max_num_seqs": 8, "enable_chunked_prefill": False, "policy": "fcfs"}
    ended = refused("L", Cause.CHUNKED_PREFILL_OFF)
    lines = [
        blocked(0, ended=ended, free=300, arrived=came(1500, 1000, 900, 100), kv_blocks_total=300),
        everybody(1),
    ]
    [finding] = found(CODE, *lines, scheduler_config=off)
    assert (finding.cause, finding.severity) == ("chunked_prefill_off", "warning")
    assert rows(finding) == [(0, "L", "b", 900, 90, 10_000)]
    assert finding.advice[0].setting == "enable_chunked_prefill"


def test_only_the_first_chunk_needs_room_unless_the_whole_prompt_is_reserved(found):
    """A long-prefill threshold of 30 tokens makes the first chunk 3 blocks."""
    config = {"max_num_seqs": 8, "enable_chunked_prefill": True, "long_prefill_token_threshold": 30}
    lines = [blocked(0, free=4, arrived=came(200, 900, 900, 900)), everybody(1)]
    [finding] = found(CODE, *lines, scheduler_config=config)
    assert rows(finding) == [(0, "L", "a", 30, 3, 10_000)]
    assert found(CODE, *lines, scheduler_config={**config, "scheduler_reserve_full_isl": True}) == []


def test_the_watermark_stays_free(found):
    """A tenth of 100 blocks."""
    lines = [blocked(0, free=12, arrived=came(200, 30, 30, 20)), everybody(1)]
    [finding] = found(CODE, *lines, scheduler_config={**WHOLE, "watermark": 0.1})
    assert rows(finding) == [(0, "L", "c", 20, 2, 10_000)]


def test_seats_limit_how_many(found):
    [finding] = found(CODE, blocked(0, running=7, arrived=came(200, 10, 10, 10)), everybody(1))
    assert [row[2] for row in rows(finding)] == ["a"]


def test_several_cache_groups_take_blocks_each(found):
    """The head's 200 tokens needed 40 blocks of 10: two groups, so 20 tokens take 4 blocks and 30 take 6."""
    ended = refused("L", blocks_needed=40, blocks_free=5)
    [finding] = found(CODE, blocked(0, ended=ended, arrived=came(200, 30, 20, 20)), everybody(1))
    assert rows(finding) == [(0, "L", "b", 20, 4, 10_000)]


def test_drafts_take_room_too(found):
    lines = [blocked(0, free=2, draft_tokens=1, arrived=came(200, 20, 10, 10)), everybody(1)]
    [finding] = found(CODE, *lines)
    assert rows(finding) == [(0, "L", "b", 10, 2, 10_000)]


def test_requests_that_are_not_ready_would_not_have_run(found):
    not_ready = Exit("waiting", "continue", Cause.GRAMMAR_PENDING, "a")
    both = [blocked(0, exits=[not_ready, refused("L")], arrived=came(200, 10, 60, 60)), everybody(1)]
    assert found(CODE, *both) == []
    [finding] = found(CODE, blocked(0, arrived=came(200, 10, 60, 60)), everybody(1))
    assert rows(finding) == [(0, "L", "a", 10, 1, 10_000)]


def test_where_others_are_not_ready_and_nobody_knows_who_nothing_is_said(found):
    lines = [blocked(0, num_not_ready_after=1, arrived=came(200, 10, 10, 10)), everybody(1)]
    assert found(CODE, *lines) == []


def test_where_the_queue_is_not_known_nothing_is_said(found):
    assert found(CODE, blocked(0, waiting=5, arrived=came(200, 10, 10, 10)), everybody(1)) == []


@pytest.mark.parametrize("header", [{"block_size": None}, {"kv_blocks_total": None}])
def test_unknown_blocks(found, header):
    known = header.get("block_size", 10) is not None
    lines = [blocked(0, free=None, arrived=came(200, 10, 10, 10)), everybody(1)]
    assert found(CODE, *lines, **header) == []
    assert known or found(CODE, blocked(0, arrived=came(200, 10, 10, 10)), everybody(1), **header) == []


def test_a_preempted_request_stands_at_the_head(found):
    """r comes back before everybody: it wants the 30 tokens that it had and the one after."""
    lines = [
        step(0, got={"r": 30}, new="r", arrived=[arrival("r", 0, prompt_tokens=20)]),
        step(1, got={"x": 1}, waiting=4, preempted=[Preemption("r", 30)], arrived=came(10, 10, 50, 50)[:3]),
        blocked(2, head="r", free=3, got={"x": 1}),
        step(3, got={"r": 31, "L": 10, "a": 10}, new="La", resumed="r", waiting=1),
    ]
    [finding] = found(CODE, *lines)
    assert rows(finding) == [(2, "r", "L", 10, 1, 10_000), (2, "r", "a", 10, 1, 10_000)]
    assert finding.evidence.examples[0].head_tokens == 31


def test_by_priority_those_behind_are_those_after_the_head(found):
    config = {**WHOLE, "policy": "priority"}
    queue = [
        arrival("L", 0, prompt_tokens=200, priority=1),
        arrival("a", 0, prompt_tokens=10, priority=0),
        arrival("b", 0, prompt_tokens=10, priority=2),
        arrival("c", 0, prompt_tokens=90, priority=1),
    ]
    [finding] = found(CODE, blocked(0, arrived=queue), everybody(1), scheduler_config=config)
    assert [row[2] for row in rows(finding)] == ["b"]


def test_a_wait_that_never_ends_lasts_to_the_last_output(found):
    [finding] = found(CODE, blocked(0, arrived=came(200, 10, 60, 60)), blocked(1))
    assert rows(finding) == [(0, "L", "a", 10, 1, 11_000)]
    assert "step 0 refused L (200 tokens)" in plain(finding.example)
