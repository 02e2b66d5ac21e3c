"""Whatever breaks in the recorder: the scheduler decides as the plain one, and one warning says so."""

from pkgutil import resolve_name

import pytest

pytest.importorskip("vllm")

from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver as Engine
from tests.contract.deciding import Deciding, decisions, failing_from, first_difference
from tests.contract.loads import FAMILIES, make_script, play

pytestmark = pytest.mark.vllm

LOAD = ("aborts", 1)


@pytest.fixture(scope="module")
def plain():
    return decisions(*LOAD)


ON_THE_ENGINES_THREAD = {
    "Capture": "before schedule()",
    "num_waiting": "before schedule()",
    "tells_how_admission_ended": "after schedule()",
    "num_not_ready": "after schedule()",
    "Writer.put": "after schedule()",
    "Preemption": "in _preempt_request()",
    "Result": "in update_from_output()",
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
    assert 0 < trace.steps.height < sum("tokens" in decision for decision in plain)


def test_a_request_without_an_attribute_stops_the_recording_only(plain, recording, warnings):
    class WithoutArrivalTime(Deciding):
        def make_request(self, request_id, *args, **options):
            request = super().make_request(request_id, *args, **options)
            del request.arrival_time
            return request

    family = FAMILIES[LOAD[0]]
    engine = play(WithoutArrivalTime(traced_class, **family.engine), make_script(family, LOAD[1]))
    assert first_difference(plain, engine.decisions) is None
    [warning] = warnings
    assert warning.startswith("schedtrace: recording stopped in add_request(): AttributeError(")
    [trace] = read_run(recording).traces
    assert [f"schedtrace: {notice}" for notice in trace.notices] == warnings


def test_without_a_block_pool_all_but_the_blocks_is_recorded(plain, recording, warnings):
    class Hidden:
        """A cache manager of one's own, that keeps its blocks somewhere else."""

        def __init__(self, manager):
            self.manager = manager

        def __getattr__(self, name):
            if name == "block_pool":
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
    assert trace.steps.height == trace.end.steps == sum("tokens" in decision for decision in plain)
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
