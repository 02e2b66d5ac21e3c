"""A sweep whose configurations are not replayed."""

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest

from schedtrace.model.what_if import Baseline, Figure, ReplayedLoad, ReplayOutcome, Replays
from schedtrace.step_times.constants import Constants
from schedtrace.step_times.cost_sums import Linear
from schedtrace.step_times.fitted import Fitted
from schedtrace.step_times.fitting import NO_TIME, Error, Fit, Source
from schedtrace.whatif.replays import RecordedEngine, Work
from schedtrace.workloads import LoadRequest
from schedtrace.workloads.workload import make_workload
from tests.makers import header

BASE = {"max_num_seqs": 8, "max_num_batched_tokens": 1000}
"""Of the recorded engine."""


def a_load(name="load", requests=4):
    of_load = [
        LoadRequest(request_id=f"r{number}", arrived_us=number * 1e3, prompt_tokens=100, output_tokens=10)
        for number in range(requests)
    ]
    return make_workload(name, "jsonl", lambda: iter(of_load))


def a_document(*configurations, part=None, **fields):
    """What was replayed of a recorded load."""
    load = {"label": "base", "path": "logs/base", "recorded_version": "0.32.0+cpu", "trials": 1}
    load |= {"requests": 4, "prompt_tokens": 400, "output_tokens": 40, "by_arrival": False, "part": part}
    names = [name for configuration in configurations for name in configuration.changes]
    about = {
        "load": ReplayedLoad(**{key: fields.pop(key, value) for key, value in load.items()}),
        "vllm_version": "0.32.0",
        "step_times": "Fitted to 100 steps.",
        "settings": {name: BASE.get(name) for name in names},
        "baseline": Baseline(),
    }
    return Replays(configurations=list(configurations), **{**about, **fields})


def a_figure(name, change_frac, *, higher=False, low=None, high=None):
    """A time, or a rate, against the recorded configuration's."""
    return Figure(
        name=name, unit="", higher_is_better=higher, decided=False, value=1 + change_frac, before=1.0,
        change_frac=change_frac, low_frac=low, high_frac=high,
    )  # fmt: skip


def a_fit():
    """Every step takes 1 ms."""
    error = Error(median_abs_log=0, p90_abs_log=0, lag1=None, total_frac=0)
    about = dict.fromkeys(
        ("vllm_version", "model", "device", "host", "recorded_at", "schedtrace_version"), "x"
    )
    return Fitted(
        Fit(
            source=Source(runs=["base"], **about),
            device=Linear(1000.0, {}, [], {}, 100),
            **dict.fromkeys(("schedule", "update", "gap"), NO_TIME),
            missing=[],
            first_step_us=None,
            error=error,
            residuals=[],
            trial_levels=[],
        )
    )


@pytest.fixture
def work():
    return Work([a_load()], RecordedEngine(header(), Constants()))


@pytest.fixture
def pool():
    """A pool in this process: ``replayed`` has the changes that were asked for, ``stop_after`` ends it."""
    return StubPool()


class StubPool:
    def __init__(self):
        self.replayed, self.stop_after, self.closed = [], None, 0
        self.stop_with = KeyboardInterrupt()

    def __call__(self, work):
        self.work = work
        return self

    def submit_replay(self, function, *arguments):
        future = Future()
        if function.__name__ == "base_settings":
            [names] = arguments
            future.set_result({name: BASE.get(name) for name in names})
        elif self.stop_after is not None and len(self.replayed) >= self.stop_after:
            future.set_exception(self.stop_with)
        else:
            key, changes = arguments
            self.replayed.append(changes)
            future.set_result(an_outcome(key, changes))
        return future

    def is_process_loss(self, error):
        return isinstance(error, BrokenProcessPool)

    def close(self):
        self.closed += 1


def an_outcome(key="k", changes=None, **fields):
    """As fast as there are seats: 4 requests of 10 tokens in 40 / seats seconds."""
    seats = (changes or {}).get("max_num_seqs", BASE["max_num_seqs"])
    defaults = {"requests": 4, "steps": 100, "preemptions": 0, "output_tokens": 40, "duration_s": 40 / seats}
    latencies = {"ttft_ms": [float(seats)] * 4, "tpot_ms": [10.0] * 4, "e2e_ms": [100.0] * 4}
    return ReplayOutcome(key=key, changes=changes or {}, **{**defaults, **latencies, **fields})
