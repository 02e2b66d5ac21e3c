"""Prompts that take most of the steps' prefill tokens; the budget is 1,000 tokens."""

import pytest

from schedtrace.model.trace import ScheduledRequest
from tests.makers import arrival, step


def chunks(number, **got):
    """A step with these chunks: a request's computed tokens and what it got."""
    requests = [
        ScheduledRequest(name, done, n, "running" if done else "new") for name, (done, n) in got.items()
    ]
    return step(number, got={name: n for name, (_, n) in got.items()}, requests=requests)


def come(**tokens):
    return [arrival(name, 0, 0, prompt_tokens=n) for name, n in tokens.items()]


def test_chunks_of_prompts_are_no_decodes(view_of):
    """a has 250 tokens in chunks of 100, 100 and 50, then decodes."""
    first = chunks(0, a=(0, 100))
    first.arrived = come(a=250)
    view = view_of(first, chunks(1, a=(100, 100)), chunks(2, a=(200, 50)), chunks(3, a=(250, 1)))
    rows = view.prefills.sort("step").select("step", "scheduled_tokens", "computed_tokens").rows()
    assert rows == [(0, 100, 0), (1, 100, 100), (2, 50, 200)]


@pytest.mark.parametrize(
    ("tokens", "usual", "mine", "others", "long"),
    [
        (1001, 250, 500, 500, True),
        (1001, 250, 499, 501, False),
        (1000, 250, 900, 100, False),
        (1001, 251, 500, 500, False),
    ],
)
def test_a_long_prompt_exceeds_budget_and_usual_prompts_and_takes_half_of_the_step(
    view_of, tokens, usual, mine, others, long
):
    line = chunks(0, a=(0, mine), b=(0, others))
    line.arrived = come(a=tokens, b=usual)
    rows = view_of(line).long_prefills.rows()
    assert rows == ([(0, "a", tokens, mine, 1000)] if long else [])


def test_of_two_in_a_step_the_larger_chunk_counts(view_of):
    line = chunks(0, b=(0, 400), a=(0, 600))
    line.arrived = come(a=3000, b=2000, c=10, d=10)
    assert view_of(line).long_prefills["request_id"].to_list() == ["a"]


def test_many_prompts_of_one_size_are_a_full_device(view_of):
    line = chunks(0, a=(0, 1000))
    line.arrived = come(a=3000, b=3000, c=10)
    assert view_of(line).long_prefills.is_empty()
