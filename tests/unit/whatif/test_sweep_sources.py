"""A run's load and its engine; ``tests/contract/test_sweep.py`` has a model on a GPU, which asks vLLM."""

import pytest

from schedtrace.whatif.prediction import recorded_load
from schedtrace.whatif.replays import RecordedEngine
from schedtrace.whatif.sweep import recorded_loads
from tests.makers import arrival, finish, manifest, step, workload
from tests.unit.whatif.conftest import a_fit

SEEN = step(0, got={"a": 100}, new="a", arrived=[arrival("a", 0)], finished=[finish("a")])


def of_trials(*trials):
    """One request a trial."""
    for number, trial in enumerate(trials):
        name = f"t{trial}-0"
        came, ended = arrival(name, number * 10_000), finish(name)
        yield step(number, trial=trial, got={name: 100}, new=[name], arrived=[came], finished=[ended])


def test_the_loads_of_a_run_on_its_engine(run_of):
    times = a_fit()
    work = recorded_load(run_of("base", SEEN), times).work
    assert [request.request_id for load in work.loads for request in load] == ["a"]
    assert isinstance(work.engine, RecordedEngine)
    assert (work.engine.header.model, work.engine.times) == ("tiny", times)
    assert (work.keep_prefix_cache, work.warmups) == (False, 0)


@pytest.mark.parametrize("keep", [True, False])
def test_a_warm_up_counts_for_what_it_leaves_in_the_cache(run_of, keep):
    about = manifest(workload=workload(keep_prefix_cache=keep))
    run = run_of("base", *of_trials(0, 1, 2), about=about, trial_ids=True)
    work = recorded_load(run, a_fit()).work
    assert (work.keep_prefix_cache, work.warmups, len(work.loads)) == (keep, int(keep), 2 + keep)
    assert [request.request_id for load in work.measured for request in load] == ["t1-0", "t2-0"]


def test_the_engines_of_a_run_have_one_load(run_of):
    run_of("base", SEEN)
    work = recorded_load(run_of("base", SEEN, engine_rank=1), a_fit()).work
    assert [request.data_parallel_rank for load in work.loads for request in load] == [0, 1]
    assert work.engine.ranks == 2


def test_for_another_engine_no_request_names_a_rank(run_of):
    run_of("base", SEEN)
    [load] = recorded_loads(run_of("base", SEEN, engine_rank=1))
    assert [request.data_parallel_rank for request in load] == [None, None]
