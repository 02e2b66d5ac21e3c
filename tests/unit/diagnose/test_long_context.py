"""``long-context``."""

import pytest

from schedtrace.model.trace import ScheduledRequest
from tests.makers import arrival, step

CODE = "long-context"
OTHERS = ("a", "b", "c")


def decodes(tokens=10_000, per_token_us=0.4, present=range(20, 40), others=OTHERS, **fields):
    """40 decode steps of 1,000 us and what the context takes; r is there in half, c in every second one."""
    came = [*(arrival(name, 0, prompt_tokens=100) for name in OTHERS), arrival("r", 0, prompt_tokens=tokens)]
    lines = []
    for number in range(40):
        got = {**dict.fromkeys(others[: 2 + number % 2], 100), **({"r": tokens} if number in present else {})}
        line = step(
            number,
            start=10_000 * number,
            took=0,
            back=round(1000 + per_token_us * sum(got.values())),
            got=dict.fromkeys(got, 1),
            decode_tokens=len(got),
            arrived=came if number == 0 else [],
            **fields,
        )
        line.requests = [ScheduledRequest(name, context, 1) for name, context in got.items()]
        lines.append(line)
    return lines


def test_a_long_context_lengthens_the_steps_of_others(found, recorded_words):
    """Three or four requests take 4,000 us more in 20 steps; four live for 39 * 10,000 + 5,120 us."""
    [finding] = found(CODE, *decodes())
    evidence = finding.evidence
    assert (evidence.request_id, evidence.prompt_tokens) == ("r", 10_000)
    assert (evidence.median_prompt_tokens, evidence.requests, finding.count) == (100, 2.5, 20)
    assert evidence.step_us == 5100
    assert evidence.own_us == pytest.approx(4000, rel=0.01)
    assert finding.share_frac == pytest.approx(70 * 4000 / (4 * 395_120), rel=0.01)
    recorded_words(finding)


def test_long_contexts_of_half_of_the_requests(found, recorded_words):
    """The median of all prompts is no long one; nothing shows what contexts would cost without drafts."""
    lines = decodes(draft_tokens=6)
    lines[0].arrived += [arrival(name, 0, prompt_tokens=9_000) for name in ("s", "t", "u")]
    [finding] = found(CODE, *lines)
    assert (finding.evidence.median_prompt_tokens, finding.evidence.prompt_tokens) == (100, 10_000)
    recorded_words(finding.advice)


@pytest.mark.parametrize(
    ("lines", "shows"),
    [
        (decodes(tokens=800, per_token_us=4), True),
        (decodes(tokens=799, per_token_us=4), False),
        (decodes(per_token_us=0.17), True),
        (decodes(per_token_us=0.15), False),
        (decodes(others=()), False),
        (decodes(present=range(40)), False),
        (decodes(wave=0, step_counter=1), False),
    ],
    ids=[
        "8 times the median prompt", "not 8 times", "5 % of the time", "less", "nobody beside it",
        "always there, so that nothing tells its cost", "lock-step",
    ],
)  # fmt: skip
def test_when_it_is_found(found, lines, shows):
    assert bool(found(CODE, *lines)) is shows


def test_of_steps_that_it_lengthens_by_less_than_a_quarter(found):
    """Other requests take 20 ms of each step."""
    lines = decodes(per_token_us=0.4)
    for line in lines:
        line.output_us += 20_000
    assert found(CODE, *lines) == []
