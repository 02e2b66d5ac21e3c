"""A fleet with one overloaded engine, replayed with vLLM's real scheduler."""

import random

import pytest

pytest.importorskip("vllm")

from schedtrace.fleet.inputs import find_fleet
from schedtrace.present.pages.what_if import fleet_answer
from schedtrace.whatif.fleet import fleet_load, fleet_replay
from tests.simulated_fleet import PlannedEngine, record_engine


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Three engines; the router sends the first of them three times as much as each of the others."""
    folder = tmp_path_factory.mktemp("fleet")
    for number in range(3):
        engine = PlannedEngine(number, f"node{number}", "hot" if number == 0 else "")
        record_engine(folder, engine, random.Random(f"replay/{number}"), requests=8)  # noqa: S311  # no secret
    load, notes = fleet_load(find_fleet([str(folder)]))
    assert notes == []
    return load


def test_an_even_router_is_faster_and_the_baseline_keeps_the_recorded_assignment(load):
    replays = fleet_replay(load, {"data_parallel_size": 3, "router": "least-running"}, resamples=2)
    recorded, routed = replays.configurations
    assert abs(replays.baseline.misfit_frac) < 0.05
    assert recorded.finished == routed.finished == load.requests
    figure = routed.figure(replays.baseline.judged_by)
    assert figure.low_frac <= figure.change_frac < 0
    assert fleet_answer(replays).template.startswith("The router is")


def test_fewer_engines_are_slower(load):
    replays = fleet_replay(load, {"data_parallel_size": 1, "router": "least-running"}, resamples=0)
    assert replays.settings == {"data_parallel_size": 3, "router": "as recorded"}
    [slower] = [each for each in replays.configurations if not each.recorded]
    assert slower.finished == load.requests
    assert slower.figure(replays.baseline.judged_by).change_frac > 0.1
