"""The time that requests waited, divided among the causes."""

import pytest

from schedtrace.diagnose.limits import limit_shares, refused_demand
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit
from schedtrace.present.phrases import plain
from tests.makers import arrival, finish, step


def skip(request_id, cause=Cause.LORA_CAP, **fields):
    return Exit("waiting", "continue", cause, request_id, 900, **fields)


def end(cause):
    return Exit("waiting", "break", cause, budget_left=900)


def demand_of(view):
    return refused_demand(view).select("step", "cause", "requests", "wait_us").rows()


def test_who_waits_waits_until_the_next_step(view_of):
    view = view_of(step(0, start=0, waiting=3, ended=Cause.KV_BLOCKS), step(1, start=400))
    assert demand_of(view) == [(0, "kv_blocks", 3, 1200)]


def test_after_the_last_step_of_a_trial_they_wait_for_its_output(view_of):
    lines = [
        step(0, trial=1, start=0, back=70, waiting=1, ended=Cause.KV_BLOCKS),
        step(1, trial=2, start=9000, back=50, waiting=2, ended=Cause.KV_BLOCKS),
    ]
    assert demand_of(view_of(*lines)) == [(0, "kv_blocks", 1, 70), (1, "kv_blocks", 2, 100)]


def test_those_skipped_wait_for_their_own_cause_and_the_others_for_the_end(view_of):
    exits = [skip("a"), skip("b", Cause.GRAMMAR_PENDING), skip("c"), end(Cause.MAX_NUM_SEQS)]
    view = view_of(step(0, start=0, waiting=10, exits=exits), step(1, start=100))
    assert demand_of(view) == [
        (0, "grammar_pending", 1, 100),
        (0, "lora_cap", 2, 200),
        (0, "max_num_seqs", 7, 700),
    ]


def test_a_line_that_stands_for_many_skips_counts_as_many(view_of):
    exits = [skip("a"), skip(None, count=4), end(Cause.QUEUE_EMPTY)]
    view = view_of(step(0, start=0, waiting=5, exits=exits), step(1, start=10))
    assert demand_of(view) == [(0, "lora_cap", 5, 50)]


def test_nobody_waits_for_nothing(view_of):
    assert demand_of(view_of(step(0), step(1))) == []
    assert limit_shares(view_of(step(0), step(1))) == []


def test_where_no_exit_says_why_it_is_other(view_of):
    view = view_of(step(0, start=0, waiting=2, ended=Cause.QUEUE_EMPTY), step(1, start=10))
    assert demand_of(view) == [(0, "other", 2, 20)]


@pytest.mark.parametrize("waiting", [1, 2])
def test_more_skips_than_are_left_waiting_do_not_count_twice(view_of, waiting):
    exits = [skip("a"), skip("b"), skip("c"), end(Cause.QUEUE_EMPTY)]
    view = view_of(step(0, start=0, waiting=waiting, exits=exits), step(1, start=10))
    assert demand_of(view) == [(0, "lora_cap", waiting, 10 * waiting)]


def test_shares_add_up_to_all_of_it(view_of):
    lines = [
        step(0, start=0, waiting=3, ended=Cause.KV_BLOCKS),
        step(1, start=100, waiting=1, ended=Cause.MAX_NUM_SEQS),
        step(2, start=200),
        step(3, start=300),
    ]
    kv, seats = limit_shares(view_of(*lines))
    assert (kv.cause, kv.wait_ms, kv.share_frac, kv.steps, kv.request_steps) == ("kv_blocks", 0.3, 0.75, 1, 3)
    assert (seats.cause, seats.share_frac) == ("max_num_seqs", 0.25)
    assert kv.strip == [1, 0, 0, 0]
    assert seats.strip == [0, 1, 0, 0]


BLOCKED = [
    step(0, start=0, got={"x": 100}, waiting=3, ended=Cause.KV_BLOCKS, kv_blocks_free_after=10),
    step(1, start=100, got={"x": 1}, waiting=1, ended=Cause.MAX_NUM_SEQS),
    step(2, start=200, got={"x": 1}),
]


