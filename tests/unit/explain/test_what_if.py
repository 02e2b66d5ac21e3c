"""What a different limit would have allowed, with a budget of 1,000 tokens and KV blocks of 10."""

import pytest

from schedtrace.explain.step import NO_CACHE_HITS, THIS_STEP_ALONE, explain_step
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.trace import ChunkCap, Exit
from tests.makers import arrival, step

WANTS = {"a": 100, "b": 200, "c": 300, "d": 400}
NO_SEAT = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "b", 900)
SPENT = Exit("waiting", "condition", Cause.TOKEN_BUDGET, "b")
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


def test_more_seats_admit_who_fits_into_the_budget_left(answers, recorded_words):
    told = only(answers(NO_SEAT))
    assert (told.limit, told.now, told.then) == ("max_num_seqs", 8, 11)
    assert (told.request_ids, told.tokens) == (["b", "c", "d"], 900)
    recorded_words(told.message)


@pytest.mark.parametrize(
    ("wants", "chunked", "admitted", "tokens"),
    [
        ({"b": 700, "c": 300}, True, ["b", "c"], 900),
        ({"b": 700, "c": 200, "d": 50}, True, ["b", "c"], 900),
        ({"b": 700, "c": 300}, False, ["b"], 700),
    ],
    ids=["in part", "the budget is spent", "whole prompts only"],
)
def test_the_budget_left_limits_what_more_seats_admit(
    answers, wants, chunked, admitted, tokens, recorded_words
):
    config = {"enable_chunked_prefill": chunked}
    told = only(answers(NO_SEAT, waiting=len(wants), wants={"a": 100, **wants}, config=config))
    assert (told.request_ids, told.tokens, told.then) == (admitted, tokens, 8 + len(admitted))
    recorded_words(told.message)


@pytest.mark.parametrize(
    ("free", "watermark", "admitted", "tokens"),
    [
        (50, 0, ["b", "c"], 500),
        (49, 0, ["b"], 200),
        (20, 0, ["b"], 200),
        (19, 0, [], 0),
        (50, 0.01, ["b"], 200),
    ],
)
def test_free_blocks_limit_what_more_seats_admit(answers, free, watermark, admitted, tokens):
    told = only(answers(NO_SEAT, free=free, config={"watermark": watermark}))
    assert (told.request_ids, told.tokens) == (admitted, tokens)
    assert told.then == (8 + len(admitted) if admitted else None)


def test_with_the_whole_prompt_to_fit_a_chunk_is_not_enough(answers, recorded_words):
    in_chunks, whole = (
        only(
            answers(
                NO_SEAT, waiting=1, wants={"a": 100, "b": 950}, config={"scheduler_reserve_full_isl": asked}
            )
        )
        for asked in (False, True)
    )
    assert (in_chunks.tokens, whole.tokens) == (900, 0)
    recorded_words(whole.message)


def test_a_larger_budget_completes_the_chunk_that_was_cut_and_admits_others(answers, recorded_words):
    cap = ChunkCap("b", Cap.TOKEN_BUDGET, wanted_tokens=1000, capped_tokens=900)
    wants, got = {"a": 100, "b": 1000, "c": 300, "d": 700}, {"a": 100, "b": 900}
    told = only(answers(SPENT, wants=wants, got=got, new="ab", caps=[cap], waiting=2, free=80))
    assert (told.limit, told.now, told.then, told.tokens) == ("max_num_batched_tokens", 1000, 1400, 400)
    assert told.request_ids == ["b", "c"]
    recorded_words(told.message)


def test_the_limit_of_active_requests_ends_the_admission_by_its_own_name(answers, recorded_words):
    wants, config = {"a": 1000, "b": 100, "c": 100}, {"max_num_active_seqs": 2}
    told = only(answers(SPENT, wants=wants, got={"a": 1000}, waiting=2, config=config))
    assert (told.then, told.request_ids, told.tokens) == (1100, ["b"], 100)
    recorded_words(told.message)


def test_a_budget_that_running_requests_lacked_is_not_answered(answers):
    spent = {"got": {"a": 1000}, "wants": {"a": 1000, "b": 200}, "waiting": 1, "free": 30}
    running = Exit("running", "condition", Cause.TOKEN_BUDGET, "x")
    assert only(answers(None, exits=[SPENT], **spent)).tokens == 200
    assert answers(None, exits=[running, SPENT], **spent).what_if == []


def refused(detail, needed, free, name="b"):
    blocks = {"blocks_needed": needed, "blocks_free": free}
    return Exit("waiting", "break", Cause.KV_BLOCKS, name, 900, detail=detail, **blocks)


@pytest.mark.parametrize("waiting", [3, 1])
def test_blocks_that_lacked_are_counted(answers, waiting, recorded_words):
    wants = dict(list(WANTS.items())[: waiting + 1])
    told = only(answers(refused("free", 20, 15), free=15, waiting=waiting, wants=wants))
    assert (told.limit, told.now, told.then) == ("kv_blocks", 15, 20)
    assert (told.request_ids, told.tokens) == (["b"], 200)
    recorded_words(told.message)


CHUNKS_OFF = Exit("waiting", "break", Cause.CHUNKED_PREFILL_OFF, "b", 900)


@pytest.mark.parametrize(
    ("ended", "free", "config", "told"),
    [
        (
            refused("full_sequence", 95, 92),
            *(92, {"scheduler_reserve_full_isl": True}),
            [("kv_blocks", 92, 95, 900), ("scheduler_reserve_full_isl", 1, 0, 900)],
        ),
        (
            CHUNKS_OFF,
            *(95, {"enable_chunked_prefill": False}),
            [("enable_chunked_prefill", 0, 1, 900), ("max_num_batched_tokens", 1000, 1050, 950)],
        ),
    ],
)
def test_a_prompt_that_had_to_fit_whole_could_have_come_in_chunks(answers, ended, free, config, told):
    story = answers(ended, wants={"a": 100, "b": 950}, waiting=1, free=free, config=config)
    assert [(answer.limit, answer.now, answer.then, answer.tokens) for answer in story.what_if] == told


@pytest.mark.parametrize(
    "ended", [refused(None, 20, 15), refused("reserved", 10, 15), refused("free", 20, 15, name="c")]
)
def test_a_limit_that_is_not_understood_is_not_answered(answers, ended):
    assert answers(ended, free=15).what_if == []


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
    assert answers(NO_SEAT).what_if
    assert answers(NO_SEAT, **unknown).what_if == []


def test_adapters_prevent_an_answer(run_of):
    arrivals = [arrival("a", 0, 0), arrival("b", 0, 0, lora="x")]
    line = step(
        0, got={"a": 100}, new="a", arrived=arrivals, waiting=1, ended=NO_SEAT, kv_blocks_free_after=90
    )
    assert explain_step(run_of("r", line), 0).what_if == []
