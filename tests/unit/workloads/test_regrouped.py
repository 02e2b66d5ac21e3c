"""A load at the times of another."""

import pytest

from schedtrace.errors import InputError
from schedtrace.workloads.random_load import at_times_of
from schedtrace.workloads.workload import LoadRequest, make_workload


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
