"""Random loads are what ``schedtrace run`` submits with the same options; a load at the times of another."""

from itertools import islice

import numpy as np
import pytest

from schedtrace.engine.prompts import load_prompts
from schedtrace.engine.run_spec import RunSpec
from schedtrace.errors import InputError, UsageError
from schedtrace.workloads import random_workload
from schedtrace.workloads.random_load import DRAWN_AT_ONCE, arrivals_s, at_times_of
from schedtrace.workloads.workload import LoadRequest, make_workload


def test_the_lengths_are_those_of_run():
    options = {"num_prompts": 40, "input_len": 100, "output_len": 10, "range_ratio": 0.5, "seed": 4}
    load = random_workload(**options)
    prompts = load_prompts(RunSpec(engine_args=[], **options))
    assert [(one.prompt_tokens, one.output_tokens) for one in load] == [
        (one.input_len, one.output_len) for one in prompts
    ]
    assert (len(load), load.prompt_tokens) == (40, sum(one.input_len for one in prompts))
    assert list(load) == list(load)


def test_defaults_are_those_of_vllms_benchmark():
    load = random_workload()
    first = next(iter(load))
    assert (len(load), first.prompt_tokens, first.output_tokens) == (1000, 1024, 128)


def test_without_a_rate_all_arrive_at_once_which_is_said_unless_it_was_asked_for():
    [note] = random_workload(num_prompts=2).notes
    assert note.template.startswith("All requests arrive at once.")
    for load in (
        random_workload(num_prompts=2, prequeue=True),
        random_workload(num_prompts=2, rate=1.0),
        random_workload(num_prompts=1),
    ):
        assert load.notes == []
    assert {one.arrived_us for one in random_workload(num_prompts=5)} == {0.0}


def test_arrivals_at_a_rate_are_a_gamma_process():
    load = random_workload(num_prompts=5, rate=20.0, burstiness=2.0, seed=1)
    gaps = np.random.default_rng(1).gamma(2.0, 1 / 40, size=4)
    assert [one.arrived_us for one in load] == [at * 1e6 for at in [0.0, *np.cumsum(gaps)]]
    assert load.last_arrival_us == pytest.approx(gaps.sum() * 1e6)


def test_a_rate_and_prequeue_exclude_each_other():
    with pytest.raises(UsageError, match="cannot go with --request-rate"):
        random_workload(rate=1.0, prequeue=True)


def test_times_do_not_depend_on_how_many_are_drawn_at_once():
    count = 2 * DRAWN_AT_ONCE + 3
    gaps = np.random.default_rng(0).gamma(1.0, 1 / 7, size=count - 1)
    assert list(islice(arrivals_s(7.0), count)) == [0.0, *np.cumsum(gaps).tolist()]


def made(name, *requests):
    return make_workload(name, "jsonl", lambda: iter(requests))


def request(name, arrived_us, front_end_us=0.0, queued_step=None):
    return LoadRequest(
        request_id=name,
        arrived_us=arrived_us,
        prompt_tokens=10,
        output_tokens=5,
        front_end_us=front_end_us,
        queued_step=queued_step,
    )


def test_requests_take_the_times_and_those_of_the_first_step_come_together():
    times = made("t", request("x", 0, 100, 0), request("y", 50, 80, 0), request("z", 200, 30, 1))
    taken = at_times_of(made("l", request("a", 9), request("b", 9), request("c", 9)), times)
    assert [(one.request_id, one.arrived_us, one.front_end_us) for one in taken] == [
        ("a", 0, 130),
        ("b", 50, 80),
        ("c", 200, 30),
    ]
    assert taken.name == "l at the times of t"


def test_too_few_times_are_an_error():
    with pytest.raises(InputError, match="t: 1 arrivals for 2 requests; give --num-prompts 1"):
        at_times_of(made("l", request("a", 0), request("b", 0)), made("t", request("x", 0)))
