"""Whatever breaks in the recorder: the scheduler decides as the plain one, and one warning says so."""

import sys
from functools import partial
from pkgutil import resolve_name

import pytest

pytest.importorskip("vllm")

from schedtrace.read.run import read_run
from schedtrace.record import traced
from schedtrace.record.marks.marking import Instrumented
from schedtrace.record.recorder import Recorder
from schedtrace.record.traced import traced_class, traced_scheduler
from schedtrace.simulate import Driver as Engine
from tests.contract.deciding import LOAD, Deciding, decisions, failing_from, first_difference, num_steps
from tests.contract.loads import under_load

pytestmark = pytest.mark.vllm


ON_THE_ENGINES_THREAD = {
    "Queues.count_waiting": "before schedule()",
    "Writer.take_events": "before schedule()",
    "Capture": "before schedule()",
    "ended_loops": "after schedule()",
    "Queues.num_not_ready": "after schedule()",
    "SteadySteps.changed_rows": "after schedule()",
    "Writer.put_step": "after schedule()",
    "Preemption": "in _preempt_request()",
    "Result": "in update_from_output()",
    "tokens_got": "in update_from_output()",
    "Arrival": "in add_request()",
    "Finish": "in _free_request()",
}


@pytest.mark.parametrize(("broken", "where"), ON_THE_ENGINES_THREAD.items())
def test_an_error_while_noting_stops_the_recording_only(
    broken, where, plain, recording, warnings, monkeypatch
):
    name = f"schedtrace.record.recorder.{broken}"
    monkeypatch.setattr(name, failing_from(10, resolve_name(name), RuntimeError("broken")))
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    message = f"recording stopped {where}: RuntimeError('broken')"
    assert warnings == [f"schedtrace: {message}"]
    [trace] = read_run(recording).traces
    assert trace.notices == [message]
    assert 0 < trace.steps.height < num_steps(plain)


def test_an_error_after_a_preemption_stops_the_recording_only(plain, recording, warnings, monkeypatch):
    begin, broken = Recorder.__init__, RuntimeError("broken")

    def begin_so(self, *args, **options):
        begin(self, *args, **options)
        free_blocks = self._free_blocks

        def failing_there():
            if sys._getframe(1).f_code.co_name == "request_was_preempted":
                raise broken
            return free_blocks()

        self._free_blocks = failing_there

    monkeypatch.setattr(Recorder, "__init__", begin_so)
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    message = "recording stopped after _preempt_request(): RuntimeError('broken')"
    assert warnings == [f"schedtrace: {message}"]
    assert read_run(recording).traces[0].notices == [message]


@pytest.mark.parametrize("broken", ["begin", "infer_exits", "release"])
def test_an_error_in_inference_stops_the_recording_only(broken, plain, recording, warnings, monkeypatch):
    monkeypatch.setattr(traced, "instrument", lambda _: Instrumented((), ("nothing is proven",)))
    name = f"schedtrace.record.recorder.InferredExits.{broken}"
    monkeypatch.setattr(name, failing_from(10, resolve_name(name), RuntimeError("broken")))
    assert first_difference(plain, decisions(*LOAD, traced_class.__wrapped__)) is None
    [warning] = warnings
    assert warning.startswith("schedtrace: recording stopped ")
    assert read_run(recording).traces[0].notices[-1:] == [warning.removeprefix("schedtrace: ")]


FIRST_LINES = [
    "traced.make_header",
    "traced.Writer",
    "recorder.InferredExits",
    "traced.from_environment",
]


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("broken", FIRST_LINES)
def test_an_error_before_the_first_step_means_no_recording(broken, plain, warnings, monkeypatch):
    name = f"schedtrace.record.{broken}"
    monkeypatch.setattr(name, failing_from(0, None, RuntimeError("broken")))
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    assert warnings == ["schedtrace: not recording: RuntimeError('broken')"]


def test_a_class_that_cannot_be_traced_runs_as_it_is(plain, recording, warnings, monkeypatch):
    monkeypatch.setattr(traced, "traced_class", failing_from(0, None, RuntimeError("broken")))
    assert first_difference(plain, decisions(*LOAD, lambda _: traced_scheduler)) is None
    [warning] = warnings
    assert warning.endswith(" could not be wrapped: RuntimeError('broken')")
    assert not recording.exists()


def test_a_request_without_an_attribute_stops_the_recording_only(plain, recording, warnings):
    class WithoutArrivalTime(Deciding):
        def make_request(self, request_id, *args, **options):
            request = super().make_request(request_id, *args, **options)
            del request.arrival_time
            return request

    engine = under_load(partial(WithoutArrivalTime, traced_class), *LOAD)
    assert first_difference(plain, engine.decisions) is None
    [warning] = warnings
    assert warning.startswith("schedtrace: recording stopped in add_request(): AttributeError(")
    [trace] = read_run(recording).traces
    assert [f"schedtrace: {notice}" for notice in trace.notices] == warnings


def test_without_a_block_pool_all_but_the_blocks_is_recorded(plain, recording, warnings):
    class Hidden:
        """A cache manager of one's own, that keeps its blocks where only this test finds them."""

        def __init__(self, manager):
            self.manager = manager

        def __getattr__(self, name):
            if name == "block_pool" and sys._getframe(1).f_globals["__name__"].startswith("schedtrace."):
                raise AttributeError(name)
            return getattr(self.manager, name)

    def wrap(base):
        class WithoutBlockPool(base):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.kv_cache_manager = Hidden(self.kv_cache_manager)

        return traced_class(WithoutBlockPool)

    assert first_difference(plain, decisions(*LOAD, wrap)) is None
    [trace] = read_run(recording).traces
    assert trace.steps.height == trace.end.steps == num_steps(plain)
    columns = ["kv_blocks_total", "kv_blocks_free_before", "kv_blocks_free_after"]
    assert trace.steps.select(columns).null_count().row(0) == (trace.steps.height,) * 3
    assert trace.header.kv_blocks_total is None
    assert warnings == []


@pytest.mark.usefixtures("recording")
def test_an_error_of_the_scheduler_itself_is_passed_on_untouched():
    error = ValueError("not ours")

    def wrap(base):
        class Raising(base):
            def schedule(self, *_):
                raise error

        return traced_class(Raising)

    with pytest.raises(ValueError, match="not ours") as raised:
        Engine(wrap).schedule()
    assert raised.value is error
