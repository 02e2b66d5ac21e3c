"""A decode with drafts takes several tokens: what holds those of all seats."""

import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit
from tests.makers import arrival, step

NAMES = [f"r{number}" for number in range(8)]
DRAFTS = {"speculative_config.num_speculative_tokens": 2}


def passed_over(cause, budget=8, held=2):
    """Eight requests on eight seats, of which so many decode with two drafts in a step of 8 tokens."""
    lines = []
    for number in range(40):
        order = NAMES[number % 8 :] + NAMES[: number % 8]
        skips = [Exit("running", "break", cause, name, budget - 3 * held) for name in order[held:]]
        lines.append(
            step(
                number,
                got=dict.fromkeys(order[:held], 3),
                budget=budget,
                running=8,
                decode_tokens=3 * held,
                draft_tokens=2 * held,
                exits=skips,
                ended=None,
            )
        )
    lines[0].arrived.extend(arrival(name, 0) for name in NAMES)
    return lines


def header(budget=8):
    return {
        "settings": DRAFTS,
        "token_budget": budget,
        "max_num_running_reqs": 8,
        "scheduler_config": {"max_num_batched_tokens": budget, "max_num_seqs": 8},
    }


def padded(findings):
    [finding] = [finding for finding in findings if finding.cause == Cause.SPEC_DECODE_PADDING]
    return finding


def test_padded_decodes_want_a_decode_of_every_seat(found, recorded_words):
    """Eight seats of 3 tokens: 24."""
    finding = padded(found("other-limit", *passed_over(Cause.SPEC_DECODE_PADDING), **header()))
    [advice] = finding.advice
    assert (advice.setting, advice.value) == ("max_num_batched_tokens", 24)
    recorded_words(finding.holder)


def test_a_budget_that_holds_them_all_is_not_what_is_too_small(found):
    lines = passed_over(Cause.SPEC_DECODE_PADDING, budget=24)
    finding = padded(found("other-limit", *lines, **header(24)))
    assert [advice.setting for advice in finding.advice] == [None]
    assert not finding.holder


@pytest.mark.parametrize(("settings", "proposed"), [(DRAFTS, 24), ({}, None)])
def test_the_token_budget_wants_a_decode_of_every_seat_where_drafts_are_known(found, settings, proposed):
    """A value comes from a replay alone if a step holds them: no step is larger than the budget."""
    lines = passed_over(Cause.TOKEN_BUDGET)
    [finding] = found("token-budget-bound", *lines, **header() | {"settings": settings})
    assert finding.evidence.proposed == proposed
    assert finding.advice[0].value == proposed
