"""Hooks outside the scheduler: what they note, and that they call the original where nobody records."""

from queue import Queue
from types import SimpleNamespace

import pytest

from schedtrace.model.trace_facts import Grammar
from schedtrace.record import engine_hooks
from schedtrace.record.disguise import RECORDERS
from schedtrace.record.engine_hooks import MOST_KEPT, Inputs
from schedtrace.record.hooks import wrap


def outer(original, self, *args):
    return ("outer", original(self, *args))


def inner(original, self, *args):
    return ("inner", original(self, *args))


def test_each_function_goes_around_a_method_once():
    class Engine:
        def step(self, number):
            return number

    for around in (inner, outer, inner, outer):
        wrap(Engine, "step", around)
    assert Engine().step(7) == ("outer", ("inner", 7))


def test_a_method_that_is_not_there_stays_away():
    class Engine:
        pass

    wrap(Engine, "step", inner)
    assert not hasattr(Engine, "step")


@pytest.mark.parametrize("recorder", [None, SimpleNamespace(active=False)])
def test_a_request_is_prepared_where_nobody_records(monkeypatch, recorder):
    monkeypatch.setattr(engine_hooks, "_recorder", lambda _: recorder)
    assert engine_hooks._prepare(lambda engine, request: (engine, request), "engine", "r") == ("engine", "r")


def test_a_request_that_is_prepared_is_noted(monkeypatch):
    noted = []
    facts = SimpleNamespace(
        inputs=SimpleNamespace(note_prepared=lambda request, _: noted.append(request)), engine_is=noted.append
    )
    recorder = SimpleNamespace(active=True, facts=facts)
    monkeypatch.setattr(engine_hooks, "_recorder", lambda _: recorder)
    monkeypatch.setattr(engine_hooks, "_listen_to_aborts", noted.append)
    assert engine_hooks._prepare(lambda _, request: request, "engine", "r") == "r"
    assert noted == ["r", "engine", "engine"]


def recorder_of(inputs):
    return SimpleNamespace(active=True, facts=SimpleNamespace(inputs=inputs, engine_is=lambda _: None))


def test_a_recording_that_ends_while_a_request_is_prepared_leaves_the_queue_of_aborts_alone():
    core = SimpleNamespace(scheduler=SimpleNamespace(), aborts_queue=Queue())
    recorder = recorder_of(Inputs(lambda ns: ns // 1000))
    RECORDERS.put(core.scheduler, recorder)

    def detached_meanwhile(_, request):
        recorder.active = False
        return request

    engine_hooks._prepare(detached_meanwhile, core, SimpleNamespace(request_id="r"))
    assert "put_nowait" not in vars(core.aborts_queue)


def test_an_abort_is_noted_by_the_recording_that_goes_on_when_it_comes():
    core = SimpleNamespace(scheduler=SimpleNamespace(), aborts_queue=Queue())
    first, second = Inputs(lambda ns: ns), Inputs(lambda ns: ns)
    for inputs in (first, second):
        RECORDERS.put(core.scheduler, recorder_of(inputs))
        engine_hooks._prepare(lambda _, request: request, core, SimpleNamespace(request_id="r"))
    core.aborts_queue.put_nowait(["r"])
    RECORDERS.drop(core.scheduler)
    core.aborts_queue.put_nowait(["unseen"])
    assert (list(first._aborts), list(second._aborts)) == ([], ["r"])
    assert [core.aborts_queue.get_nowait() for _ in range(2)] == [["r"], ["unseen"]]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands; ``clock(7)`` sets it."""
    now = [0]
    monkeypatch.setattr(engine_hooks.time, "monotonic_ns", lambda: now[0])
    return lambda ns: now.__setitem__(0, ns)


@pytest.fixture
def noted():
    return Inputs(lambda ns: ns // 1000)


def test_grammars_are_taken_once(clock, noted):
    clock(2_000)
    noted.grammar_submitted(SimpleNamespace(request_id="a"))
    clock(9_000)
    noted.grammar_compiled(SimpleNamespace(request_id="a"), 3_000, failed=False)
    noted.grammar_compiled(SimpleNamespace(request_id="b"), 4_000, failed=True)
    assert noted.has_grammars is True
    assert noted.grammars() == [
        Grammar("a", submitted_us=2, started_us=3, compiled_us=9),
        Grammar("b", submitted_us=None, started_us=4, compiled_us=9, failed=True),
    ]
    assert (noted.grammars(), noted.has_grammars) == ([], False)


def test_of_grammars_that_nobody_takes_the_latest_are_kept(clock, noted):
    clock(0)
    for number in range(MOST_KEPT + 5):
        noted.grammar_compiled(SimpleNamespace(request_id=str(number)), 0, failed=False)
    kept = noted.grammars()
    assert (len(kept), kept[0].request_id) == (MOST_KEPT, "5")


def test_the_first_abort_counts_and_is_taken_once(clock, noted):
    clock(2_000)
    noted.abort_received(["a", "b"])
    clock(5_000)
    noted.abort_received("a")
    assert [noted.abort_us(name) for name in ("a", "b", "c", "a")] == [2, 2, None, None]


def test_a_received_request(clock, noted):
    clock(5_000)
    noted.note_prepared(SimpleNamespace(request_id="a", data_parallel_rank=1), 2_000)
    assert noted.input_times("a") == {"received_us": 2, "input_queue_us": 5, "pinned_rank": 1}
    assert noted.input_times("a") == {}
