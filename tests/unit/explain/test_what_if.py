"""What a different limit would have allowed, with a budget of 1,000 tokens and KV blocks of 10."""

import pytest

from schedtrace.explain.step import NO_CACHE_HITS, THIS_STEP_ALONE, explain_step
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.trace import ChunkCap, Exit
from schedtrace.present.phrases import plain
from tests.makers import arrival, step

WANTS = {"a": 100, "b": 200, "c": 300, "d": 400}
CONFIG = {"max_num_seqs": 8, "enable_chunked_prefill": True, "scheduler_reserve_full_isl": False}


@pytest.fixture
def answers(run_of):
    """What is told of step 1: ``a`` runs with 100 tokens; ``b``, ``c`` and ``d`` wait by default."""

    def tell(ended, *, free=90, waiting=3, config=None, wants=None, **fields):
        lengths = wants or WANTS
        fields = {"got": {"a": 100}, "new": "a", **fields}
        in_use = 1 + sum(fields["got"].values()) // 10  # and vLLM's null block
        fields.setdefault("kv_blocks_total", None if free is None else free + in_use)
        came = [arrival(name, 0, 0, prompt_tokens=tokens) for name, tokens in lengths.items()]
        line = step(1, arrived=came, waiting=waiting, ended=ended, kv_blocks_free_after=free, **fields)
        run = run_of("r", line, scheduler_config={**CONFIG, **(config or {})})
        return explain_step(run, 1)

    return tell


def only(story):
    [answer] = story.what_if
    return answer


def test_more_seats_admit_who_fits_into_the_budget_left(answers):
    told = only(answers(Exit("waiting", "break", Cause.MAX_NUM_SEQS, "b", 900)))
    assert (told.limit, told.now, told.then) == ("max_num_seqs", 8, 11)
    assert (told.request_ids, told.tokens) == (["b", "c", "d"], 900)
    assert plain(told.message) == (
        "With max_num_seqs 11 instead of 8, 3 more requests (b, c and d, 900 tokens) would have fitted into "
        "the budget left and the free KV blocks; no request would have been left waiting."
    )


def test_a_last_chunk_is_told_to_be_one(answers):
    wants = {"a": 100, "b": 700, "c": 300}
    told = only(answers(Exit("waiting", "break", Cause.MAX_NUM_SEQS, "b", 900), waiting=2, wants=wants))
    assert (told.then, told.request_ids, told.tokens) == (10, ["b", "c"], 900)
    assert "900 tokens, the last one in part" in plain(told.message)


def test_a_spent_budget_ends_the_admission(answers):
    wants = {"a": 100, "b": 700, "c": 200, "d": 50}
    told = only(answers(Exit("waiting", "break", Cause.MAX_NUM_SEQS, "b", 900), waiting=3, wants=wants))
    assert (told.request_ids, told.tokens) == (["b", "c"], 900)
    assert plain(told.message).endswith("; then the budget would have been spent.")


def test_a_prompt_that_does_not_fit_whole_ends_the_admission(answers):
    ended = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "b", 900)
    wants = {"a": 100, "b": 700, "c": 300}
    told = only(answers(ended, waiting=2, wants=wants, config={"enable_chunked_prefill": False}))
    assert plain(told.message).endswith("; c (300 tokens) would not have fitted into the rest of it.")


@pytest.mark.parametrize(
    ("free", "whole", "admitted", "tokens"),
    [(50, False, ["b", "c"], 500), (49, False, ["b"], 200), (20, False, ["b"], 200), (19, False, [], 0)],
)
def test_free_blocks_limit_who_more_seats_would_admit(answers, free, whole, admitted, tokens):
    config = {"scheduler_reserve_full_isl": whole}
    told = only(answers(Exit("waiting", "break", Cause.MAX_NUM_SEQS, "b", 900), free=free, config=config))
    assert (told.request_ids, told.tokens) == (admitted, tokens)
    assert told.then == (8 + len(admitted) if admitted else None)


def test_with_the_whole_prompt_to_fit_a_chunk_is_not_enough(answers):
    wants = {"a": 100, "b": 950}
    ended = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "b", 900)
    for whole, tokens in ((False, 900), (True, 0)):
        config = {"scheduler_reserve_full_isl": whole}
        assert only(answers(ended, waiting=1, wants=wants, config=config)).tokens == tokens
    assert plain(only(answers(ended, waiting=1, wants=wants, config=config)).message) == (
        "A higher max_num_seqs alone would have admitted no request: b would have needed 95 KV blocks "
        "with 90 free."
    )


def test_the_watermark_is_kept_free(answers):
    ended = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "b", 900)
    told = only(answers(ended, free=50, config={"watermark": 0.01}))
    assert told.request_ids == ["b"]


def test_without_chunked_prefill_prompts_are_taken_whole(answers):
    wants = {"a": 100, "b": 700, "c": 300}
    config = {"enable_chunked_prefill": False}
    ended = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "b", 900)
    told = only(answers(ended, waiting=2, wants=wants, config=config))
    assert (told.request_ids, told.tokens) == (["b"], 700)


def test_a_larger_budget_completes_the_chunk_that_was_cut_and_admits_others(answers):
    cap = ChunkCap("b", Cap.TOKEN_BUDGET, wanted_tokens=1000, capped_tokens=900)
    story = answers(
        Exit("waiting", "condition", Cause.TOKEN_BUDGET, "c"),
        wants={"a": 100, "b": 1000, "c": 300, "d": 700},
        got={"a": 100, "b": 900},
        new="ab",
        caps=[cap],
        waiting=2,
        free=80,
    )
    told = only(story)
    assert (told.limit, told.now, told.then, told.tokens) == ("max_num_batched_tokens", 1000, 1400, 400)
    assert told.request_ids == ["b", "c"]
    assert plain(told.message) == (
        "With max_num_batched_tokens 1,400 instead of 1,000, b would have got 100 more tokens and 1 more "
        "request (c, 300 tokens) would have fitted within max_num_seqs and the free KV blocks; d would have "
        "needed 70 KV blocks with 40 free."
    )


