"""Subclasses with a ``schedule()`` of their own: it runs as written, and no exit is silently missing."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.scheduler import Scheduler

from schedtrace.read.run import read_run
from schedtrace.record.marks.exits import places
from schedtrace.record.plugin import register
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver as Engine
from schedtrace.simulate.driver import engine_config
from tests.contract import subclasses
from tests.contract.deciding import decisions, first_difference
from tests.contract.subclasses import PAST_THE_MARKS, CallsByName, exits_of, one_seat_for_two

pytestmark = pytest.mark.vllm

FROM = f"exits cannot be recorded from {subclasses.__name__}."
SUBCLASSES = [
    (subclasses.CallsSuper, "source", "source", []),
    (
        subclasses.CallsByName,
        "inferred",
        "inferred",
        [FROM + "CallsByName.schedule: it stops nowhere, and does not go on with super().schedule()"],
    ),
    (
        subclasses.Decorated,
        "inferred",
        "inferred",
        [FROM + "Decorated.schedule: it is decorated", PAST_THE_MARKS],
    ),
    (
        subclasses.DecoratedAboveSuper,
        "inferred",
        "source",
        [FROM + "DecoratedAboveSuper.schedule: it is decorated"],
    ),
    (
        subclasses.NoFunction,
        "inferred",
        "inferred",
        [FROM + "NoFunction.schedule: it is a partialmethod, not a plain function", PAST_THE_MARKS],
    ),
    (subclasses.RefusesMarks, "inferred", "inferred", [FROM + "RefusesMarks: TypeError('no marks')"]),
]


@pytest.mark.parametrize(("base", "header", "via", "notices"), SUBCLASSES)
def test_exits_are_told_or_inferred_and_what_is_inferred_is_said(
    base, header, via, notices, recording, warnings
):
    trace = one_seat_for_two(lambda _: traced_class(base), recording)
    assert exits_of(trace) == [("max_num_seqs", "two", 246, via)]
    assert (trace.header.exits_via, trace.notices) == (header, notices)
    assert warnings == []


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("base", [row[0] for row in SUBCLASSES])
def test_a_subclass_decides_traced_as_it_does_untraced(base):
    untraced = decisions("tight_kv", 1, lambda _: base)
    assert first_difference(untraced, decisions("tight_kv", 1, lambda _: traced_class(base))) is None


ALL = object()
PLACES = [
    (subclasses.CallsSuper, ALL),
    (subclasses.CallsSuperInAHelper, ALL),
    (subclasses.CallsSuperByGetattr, ALL),
    (subclasses.DecoratedAboveSuper, ALL),
    (subclasses.CallsByName, 0),
    (subclasses.NeverCallsTheBase, 2),
]


@pytest.mark.parametrize(("base", "count"), PLACES)
def test_places_of_a_base_count_only_where_a_call_can_come_to_them(base, count, recording):
    every = places(traced_class(Scheduler)._schedtrace_instrumented.sites)
    Engine(lambda _: traced_class(base)).scheduler.shutdown()
    header = read_run(recording).traces[0].header
    assert header.exit_sites == (every if count is ALL else count) < every + 1
    assert every > 20


def test_a_class_that_may_not_have_subclasses_is_used_as_it_is(recording, warnings):
    class Final(Scheduler):
        def __init_subclass__(cls):
            msg = "final"
            raise TypeError(msg)

    register()
    assert engine_config(scheduler_cls=Final).scheduler_config.get_scheduler_cls() is Final
    assert warnings == [f"schedtrace: not recording, {Final} could not be wrapped: TypeError('final')"]
    assert not list(recording.glob("engine-*"))


def test_once_a_call_went_past_the_marks_allocations_are_watched(recording):
    engine = Engine(lambda _: traced_class(CallsByName), num_blocks=10)
    engine.add("fits", prompt=100)
    engine.step()
    engine.add("does_not", prompt=100)
    engine.step()
    engine.scheduler.shutdown()
    assert exits_of(read_run(recording).traces[0]) == [
        ("queue_empty", None, 156, "inferred"),
        ("kv_blocks", "does_not", 255, "inferred"),
    ]


def test_what_marks_have_told_of_the_running_is_not_inferred_again(recording):
    class TakesTurns(Scheduler):
        """Only the first one runs on; the others sit out and come back."""

        def schedule(self, *args):
            num_scheduled_tokens, kept, sitting = {}, [], []
            for request in self.running:
                if kept:
                    sitting.append(request)
                    continue
                kept.append(request)
                num_scheduled_tokens[request.request_id] = 1
            self.running[:] = kept
            output = Scheduler.schedule(self, *args)
            self.running += sitting
            return output

    engine = Engine(lambda _: traced_class(TakesTurns))
    engine.add("one")
    engine.add("two")
    engine.step()
    engine.step()
    engine.scheduler.shutdown()
    exits = read_run(recording).traces[0].exits().collect().filter(step=1)
    assert exits.select("loop", "kind", "request_id", "guard", "via").rows() == [
        (
            "running",
            "continue",
            "two",
            "kept, where num_scheduled_tokens, kept, sitting = ({}, [], [])",
            "source",
        ),
        ("waiting", "condition", None, None, "inferred"),
    ]
