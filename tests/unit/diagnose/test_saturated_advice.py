"""What ``budget-saturated`` advises: a larger budget only where another request could have been admitted."""

import pytest

from schedtrace.present.phrases import plain
from tests.makers import step

CODE = "budget-saturated"


def full(number, running, free):
    return step(
        number,
        got={"x": 1000},
        waiting=2,
        waiting_tokens_after=500,
        num_running_after=running,
        kv_blocks_free_after=free,
    )


@pytest.mark.parametrize(
    ("running", "free", "advice"),
    [
        (
            1,
            50,
            (
                "A larger --max-num-batched-tokens (now 1,000) starts prompts sooner and makes each step "
                "longer: higher inter-token latency, more activation memory."
            ),
        ),
        (
            8,
            50,
            (
                "A larger --max-num-batched-tokens admits no further request: 100 % of these steps also had "
                "no free seat (--max-num-seqs 8). It only lets running prompts take larger chunks."
            ),
        ),
        (
            1,
            0,
            (
                "A larger --max-num-batched-tokens admits no further request: 100 % of these steps also had "
                "no free KV block. It only lets running prompts take larger chunks."
            ),
        ),
    ],
)
def test_a_larger_budget_is_advised_only_where_it_could_admit_somebody(found, running, free, advice):
    [finding] = found(CODE, full(0, running, free), max_num_running_reqs=8)
    assert plain(finding.advice) == advice
    assert finding.evidence.steps_without_seat == (running == 8)
    assert finding.evidence.steps_without_block == (free == 0)


def test_half_of_the_steps_are_not_most_of_them(found):
    [finding] = found(CODE, full(0, 8, 50), full(1, 1, 50), max_num_running_reqs=8)
    assert "starts prompts sooner" in plain(finding.advice)
