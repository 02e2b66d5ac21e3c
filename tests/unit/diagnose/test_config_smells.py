"""``config-smells``: settings without effect, each with its evidence."""

import pytest

from schedtrace.model.causes import Cause
from schedtrace.present.phrases import plain
from tests.makers import step

CODE = "config-smells"
LONG = range(100)
BUSY = {"got": {"a": 600}, "running": 5}
"""More than half of the budget and of the seats: smells of nothing."""


def settings(findings):
    return [setting for finding in findings for setting in finding.evidence.settings]


def test_a_run_that_uses_its_limits_smells_of_nothing(found):
    assert found(CODE, step(0, **BUSY)) == []


@pytest.mark.parametrize(("used", "smells"), [(500, ["max_num_batched_tokens"]), (501, [])])
def test_a_budget_never_used_by_more_than_half(found, used, smells):
    findings = found(CODE, *(step(n, got={"a": used}, running=5) for n in LONG))
    assert settings(findings) == smells
    if smells:
        assert (
            plain(findings[0].message)
            == "max_num_batched_tokens: no step used more than 500 of 1,000 tokens (50 %)."
        )


@pytest.mark.parametrize(
    ("config", "header", "smallest"),
    [
        ({"enable_chunked_prefill": True}, {"max_num_running_reqs": 8}, "8"),
        ({"enable_chunked_prefill": True}, {"max_num_running_reqs": 1000}, None),
        ({"enable_chunked_prefill": False}, {"max_model_len": 900}, "900"),
        ({"enable_chunked_prefill": False}, {"max_model_len": 1000}, None),
        ({}, {"max_model_len": None}, None),
    ],
    ids=["seats", "as many seats as tokens", "whole prompts", "longest prompt", "not known"],
)
def test_a_smaller_budget_is_advised_only_where_vllm_accepts_one(found, config, header, smallest):
    findings = found(
        CODE, *(step(n, got={"a": 1}, running=600) for n in LONG), scheduler_config=config, **header
    )
    advice = (
        f"max_num_batched_tokens: a smaller --max-num-batched-tokens (vLLM accepts {smallest} and more here) "
        "leaves activation memory to the KV cache."
    )
    assert [plain(finding.advice) for finding in findings] == ([] if smallest is None else [advice])


def test_a_budget_that_somebody_waited_for_is_needed(found):
    refused = step(100, got={"a": 100}, budget=100, running=5, waiting=1, ended=Cause.TOKEN_BUDGET)
    assert found(CODE, refused, *(step(n, got={"a": 100}, running=5) for n in LONG)) == []


@pytest.mark.parametrize(("running", "smells"), [(4, ["max_num_seqs"]), (5, [])])
def test_seats_never_used_by_more_than_half(found, running, smells):
    assert settings(found(CODE, *(step(n, got={"a": 600}, running=running) for n in LONG))) == smells


@pytest.mark.parametrize(
    ("threshold", "smells"), [(0, []), (999, []), (1000, ["long_prefill_token_threshold"])]
)
def test_a_threshold_at_or_above_the_budget_never_cuts(found, threshold, smells):
    config = {"long_prefill_token_threshold": threshold}
    assert settings(found(CODE, step(0, **BUSY), scheduler_config=config)) == smells


def test_settings_that_v1_does_not_look_at(found):
    config = {"max_num_partial_prefills": 4, "max_long_partial_prefills": 1}
    assert settings(found(CODE, step(0, **BUSY), scheduler_config=config)) == ["max_num_partial_prefills=4"]


@pytest.mark.parametrize(
    ("on", "new", "hits", "smells"),
    [(True, 10, 0, ["enable_prefix_caching"]), (True, 10, 1, []), (True, 9, 0, []), (False, 10, 0, [])],
)
def test_a_prefix_cache_without_a_hit(found, on, new, hits, smells):
    line = step(0, **BUSY, num_new=new, cached_tokens=hits)
    assert settings(found(CODE, line, enable_prefix_caching=on)) == smells


def test_several_smells_are_one_finding(found):
    [finding] = found(CODE, *(step(n, got={"a": 1}, running=1) for n in LONG))
    assert finding.count == 2
    assert finding.evidence.settings == ["max_num_batched_tokens", "max_num_seqs"]


def test_a_run_in_which_nothing_was_scheduled_smells_of_nothing(found):
    assert found(CODE, step(0)) == []


def test_a_short_run_says_nothing_about_never(found):
    assert found(CODE, *(step(n, got={"a": 1}, running=1) for n in LONG[1:])) == []
