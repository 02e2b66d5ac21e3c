"""What it takes recorded ranks to agree."""

import pytest

from schedtrace.model.trace_facts import RankSync
from schedtrace.step_times.fitting import gathering_us
from tests.makers import step

TOOK = [[900, 300, 5000], [400, 800, 700]]
"""Of each rank's all-reduces: the last to come took 400, 300 and 700 us."""


def ranks(run_of, took, **fields):
    for rank, of_rank in enumerate(took):
        syncs = [RankSync(100 * at, us, 0, at) for at, us in enumerate(of_rank)]
        run = run_of("ranks", step(0, syncs=syncs), engine_rank=rank, **fields)
    return run.traces


def test_a_gathering_takes_what_the_median_all_reduce_took_the_rank_that_came_last(run_of):
    assert gathering_us(ranks(run_of, TOOK)) == 400.0


def test_an_all_reduce_that_a_rank_did_not_record_says_nothing(run_of):
    assert gathering_us(ranks(run_of, [TOOK[0], TOOK[1][:2]])) == 350.0


@pytest.mark.parametrize("took", [[[], []], [[500]]])
def test_without_all_reduces_of_several_ranks_it_is_not_known(run_of, took):
    assert gathering_us(ranks(run_of, took)) is None


def test_what_the_recorded_ranks_gathered_is_in_their_gaps(run_of):
    balanced = "schedtrace.balance.engine.BalanceScheduler"
    assert gathering_us(ranks(run_of, TOOK, scheduler_class=balanced)) == 0.0
