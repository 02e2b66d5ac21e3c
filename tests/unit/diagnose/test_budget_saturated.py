import pytest

from schedtrace.model.causes import Cause
from tests.makers import step

CODE = "budget-saturated"


def full(number, waiting, waiting_tokens, got=1000):
    tokens = {"waiting": waiting, "waiting_tokens_after": waiting_tokens, "ended": Cause.TOKEN_BUDGET}
    return step(number, got={"x": got - 10, "y": 10}, **tokens)


def test_a_spent_budget_with_requests_waiting_is_found_with_exact_figures(found):
    [finding] = found(CODE, full(0, 2, 150), full(1, 5, 400), step(2, got={"x": 1}), step(3))
    assert (finding.severity, finding.cause, finding.via) == ("info", "token_budget", "recorded")
    assert (finding.count, finding.steps, finding.tokens, finding.trials) == (2, [0, 1], 400, [])
    assert (finding.evidence["mean_waiting"], finding.evidence["max_waiting_tokens"]) == (3.5, 400)
    assert finding.evidence["examples"][0] == {
        "step": 1,
        "trial": None,
        "num_waiting_after": 5,
        "waiting_tokens_after": 400,
        "total_requests": 2,
        "used_tokens": 1000,
    }
    assert "2 steps of 3 " in finding.message
    assert "1,000 tokens" in finding.advice


@pytest.mark.parametrize(("waiting", "got"), [(0, 1000), (1, 999)])
def test_a_token_left_or_nobody_waiting_is_no_saturation(found, waiting, got):
    assert found(CODE, full(0, waiting, 0, got)) == []


def test_steps_with_unknown_waiting_tokens_count_but_do_not_lower_the_maximum(found):
    [finding] = found(CODE, full(0, 2, None), full(1, 1, 70))
    assert (finding.count, finding.tokens) == (2, 70)
