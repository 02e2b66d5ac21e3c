"""What the hooks on vLLM's engine note: requests prepared and aborted, grammars, dummy batches, lock-step."""

import queue
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config import ParallelConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
from vllm.v1.structured_output import StructuredOutputManager

from schedtrace.record.engine_hooks import MOST_KEPT
from schedtrace.record.plugin import register
from tests.contract.causes.models import sees_images
from tests.contract.facts.told import Traced, events, steps

pytestmark = pytest.mark.vllm

HELD_S = 0.05


@pytest.fixture
def engine(recording):  # noqa: ARG001  # recording must be on before vLLM is hooked into
    register()
    return Traced()


def now_us(engine):
    return engine.scheduler._schedtrace_recorder.writer.clock.since_anchor(time.monotonic_ns())


def core_of(engine, **more):
    """An ``EngineCore`` as far as its methods look at it."""
    core = object.__new__(EngineCore)
    vars(core).update(scheduler=engine.scheduler, mm_receiver_cache=None, request_block_hasher=None, **more)
    return core


def sent(engine, request_id, **more):
    """What a client sends: ``EngineCoreRequest``, of which the engine makes a ``Request``."""
    made = engine.make_request(request_id)
    engine.requests[request_id] = made
    return SimpleNamespace(request_id=request_id, current_wave=0, made=made, **more)


@pytest.fixture
def slow_preparation(monkeypatch):
    """When each began, by the monotonic clock."""
    began_ns = []

    def from_engine_core_request(request, _):
        began_ns.append(time.monotonic_ns())
        time.sleep(HELD_S)
        return request.made

    stand_in = SimpleNamespace(from_engine_core_request=from_engine_core_request)
    monkeypatch.setattr("vllm.v1.engine.core.Request", stand_in)
    return began_ns


def test_received_prepared_and_drained(engine, recording, slow_preparation):
    """On the input thread, as in an engine; the scheduler's thread takes it from the queue later."""
    core = core_of(engine, aborts_queue=queue.Queue())
    inputs: queue.Queue = queue.Queue()
    received = []

    def input_thread():
        received.append(now_us(engine))
        inputs.put(core.preprocess_add_request(sent(engine, "r", data_parallel_rank=3)))
        received.append(now_us(engine))

    thread = threading.Thread(target=input_thread)
    thread.start()
    thread.join()
    time.sleep(HELD_S)
    request, _ = inputs.get(timeout=5)
    engine.scheduler.add_request(request)
    engine.finish()
    [told] = events(recording, "arrived")
    [began_ns] = slow_preparation
    writer = engine.scheduler._schedtrace_recorder.writer
    assert received[0] <= told["received_us"] <= writer.clock.since_anchor(began_ns)
    assert told["received_us"] + 1e6 * HELD_S <= told["input_queue_us"] <= received[1]
    assert told["queued_us"] >= told["input_queue_us"] + 1e6 * HELD_S
    assert told["pinned_rank"] == 3


@pytest.mark.usefixtures("slow_preparation")
def test_an_abort_is_noted_when_the_input_thread_gets_it(engine, recording):
    core = core_of(engine, aborts_queue=queue.Queue())
    for request_id in ("goes", "stays"):
        request, _ = core.preprocess_add_request(sent(engine, request_id))
        engine.scheduler.add_request(request)
    engine.step()
    before = now_us(engine)
    core.aborts_queue.put_nowait(["goes"])
    after = now_us(engine)
    time.sleep(HELD_S)
    core._process_aborts_queue()
    engine.finish()
    told = {entry["request_id"]: entry for entry in events(recording, "finished")}
    assert before <= told["goes"]["abort_us"] <= after
    assert told["goes"]["finished_us"] >= after + 1e6 * HELD_S
    assert "abort_us" not in told["stays"]


def test_without_such_a_queue_an_abort_is_noted_when_the_engine_acts(engine, recording):
    engine.add("goes", max_tokens=9)
    engine.step()
    before = now_us(engine)
    core_of(engine).abort_requests(["goes", "unknown"])
    engine.finish()
    [told] = events(recording, "finished")
    assert before <= told["abort_us"] <= told["finished_us"]


