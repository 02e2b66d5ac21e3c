"""Recorded loads in virtual time, whose truth under other settings can be had by simulating them again."""

from concurrent.futures import Future

import pytest

pytest.importorskip("vllm")

from schedtrace.whatif.prediction import recorded_load
from schedtrace.whatif.search import menu
from tests.simulated import simulated

LOADS = {
    "tight": {"num_blocks": 40, "max_model_len": 512, "max_num_batched_tokens": 256},
    "async": {"num_blocks": 60, "max_model_len": 512, "async_scheduling": True},
    "priority": {"num_blocks": 50, "max_model_len": 512, "scheduling_policy": "priority"},
    "seats": {"max_num_seqs": 4, "max_model_len": 512},
    "prefix": {"enable_prefix_caching": True, "max_num_seqs": 8, "max_model_len": 512},
    "threshold": {"long_prefill_token_threshold": 32, "max_num_batched_tokens": 128, "max_model_len": 512},
}


class Here:
    """A pool without processes."""

    def __init__(self, work):
        self._work = work

    def submit_replay(self, function, *arguments):
        future = Future()
        future.set_result(function(self._work, *arguments))
        return future

    def close(self):
        """Nothing to end."""


def seats_and_a_budget(*of):
    """Return the part of the menu that is about seats, and a token budget."""
    changes = menu(*of)
    budget = next(change for change in changes if change[0] == "max_num_batched_tokens")
    return [*(change for change in changes if change[0] == "max_num_seqs"), budget]


def drive(folder, *, requests=20, **options):
    """Two trials with so many requests each, 1.7 ms apart."""

    def load(engine):
        for trial in (1, 2):
            began = engine.clock.now_us + 1000.0 * (trial > 1)
            for number in range(requests):
                engine.arrive(
                    began + 1700 * number,
                    f"t{trial}-{number}",
                    20 + 37 * number % 200,
                    5 + 11 * number % 40,
                    shared=16,
                    priority=number % 3,
                    front_end_us=300,
                )
            engine.run()
            engine.scheduler.reset_prefix_cache()

    return simulated(folder, load, trial_ids=True, **options)


@pytest.fixture(scope="session")
def seats(tmp_path_factory):
    """A recorded load that waits for seats, 40 requests in all."""
    return recorded_load(drive(tmp_path_factory.mktemp("seats") / "base", requests=20, **LOADS["seats"]))


@pytest.fixture(scope="module", params=LOADS)
def load(request, tmp_path_factory):
    """``(name, recorded)``."""
    folder = tmp_path_factory.mktemp(request.param) / "base"
    return request.param, recorded_load(drive(folder, **LOADS[request.param]))
