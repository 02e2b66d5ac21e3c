"""Steps dropped while the disk stands still, and a file that is rotated, on vLLM's real scheduler."""

import os
import time
from collections import Counter
from functools import partial

import msgspec
import polars as pl
import pytest

pytest.importorskip("vllm")

from schedtrace.read.run import read_run
from schedtrace.record import writer
from schedtrace.record.traced import traced_class
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.timeline import make_timeline
from tests.contract.deciding import LOAD, Deciding, first_difference
from tests.contract.loads import under_load
from tests.toys import Totals

pytestmark = pytest.mark.vllm

STILL, GOES_ON = 40, 140
"""Steps at which the disk stops and works again."""


class Watching(Deciding):
    """The writer's work is done by the engine, in the steps where the disk works; tokens are timed."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.first_tokens, self.last_tokens, self.ends, self.number = {}, {}, Counter(), 0

    def _writer(self):
        return self.scheduler._schedtrace_recorder.writer

    def schedule(self, *args):
        self.number += 1
        if not STILL <= self.number < GOES_ON:
            self._writer()._work(last=False)
        return super().schedule(*args)

    def update(self):
        began_us = self._writer().clock.since_anchor(time.monotonic_ns())
        told = super().update()
        ended_us = self._writer().clock.since_anchor(time.monotonic_ns())
        for one in (one for of_client in told.values() for one in of_client.outputs):
            if one.new_token_ids:
                self.first_tokens.setdefault(one.request_id, (began_us, ended_us))
                self.last_tokens[one.request_id] = (began_us, ended_us)
        return told


@pytest.fixture
def played(recording, monkeypatch):
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 1e6)
    monkeypatch.setattr(writer, "WRITE_LATEST_NS", 0)
    monkeypatch.setattr(writer, "MAX_PENDING", 30)
    engine = under_load(partial(Watching, traced_class), *LOAD)
    [trace] = read_run(recording).traces
    return engine, trace


def test_no_request_is_lost_with_the_steps_that_are_dropped(played, plain):
    engine, trace = played
    dropped = GOES_ON - STILL - writer.MAX_PENDING
    assert (trace.problems.missing_steps, trace.problems.dropped_steps) == (trace.end.dropped_steps,) * 2
    assert abs(trace.end.dropped_steps - dropped) <= 1
    assert sorted(trace.arrivals["request_id"]) == sorted(trace.finishes["request_id"])
    assert set(trace.arrivals["request_id"]) == set(engine.requests)
    assert (trace.problems.requests_missing, trace.problems.not_rebuilt, trace.problems.doubtful) == (
        False,
        [],
        [],
    )
    assert first_difference(plain, engine.decisions) is None


def test_no_time_of_a_token_is_guessed(played):
    engine, trace = played
    known = Counter()
    for name, seen in (("first_token_us", engine.first_tokens), ("last_token_us", engine.last_tokens)):
        for request_id, us in trace.finishes.select("request_id", name).rows():
            if us is None:
                known[name, "null", request_id in seen] += 1
                continue
            began_us, ended_us = seen[request_id]
            assert began_us <= us <= ended_us, (request_id, name)
            known[name, "known"] += 1
    assert known["first_token_us", "known"] > known["first_token_us", "null", True] > 0
    assert known["last_token_us", "known"] > known["last_token_us", "null", True] > 0


def test_a_truncated_trace_goes_on_as_a_whole_one(plain, recording, monkeypatch, warnings):
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 1e6)

    class Rotating(Deciding):
        number = 0

        def schedule(self, *args):
            self.number += 1
            if self.number in {50, 120}:
                self.scheduler._schedtrace_recorder.writer._work(last=False)
                os.truncate(recording / "engine-0.jsonl", 0)
                self.scheduler._schedtrace_recorder.writer._work(last=False)
            return super().schedule(*args)

    engine = under_load(partial(Rotating, traced_class), *LOAD)
    assert first_difference(plain, engine.decisions) is None
    [trace] = read_run(recording).traces
    numbers = trace.steps["step"].to_list()
    assert numbers == list(range(trace.header.first_step, trace.end.steps))
    assert abs(trace.header.first_step - 119) <= 2
    problems = trace.problems
    assert (problems.missing_steps, problems.garbled_lines, problems.not_rebuilt, problems.unclosed) == (
        0,
        [],
        [],
        False,
    )
    lines = map(msgspec.json.decode, (recording / "engine-0.jsonl").read_bytes().splitlines())
    here = {
        one["request_id"] for line in lines for one in (*line.get("present", ()), *line.get("arrived", ()))
    }
    assert here.issuperset(trace.stretches().select("request_id").collect()["request_id"])
    assert here.issuperset(trace.finishes["request_id"])
    assert len(warnings) == 1
    assert "was truncated while it was recorded" in warnings[0]


class Measured(Watching):
    """Watching, and its totals are kept."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.meter = self._writer().measuring.meter = Totals()


def test_metrics_lack_dropped_steps_and_say_so(recording, monkeypatch):
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 1e6)
    monkeypatch.setattr(writer, "WRITE_LATEST_NS", 0)
    monkeypatch.setattr(writer, "MAX_PENDING", 30)
    engine = under_load(partial(Measured, traced_class), *LOAD)
    [tally] = engine.meter.tallies
    [trace] = read_run(recording).traces
    timeline = make_timeline(trace, None)
    tally.advance_to(timeline.end_us)
    assert (tally.dropped_steps, tally.steps) == (trace.end.dropped_steps, timeline.steps.height)
    states = timeline.request_states
    us = pl.col("end_us") - pl.col("begin_us")
    queued = states.filter(pl.col("state").is_in(QUEUED)).group_by("cause").agg(us.sum())
    assert {cause: us for cause, us in tally.waits.us.items() if us} == dict(queued.iter_rows())
    assert tally.queue_causes == {}
