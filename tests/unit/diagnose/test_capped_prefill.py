"""``capped-prefill``."""

import pytest

from schedtrace.model.causes import Cap
from schedtrace.model.trace import ChunkCap, ScheduledRequest
from tests.makers import arrival, finish, step

CODE = "capped-prefill"


def capped(*, times=10, fixed_us=1000, per_token_us=0, left=500, cap=Cap.LONG_PREFILL):
    """80 steps in which one or two requests decode; half compute 20 or 40 tokens of a prompt, capped."""
    lines = []
    for number in range(80):
        chunk = (0, 20, 0, 40)[number % 4]
        decodes = {"d": 1, "e": 1} if number % 8 < 4 else {"d": 1}
        tokens = decodes | ({"p": chunk} if chunk else {})
        line = step(
            number,
            start=(fixed_us + 40 * per_token_us) * number,
            took=0,
            back=fixed_us + per_token_us * chunk,
            got=tokens,
            budget=sum(tokens.values()) + left,
            decode_tokens=len(decodes),
            prefill_tokens=chunk,
            arrived=[] if number else [arrival(name, 0, 0, prompt_tokens=9000) for name in "dep"],
        )
        line.caps = [ChunkCap("p", cap, round(times * chunk), chunk)] if chunk else []
        lines.append(line)
    return lines


def test_chunks_a_tenth_as_large_as_they_might_be(found, recorded_words):
    """Each of 40 chunks takes a step of 1,000 us, and is a tenth of what fits; three live for 80,000 us."""
    [finding] = found(CODE, *capped())
    evidence = finding.evidence
    assert (evidence.requests, evidence.chunks, finding.count) == (1, 40, 40)
    assert evidence.full_chunks == pytest.approx(4)
    assert evidence.low_frac == pytest.approx(1, abs=1e-3)
    assert finding.share_frac == pytest.approx(40 * 900 / (3 * 80_000), rel=2e-3)
    assert [(advice.setting, advice.value) for advice in finding.advice] == [
        ("long_prefill_token_threshold", 0)
    ]
    recorded_words(finding)


def test_the_budget_that_is_left_bounds_a_chunk(found):
    """Chunks of 20 and 40 tokens might have had 30 more."""
    [finding] = found(CODE, *capped(left=30))
    assert finding.evidence.full_chunks == pytest.approx(20 * 20 / 50 + 20 * 40 / 70)


def test_where_several_partial_prefills_are_allowed_zero_is_no_choice(found):
    """vLLM then sets a threshold by itself."""
    config = {"max_num_partial_prefills": 2, "long_prefill_token_threshold": 40}
    [finding] = found(CODE, *capped(), scheduler_config=config)
    assert (finding.advice[0].value, finding.evidence.threshold) == (1000, 40)


@pytest.mark.parametrize(("admitted", "late_us"), [("", 0), ("x", 3000), ("xy", 4000), ("xyz", 4000)])
def test_requests_that_arrive_meanwhile_would_wait_for_full_chunks(found, admitted, late_us):
    """The prompt begins at 1,000 us and would take 4,000; they come at 2,000, 4,000 and 6,000 us."""
    lines = capped()
    for number, name in enumerate(admitted):
        lines[2 + 2 * number].requests.append(ScheduledRequest(name, 0, 1, "new"))
        lines[2 + 2 * number].finished = [finish(name, finished_us=0)]
    [finding] = found(CODE, *lines)
    assert finding.share_frac == pytest.approx((36_000 - late_us) / (3 * 80_000), rel=4e-2)


@pytest.mark.parametrize(
    ("load", "shows"),
    [
        ({"times": 1.15}, True),
        ({"times": 1.1}, False),
        ({"cap": Cap.TOKEN_BUDGET}, False),
        ({"cap": Cap.LONG_PREFILL_ADAPTIVE}, False),
        ({"left": 0}, False),
        ({"fixed_us": 10, "per_token_us": 50}, False),
    ],
    ids=["2 % of the time", "less", "budget", "adaptive", "no budget left", "tokens take the time"],
)
def test_when_it_is_found(found, load, shows):
    assert bool(found(CODE, *capped(**load))) is shows
