"""Hooks outside the scheduler: what they note, and that they call the original where nobody records."""

import os
from dataclasses import dataclass
from queue import Queue
from types import SimpleNamespace
from unittest.mock import Mock, call

import msgspec
import pytest

from schedtrace.model.trace_facts import Grammar
from schedtrace.record import engine_hooks, front_end_hooks, traced
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
    RECORDERS.store(core.scheduler, recorder)

    def detached_meanwhile(_, request):
        recorder.active = False
        return request

    engine_hooks._prepare(detached_meanwhile, core, SimpleNamespace(request_id="r"))
    assert "put_nowait" not in vars(core.aborts_queue)


def test_an_abort_is_noted_by_the_recording_that_goes_on_when_it_comes():
    core = SimpleNamespace(scheduler=SimpleNamespace(), aborts_queue=Queue())
    first, second = Inputs(lambda ns: ns), Inputs(lambda ns: ns)
    for inputs in (first, second):
        RECORDERS.store(core.scheduler, recorder_of(inputs))
        engine_hooks._prepare(lambda _, request: request, core, SimpleNamespace(request_id="r"))
    core.aborts_queue.put_nowait(["r"])
    RECORDERS.drop(core.scheduler)
    core.aborts_queue.put_nowait(["unseen"])
    assert (list(first._aborts), list(second._aborts)) == ([], ["r"])
    assert [core.aborts_queue.get_nowait() for _ in range(2)] == [["r"], ["unseen"]]


@pytest.mark.parametrize(
    ("kind", "args", "options", "detail"),
    [
        ("collective_rpc", ("reload_weights",), {}, "reload_weights"),
        ("collective_rpc", (), {"method": "reload_weights"}, "reload_weights"),
        ("collective_rpc", (print,), {}, None),
        ("sleep", ("1",), {}, None),
    ],
)
def test_an_operators_call_is_noted_with_the_name_of_an_rpc(kind, args, options, detail, monkeypatch):
    noted = []
    recorder = SimpleNamespace(control=lambda *_, failed, detail: noted.append((failed, detail)))
    monkeypatch.setattr(engine_hooks, "_recorder", lambda _: recorder)
    around, engine = engine_hooks._CONTROLS[kind], SimpleNamespace(scheduler=None)
    assert around(lambda *_, **__: "done", engine, *args, **options) == "done"
    assert noted == [(False, detail)]


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
    assert noted.compiled
    assert noted.grammars() == [
        Grammar("a", submitted_us=2, started_us=3, compiled_us=9),
        Grammar("b", submitted_us=None, started_us=4, compiled_us=9, failed=True),
    ]
    assert noted.grammars() == []


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


@dataclass
class Arguments:
    max_num_seqs: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None


CONFIG = SimpleNamespace(cache_config=SimpleNamespace(block_size=["a secret"]), model_config=None)


def test_a_vllm_without_defaults_by_context_and_a_value_that_is_put_together(monkeypatch, tmp_path):
    monkeypatch.setattr(front_end_hooks, "claim_run_dir", lambda: tmp_path / "run")
    context = SimpleNamespace(value="LLM_CLASS")
    assert front_end_hooks._configure(lambda *_: CONFIG, Arguments(max_num_seqs=4), context) is CONFIG
    line = msgspec.json.decode((tmp_path / "run" / f"front-end-{os.getpid()}.jsonl").read_bytes())
    assert (line["usage_context"], line["given"]) == ("LLM_CLASS", {"max_num_seqs": 4})
    assert line["derived"] == {"block_size": "(given)", "max_model_len": None}
    assert "context_defaults" not in line


KEYWORDS = {"delay": True}
HOOKS = {
    "_preempt_request": [call.request_preempted, call.request_was_preempted],
    "_free_request": [call.request_freed, call.request_was_freed],
    "_update_from_kv_xfer_finished": [call.kv_loads_ended],
    "add_request": [call.request_arrives],
    "shutdown": [call.close],
}


def answers(name):
    return lambda _, *given, **keywords: (name, given, keywords)


Scheduler = type("Scheduler", (), {name: answers(name) for name in HOOKS})
"""Its methods answer with their name and what they were given."""


def made(monkeypatch, recorder):
    monkeypatch.setattr(traced, "open_recorder", lambda scheduler: RECORDERS.store(scheduler, recorder))
    return traced.traced_class(Scheduler)()


@pytest.mark.parametrize("name", HOOKS)
def test_a_call_is_handed_on_where_nothing_is_recorded(monkeypatch, name):
    assert getattr(made(monkeypatch, None), name)("a", 1, **KEYWORDS) == (name, ("a", 1), KEYWORDS)


@pytest.mark.parametrize(("name", "notes"), HOOKS.items())
def test_a_call_is_noted_and_handed_on(monkeypatch, name, notes):
    recorder = Mock()
    scheduler = made(monkeypatch, recorder)
    given = {"_free_request": ("a",), "shutdown": ()}.get(name, (scheduler, "a"))
    after = {"_free_request": (scheduler, "a")}.get(name, ())
    expected = [note(*given) for note in notes[:1]] + [note(*after) for note in notes[1:]]
    assert getattr(scheduler, name)("a", 1, **KEYWORDS) == (name, ("a", 1), KEYWORDS)
    assert recorder.mock_calls == expected


def test_a_scheduler_without_these_methods_gets_none():
    bare = traced.traced_class(type("Bare", (), {}))
    assert not any(hasattr(bare, name) for name in list(HOOKS)[:3])