def test_requests_that_never_arrive_are_forgotten(engine):
    inputs = engine.scheduler._schedtrace_recorder.facts.inputs
    for number in range(MOST_KEPT + 5):
        inputs.note_prepared(SimpleNamespace(request_id=str(number)), 0)
        inputs.abort_received([f"a{number}"])
    assert (len(inputs._received), len(inputs._aborts)) == (5, 5)
    engine.finish()


@pytest.mark.parametrize("fails", [False, True])
def test_a_grammar_is_submitted_started_and_compiled(recording, fails):
    """By vLLM's own pool of threads, kept busy so that the request has to wait for one."""
    register()
    engine = Traced(**sees_images())
    manager: StructuredOutputManager = engine.scheduler.structured_output_manager
    times = {}

    def compile_grammar(*_args, **_options):
        times["began"] = now_us(engine)
        time.sleep(HELD_S)
        times["ended"] = now_us(engine)
        if fails:
            raise ValueError
        return SimpleNamespace()

    manager.backend = SimpleNamespace(compile_grammar=compile_grammar)
    free = threading.Event()
    for _ in range(manager.executor._max_workers):
        manager.executor.submit(free.wait)
    request = engine.make_request("r", structured_outputs=StructuredOutputsParams(json="{}"))
    submitted = now_us(engine)
    manager.grammar_init(request)
    freed = now_us(engine)
    free.set()
    engine.add("other", max_tokens=30)
    manager.executor.shutdown()
    engine.finish()
    [told] = events(recording, "grammars")
    assert told["request_id"] == "r"
    assert submitted <= told["submitted_us"] <= freed <= told["started_us"]
    assert told["started_us"] <= times["began"] < times["ended"] <= told["compiled_us"]
    assert told.get("failed", False) is fails


def test_dummy_batches_and_how_long_they_took(engine, recording):
    executor = SimpleNamespace(execute_dummy_batch=lambda: time.sleep(HELD_S))
    core = core_of(engine, model_executor=executor)
    before = now_us(engine)
    for _ in range(3):
        core.execute_dummy_batch()
    took_us = now_us(engine) - before
    engine.step()
    engine.finish()
    [step] = steps(recording)
    assert step["dummy_batches"] == 3
    assert 3e6 * HELD_S <= step["dummy_us"] <= took_us
    ends = [one["began_us"] + one["took_us"] for one in step["dummies"]]
    begins = [one["began_us"] for one in step["dummies"]]
    assert all(end <= begin for end, begin in zip(ends, [*begins[1:], step["start_us"]], strict=True))
    assert all(one["took_us"] >= 1e6 * HELD_S for one in step["dummies"])


def test_ranks_in_lock_step_tell_wave_and_counter(engine, recording):
    core = core_of(engine, model_executor=SimpleNamespace(execute_dummy_batch=lambda: None))
    engine.add("r", max_tokens=4)
    engine.step()
    vars(core).update(current_wave=2, step_counter=7)
    core.execute_dummy_batch()
    engine.step()
    core.step_counter = 8
    engine.step()
    engine.finish()
    told = [(step["wave"], step["step_counter"]) for step in steps(recording)]
    assert told[:3] == [(None, None), (2, 7), (2, 8)]
    [dummy] = steps(recording)[1]["dummies"]
    assert (dummy["wave"], dummy["step_counter"]) == (2, 7)


@pytest.mark.skipif(not hasattr(ParallelConfig, "dp_sync_interval"), reason="vLLM 0.30 and newer")
def test_ranks_in_lock_step_tell_where_they_wait_for_each_other_and_where_a_wave_ends(
    engine, recording, monkeypatch
):
    core = core_of(engine, dp_group=None, pending_pause=False, dp_sync_interval=3)
    vars(core).update(current_wave=2, step_counter=0)
    go_on = iter([True, False])
    monkeypatch.setattr(ParallelConfig, "sync_dp_state", lambda *_, **__: (next(go_on), False))
    for _ in range(3):
        DPEngineCoreProc._has_global_unfinished_reqs(core, local_unfinished=True)
    engine.step()
    engine.finish()
    told = [
        (one["wave"], one["step_counter"], one.get("wave_ended", False))
        for one in steps(recording)[0]["syncs"]
    ]
    assert told == [(2, 0, False), (2, 2, True)]
