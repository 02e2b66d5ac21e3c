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
    ("running", "free", "words"),
    [
        (1, 50, "The budget of 1,000 tokens is what limits these steps"),
        (8, 50, "alone admits nobody here: 1 of 1 had no seat left (8 run)"),
        (1, 0, "alone admits nobody here: 1 of 1 had no free KV block left"),
    ],
)
def test_a_larger_budget_is_advised_only_where_it_could_admit_somebody(found, running, free, words):
    [finding] = found(CODE, full(0, running, free), max_num_running_reqs=8)
    assert words in plain(finding.advice)
    assert finding.evidence.steps_without_seat == (running == 8)
    assert finding.evidence.steps_without_block == (free == 0)
