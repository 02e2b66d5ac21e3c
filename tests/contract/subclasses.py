"""Schedulers that override ``schedule()`` in ways of their own, and a scene that shows how a call ended."""

import functools
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from schedtrace.read.run import read_run
from schedtrace.simulate import Driver as Engine

PAST_THE_MARKS = "step 0 ended at no known place of schedule(): the exits of such steps are inferred"


def timed(method):
    @functools.wraps(method)
    def wrapper(self, *args):
        return method(self, *args)

    return wrapper


class CallsSuper(Scheduler):
    def schedule(self, *args):
        return super().schedule(*args)


class CallsSuperInAHelper(Scheduler):
    def schedule(self, *args):
        return self.helper(*args)

    def helper(self, *args):
        return super().schedule(*args)


class CallsSuperByGetattr(Scheduler):
    def schedule(self, *args):
        return getattr(super(), "schedule")(*args)  # noqa: B009  # what somebody could write


class NeverCallsTheBase(Scheduler):
    """Two places of its own: the loop's end and a ``continue``."""

    def schedule(self, *_):
        num_scheduled_tokens = {}
        for request in self.running:
            if request.is_finished():
                continue
            num_scheduled_tokens[request.request_id] = 1
        return num_scheduled_tokens

    def other(self):
        return super().add_request


class CallsByName(Scheduler):
    def schedule(self, *args):
        return Scheduler.schedule(self, *args)


class Decorated(Scheduler):
    schedule = timed(Scheduler.schedule)


class DecoratedAboveSuper(Scheduler):
    @timed
    def schedule(self, *args):
        return super().schedule(*args)


class NoFunction(Scheduler):
    schedule = functools.partialmethod(Scheduler.schedule, throttle_prefills=False)


class RefusesMarks(Scheduler):
    def __init_subclass__(cls):
        if any(base.__name__.startswith("Marked") for base in cls.__mro__):
            msg = "no marks"
            raise TypeError(msg)


def one_seat_for_two(wrap: Any, recording: Any) -> Any:
    """The trace of one step that leaves one of two requests without a seat."""
    engine = Engine(wrap, max_num_seqs=1)
    engine.add("one")
    engine.add("two")
    engine.step()
    engine.scheduler.shutdown()
    return read_run(recording).traces[0]


def exits_of(trace: Any) -> list[Any]:
    """Cause, request, budget left, and how it is known."""
    return trace.exits().collect().select("cause", "request_id", "budget_left", "via").rows()
