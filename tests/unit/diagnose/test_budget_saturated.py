import msgspec
import pytest

from schedtrace.model.causes import Cause
from tests.makers import step

CODE = "budget-saturated"


def full(number, waiting, waiting_tokens, got=1000, **fields):
    tokens = {"waiting": waiting, "waiting_tokens_after": waiting_tokens, "ended": Cause.TOKEN_BUDGET}
    return step(number, got={"x": got - 10, "y": 10}, **tokens, **fields)


def test_a_spent_budget_with_requests_waiting_is_found_with_exact_figures(found, recorded_words):
    [finding] = found(CODE, full(0, 2, 150), full(1, 5, 400), step(2, got={"x": 1}), step(3))
    assert (finding.severity, finding.cause, finding.via) == ("info", "token_budget", "recorded")
    assert (finding.count, finding.steps, finding.tokens, finding.trials) == (2, [0, 1], 400, [])
    assert (finding.evidence.mean_waiting, finding.evidence.max_waiting_tokens) == (3.5, 400)
    example = {"num_waiting_after": 5, "waiting_tokens_after": 400, "total_requests": 2, "used_tokens": 1000}
    assert msgspec.to_builtins(finding.evidence.examples[0]) == {"step": 1, "trial": None, **example}
    recorded_words(finding.message)


@pytest.mark.parametrize(("waiting", "got"), [(0, 1000), (1, 999)])
def test_a_token_left_or_nobody_waiting_is_no_saturation(found, waiting, got):
    assert found(CODE, full(0, waiting, 0, got)) == []


@pytest.mark.parametrize(("second", "tokens"), [(70, 70), (None, None)])
def test_unknown_waiting_tokens_do_not_count(found, second, tokens, recorded_words):
    [finding] = found(CODE, full(0, 2, None), full(1, 1, second))
    assert (finding.count, finding.tokens, finding.evidence.max_waiting_tokens) == (2, tokens or 0, tokens)
    recorded_words(finding.message)


@pytest.mark.parametrize(("not_ready", "waited_for_tokens"), [(0, [3.0]), (1, [2.0]), (3, []), (4, [])])
def test_who_waits_for_something_else_does_not_count(found, not_ready, waited_for_tokens):
    findings = found(CODE, full(0, 3, 70, num_not_ready_after=not_ready))
    assert [finding.evidence.mean_waiting for finding in findings] == waited_for_tokens
