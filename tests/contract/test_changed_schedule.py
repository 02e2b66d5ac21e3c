"""A ``schedule()`` that is replaced, calls itself or raises: that is what runs, and it is told."""

from types import FunctionType

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.scheduler import Scheduler

from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver as Engine
from tests.contract.deciding import decisions, first_difference, num_steps
from tests.contract.subclasses import PAST_THE_MARKS, Decorated, exits_of, one_seat_for_two

pytestmark = pytest.mark.vllm


@pytest.mark.usefixtures("recording")
def test_an_allocation_that_somebody_replaces_while_it_is_watched_stays_replaced():
    class Replaces(Decorated):
        calls = 0

        def schedule(self, *args):
            manager = self.kv_cache_manager
            if self.current_step in {4, 8}:
                manager.allocate_slots = self.counting(manager.allocate_slots)
            return super().schedule(*args)

        def counting(self, allocate):
            def counted(*args, **options):
                self.calls += 1
                return allocate(*args, **options)

            return counted

    def calls(wrap):
        engine = Engine(wrap, max_num_seqs=9)
        for number in range(12):
            engine.add(f"{number}")
            engine.step()
        engine.scheduler.shutdown()
        manager = vars(engine.scheduler.kv_cache_manager)
        return engine.scheduler.calls, manager["allocate_slots"].__qualname__

    untraced = calls(lambda _: Replaces)
    assert untraced[0] > 12
    assert calls(lambda _: traced_class(Replaces)) == untraced


def test_a_method_replaced_after_tracing_is_the_one_that_runs(recording, monkeypatch):
    traced, original, calls = traced_class(Scheduler), Scheduler.schedule, []

    def theirs(self, *args):
        calls.append(args)
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "schedule", theirs)
        trace = one_seat_for_two(lambda _: traced, recording)
    assert calls == [()]
    assert exits_of(trace) == [("max_num_seqs", "two", 246, "inferred")]
    assert trace.notices == [PAST_THE_MARKS]


def test_code_replaced_after_tracing_is_the_one_that_runs(recording, monkeypatch):
    original = Scheduler.schedule
    kept = FunctionType(original.__code__, original.__globals__, "kept", original.__defaults__)

    def theirs(self, *args):
        self.calls.append(args)
        return self.kept(*args)

    class Kept(Scheduler):
        calls = []  # noqa: RUF012  # to be seen from here

    Kept.kept = kept
    traced = traced_class(Kept)
    with monkeypatch.context() as patch:
        patch.setattr(original, "__code__", theirs.__code__)
        trace = one_seat_for_two(lambda _: traced, recording)
    assert Kept.calls == [()]
    assert exits_of(trace) == [("max_num_seqs", "two", 246, "inferred")]


def test_a_call_within_a_call_is_a_part_of_it(recording):
    class AsksItself(Scheduler):
        calls = 0

        def schedule(self, *args):
            self.calls += 1
            return self.schedule(*args) if self.calls % 2 else super().schedule(*args)

    plain = decisions("tight_kv", 1)
    assert first_difference(plain, decisions("tight_kv", 1, lambda _: traced_class(AsksItself))) is None
    [trace] = read_run(recording).traces
    assert trace.steps["step"].to_list() == list(range(num_steps(plain)))
    assert set(trace.exits().collect()["via"]) == {"source"}
    assert trace.notices == []


@pytest.mark.parametrize("proven", [True, False])
def test_a_call_that_raises_is_missing_and_nothing_else(proven, recording):
    class Stumbles(Scheduler if proven else Decorated):
        calls = 0

        def schedule(self, *args):
            self.calls += 1
            if self.calls == 2:
                msg = "not now"
                raise ValueError(msg)
            return super().schedule(*args)

    engine = Engine(lambda _: traced_class(Stumbles))
    engine.add("one")
    engine.step()
    engine.add("two")
    with pytest.raises(ValueError, match="not now"):
        engine.step()
    assert "allocate_slots" not in vars(engine.scheduler.kv_cache_manager)
    engine.add("three")
    engine.finish()
    [trace] = read_run(recording).traces
    assert trace.steps["step"].to_list()[:3] == [0, 2, 3]
    assert trace.problems.missing_steps == 1
    assert trace.notices[-1] == "step 1 is missing: ValueError('not now')"
    assert trace.arrivals["request_id"].to_list() == ["one", "two", "three"]
    assert trace.finishes.height == 3