def test_the_limit_behind_most_of_the_waiting_binds_the_run(found):
    [finding] = found("kv-bound", *BLOCKED)
    assert finding.evidence.share_frac == 0.75
    assert finding.evidence.wait_ms == 0.3
    assert finding.evidence.mean_budget_left_frac == 0.9
    assert finding.evidence.mean_blocks_free_frac == 0.1
    assert finding.evidence.mean_seats_free_frac == 7 / 8
    assert (finding.count, finding.steps, finding.cause) == (1, [0], "kv_blocks")
    assert plain(finding.message) == (
        "75 % of waiting time was for KV cache space: requests waited 0.30 ms in total. Meanwhile 90 % of "
        "the token budget, 10 % of the KV blocks and 88 % of the seats were free on average."
    )
    assert plain(finding.example) == "after step 0 3 requests waited for it, 0.30 ms in total."
    assert found("max-num-seqs-bound", *BLOCKED) == []
    assert found("token-budget-bound", *BLOCKED) == []


def test_exactly_half_is_not_most_of_it(found):
    lines = [*BLOCKED[:2], step(2, start=400)]
    assert found("kv-bound", *lines) == found("max-num-seqs-bound", *lines) == []


@pytest.mark.parametrize(("lived", "severity"), [(3000, "warning"), (3001, "info")])
def test_it_matters_if_requests_feel_it(found, lived, severity):
    about = {"arrived_us": 0, "queued_us": 0, "last_token_us": lived}
    lines = [*BLOCKED[:2], step(2, start=200, arrived=[arrival("a", 0)], finished=[finish("a", **about)])]
    [finding] = found("kv-bound", *lines)
    assert (finding.evidence.of_time_in_engine_frac, finding.severity) == (300 / lived, severity)


def test_seats_are_named_by_the_limit_that_counts(found):
    lines = [step(0, start=0, waiting=1, ended=Cause.MAX_NUM_SEQS), step(1, start=10)]
    [finding] = found("max-num-seqs-bound", *lines)
    assert "one of the 8 seats (max_num_seqs)" in plain(finding.message)
    [finding] = found("max-num-seqs-bound", *lines, scheduler_config={"max_num_active_seqs": 5})
    assert "one of the 5 seats (max_num_active_seqs)" in plain(finding.message)


def test_a_spent_budget_binds_too(found):
    lines = [step(0, start=0, got={"x": 1000}, waiting=1, ended=Cause.TOKEN_BUDGET), step(1, start=10)]
    [finding] = found("token-budget-bound", *lines)
    assert finding.evidence.mean_budget_left_frac == 0.0
    assert plain(finding.advice) == (
        "A larger --max-num-batched-tokens (now 1,000) starts prompts sooner and makes each step longer. "
        "Compare both with schedtrace diff."
    )


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        (
            {},
            (
                "Raise --max-num-seqs (now 8) as far as the KV cache holds the requests; vLLM accepts at "
                "most --max-num-batched-tokens (now 1,000)."
            ),
        ),
        (
            {"max_num_active_seqs": 5},
            (
                "Raise --max-num-active-seqs (now 5) as far as the KV cache holds the requests; vLLM "
                "accepts at most --max-num-seqs (now 8)."
            ),
        ),
    ],
)
def test_the_advice_on_seats_names_the_setting_that_ends_it(found, config, advice):
    lines = [step(0, start=0, waiting=1, ended=Cause.MAX_NUM_SEQS), step(1, start=10)]
    [finding] = found("max-num-seqs-bound", *lines, scheduler_config=config)
    assert plain(finding.advice).startswith(advice)


@pytest.mark.parametrize(("dtype", "advised"), [("auto", True), ("fp8_e5m2", False)])
def test_a_smaller_kv_cache_type_is_advised_unless_it_is_set(found, dtype, advised):
    [finding] = found("kv-bound", *BLOCKED, settings={"cache_config.cache_dtype": dtype})
    assert ("--kv-cache-dtype fp8" in plain(finding.advice)) is advised
