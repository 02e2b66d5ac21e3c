"""Histories of requests, made line by line, equal the states that ``analyze`` makes of the trace."""

import polars as pl
import pytest

pytest.importorskip("vllm")

from schedtrace.read.run import read_run
from schedtrace.record.disguise import RECORDERS
from schedtrace.record.otel.histories import Histories
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from schedtrace.timeline.timeline import make_timeline
from tests.contract.loads import FAMILIES, SEEDS, SHORT_STEPS, make_script, play
from tests.toys import Totals

pytestmark = pytest.mark.vllm

SESSIONS = {"streaming_input"}
"""Sessions have no history."""
CHOSEN = [
    "async_aborts", "async_mixed", "async_model_len", "few_seqs", "lora_cap", "mixed", "paused", "pipeline",
    "prefix_caching_tight", "priority_tight", "resets", "tight_kv", "whole_sequence_reserved",
]  # fmt: skip
LOADS = CHOSEN if len(SEEDS) == 1 else sorted(FAMILIES.keys() - SESSIONS)
"""All loads with `make compat`."""


class Meter(Totals):
    """Follows requests, and publishes nothing."""

    def __init__(self):
        super().__init__()
        self.histories = Histories()
        self.states = {}

    def publish(self, _tally):
        self.take(last=False)

    def take(self, *, last):
        for history in self.histories.take_ended(last=last):
            self.states[history.arrival.request_id] = self.histories.states(history)


def followed(name, seed=1):
    """The states of each finished request: as they were followed, and as the trace has them."""
    family = FAMILIES[name]
    engine = Driver(traced_class, **family.engine)
    writer = RECORDERS.look_up(engine.scheduler).writer
    meter = Meter()
    writer.measuring.meter = meter
    play(engine, make_script(family, seed, SHORT_STEPS))
    RECORDERS.look_up(engine.scheduler).close()
    meter.take(last=True)
    trace, *_ = read_run(writer.path.parent).traces
    timeline = make_timeline(trace, None)
    rows = timeline.request_states.filter(pl.col("end_us") > pl.col("begin_us"))
    expected = {}
    for request_id, *state in rows.select("request_id", "begin_us", "end_us", "state", "cause").iter_rows():
        states = expected.setdefault(request_id, [])
        if states and states[-1][2:] == state[2:]:
            state[0] = states.pop()[0]
        states.append(state)
    finished = set(timeline.finishes["request_id"])
    return meter, {name: states for name, states in expected.items() if name in finished}


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.usefixtures("recording")
def test_histories_equal_the_states_of_the_trace(name):
    meter, expected = followed(name)
    assert meter.histories.lost == 0
    assert {
        request_id: [list(state[:4]) for state in states] for request_id, states in meter.states.items()
    } == expected
