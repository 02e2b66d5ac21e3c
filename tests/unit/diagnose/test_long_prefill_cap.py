"""``long-prefill-cap``: what the threshold left empty."""

import pytest

from schedtrace.model.causes import Cap
from schedtrace.model.trace import ChunkCap
from tests.makers import step

CODE = "long-prefill-cap"
THRESHOLD = {"long_prefill_token_threshold": 100}


def capped(number, wanted, got, cap=Cap.LONG_PREFILL, **fields):
    caps = [ChunkCap(name, cap, wanted, tokens) for name, tokens in got.items()]
    return step(number, got=got, caps=caps, **fields)


def test_tokens_that_were_wanted_and_empty_are_told(found):
    lines = [capped(0, 900, {"a": 100}), capped(1, 800, {"a": 100}), step(2, got={"a": 1})]
    [finding] = found(CODE, *lines, scheduler_config=THRESHOLD)
    assert (finding.count, finding.steps) == (2, [0, 1])
    assert finding.tokens == 800 + 700
    assert finding.evidence.mean_empty_tokens == 750
    assert finding.evidence.steps_if_full == 1
    assert (finding.severity, finding.cost_ms, finding.advice) == (
        "warning",
        None,
        [],
    )  # no model of step times


def test_no_more_can_be_used_than_is_left(found):
    [finding] = found(CODE, capped(0, 5000, {"a": 400, "b": 400}))
    assert finding.tokens == 200


@pytest.mark.parametrize(
    "line",
    [capped(0, 5000, {"a": 500, "b": 500}), capped(0, 5000, {"a": 400}, cap=Cap.MAX_MODEL_LEN)],
    ids=["in a full step", "another cap"],
)
def test_what_is_no_cap_of_this_kind(found, line):
    assert found(CODE, line) == []


def test_the_adaptive_threshold_counts_too(found):
    assert len(found(CODE, capped(0, 500, {"a": 400}, cap=Cap.LONG_PREFILL_ADAPTIVE))) == 1


def test_full_steps_are_counted_trial_by_trial(found):
    [finding] = found(CODE, *(capped(n, 900, {"a": 100}, trial=1 + n // 2) for n in range(4)))
    assert finding.evidence.steps_if_full == 2


@pytest.mark.parametrize(("fill", "severity"), [(0, "critical"), (10_000, "info")])
def test_the_cost_is_the_fixed_time_of_the_steps_too_many(found, fill, severity):
    """Each step takes 1,000 us whatever it does: 3 of 4 steps are too many."""
    steps = [capped(n, 900, {"a": 100}, start=n * 1000, took=0, back=1000) for n in range(4)]
    rest = [step(n, start=n * 1000, took=0, back=1000, got={"a": 1}) for n in range(4, 24 + fill)]
    [finding] = found(CODE, *steps, *rest)
    assert finding.cost_ms == pytest.approx(3.0, rel=0.01)
    assert finding.cost_frac == pytest.approx(3 / (24 + fill), rel=0.01)
    assert finding.severity == severity


@pytest.mark.parametrize(("shared", "protects"), [(1, False), (2, True), (4, True)])
def test_a_threshold_that_keeps_steps_short_for_others_is_information(found, shared, protects):
    """b decodes beside a's capped chunks in so many of 4 steps."""
    lines = [capped(n, 900, {"a": 100}) for n in range(4 - shared)]
    cap = ChunkCap("a", Cap.LONG_PREFILL, 900, 100)
    lines += [step(n, got={"a": 100, "b": 1}, caps=[cap]) for n in range(4 - shared, 4)]
    [finding] = found(CODE, *lines, scheduler_config=THRESHOLD)
    assert finding.evidence.shared_steps == shared
    assert finding.severity == ("info" if protects else "warning")


def test_a_cost_that_the_model_does_not_resolve_is_not_given(found):
    """A model in which a step costs nothing by itself would print a billionth of a millisecond."""
    steps = [
        capped(n, 900, {"a": 100}, start=n * 1000, took=0, back=1000, prefill_tokens=100) for n in range(2)
    ]
    rest = [
        step(n, start=n * 10_000, took=0, back=10 * n, got={"a": n}, prefill_tokens=n) for n in range(2, 60)
    ]
    [finding] = found(CODE, *steps, *rest)
    assert (finding.cost_ms, finding.cost_frac, finding.cost_error_frac) == (None, None, None)
    assert finding.severity == "info"