def test_the_limit_of_active_requests_ends_the_admission_by_its_own_name(answers):
    told = only(
        answers(
            Exit("waiting", "condition", Cause.TOKEN_BUDGET, "b"),
            wants={"a": 1000, "b": 100, "c": 100},
            got={"a": 1000},
            waiting=2,
            config={"max_num_active_seqs": 2},
        )
    )
    assert plain(told.message) == (
        "With max_num_batched_tokens 1,100 instead of 1,000, 1 more request (b, 100 tokens) would have "
        "fitted within max_num_active_seqs and the free KV blocks; then as many would run as "
        "max_num_active_seqs allows."
    )


def test_a_budget_that_running_requests_lacked_is_not_answered(answers):
    spent = {"got": {"a": 1000}, "wants": {"a": 1000, "b": 200}, "waiting": 1, "free": 30}
    ended = Exit("waiting", "condition", Cause.TOKEN_BUDGET, "b")
    running = Exit("running", "condition", Cause.TOKEN_BUDGET, "x")
    assert only(answers(None, exits=[ended], **spent)).tokens == 200
    assert answers(None, exits=[running, ended], **spent).what_if == []


def refused(detail, needed, free, name="b"):
    return Exit(
        "waiting", "break", Cause.KV_BLOCKS, name, 900, detail=detail, blocks_needed=needed, blocks_free=free
    )


def test_blocks_that_lacked_are_counted(answers):
    told = only(answers(refused("free", 20, 15), free=15))
    assert (told.limit, told.now, told.then, told.request_ids, told.tokens) == (
        "kv_blocks",
        15,
        20,
        ["b"],
        200,
    )
    assert plain(told.message) == (
        "With 5 more free KV blocks (20 instead of 15), b (200 tokens) would have been admitted. The budget "
        "left had room for 3 requests (b, c and d, 900 tokens), which take 90 blocks; no request "
        "would have been left waiting."
    )


def test_a_single_waiting_request_is_described_once(answers):
    told = only(answers(refused("free", 20, 15), free=15, waiting=1, wants={"a": 100, "b": 200}))
    assert plain(told.message) == (
        "With 5 more free KV blocks (20 instead of 15), b (200 tokens) would have been admitted."
    )


def test_a_prompt_that_had_to_fit_whole_could_have_come_in_chunks(answers):
    config = {"scheduler_reserve_full_isl": True}
    story = answers(
        refused("full_sequence", 95, 92), wants={"a": 100, "b": 950}, waiting=1, free=92, config=config
    )
    assert [(one.limit, one.now, one.then, one.tokens) for one in story.what_if] == [
        ("kv_blocks", 92, 95, 900),
        ("scheduler_reserve_full_isl", 1, 0, 900),
    ]


@pytest.mark.parametrize(
    "ended", [refused(None, 20, 15), refused("reserved", 10, 15), refused("free", 20, 15, name="c")]
)
def test_a_limit_that_is_not_understood_is_not_answered(answers, ended):
    assert answers(ended, free=15).what_if == []


def test_chunks_would_have_used_the_budget_left(answers):
    ended = Exit("waiting", "break", Cause.CHUNKED_PREFILL_OFF, "b", 900)
    config = {"enable_chunked_prefill": False}
    story = answers(ended, wants={"a": 100, "b": 950}, waiting=1, free=95, config=config)
    assert [(one.limit, one.then, one.tokens) for one in story.what_if] == [
        ("enable_chunked_prefill", 1, 900),
        ("max_num_batched_tokens", 1050, 950),
    ]


def test_a_threshold_withheld_what_the_budget_had_left(answers):
    cap = ChunkCap("a", Cap.LONG_PREFILL, wanted_tokens=800, capped_tokens=100)
    config = {"long_prefill_token_threshold": 100}
    told = only(answers(Cause.QUEUE_EMPTY, wants={"a": 800}, waiting=0, caps=[cap], config=config))
    assert (told.limit, told.now, told.tokens) == ("long_prefill_token_threshold", 100, 700)


def test_what_the_answers_take_for_granted_is_told(answers):
    assert answers(refused("free", 20, 15), free=15).what_if_assumes == [THIS_STEP_ALONE, NO_CACHE_HITS]
    assert answers(Cause.QUEUE_EMPTY, wants={"a": 100}, waiting=0).what_if_assumes == []


@pytest.mark.parametrize(
    "unknown",
    [
        pytest.param({"waiting": 4}, id="the queue is not the recorded one"),
        pytest.param({"num_not_ready_after": 1}, id="somebody is not ready"),
        pytest.param({"free": None}, id="no KV blocks recorded"),
        pytest.param({"kv_blocks_total": 105}, id="more blocks in use than the tokens need"),
    ],
)
def test_what_decides_and_is_not_known_prevents_an_answer(answers, unknown):
    ended = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "b", 900)
    assert answers(ended).what_if
    assert answers(ended, **unknown).what_if == []


def test_adapters_prevent_an_answer(run_of):
    came = [arrival("a", 0, 0), arrival("b", 0, 0, lora="x")]
    ended = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "b", 900)
    line = step(0, got={"a": 100}, new="a", arrived=came, waiting=1, ended=ended, kv_blocks_free_after=90)
    assert explain_step(run_of("r", line), 0).what_if == []
