"""When a worker executed a batch, noted by vLLM's own wrapper of workers, here around one that sleeps."""

import pickle
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerWrapperBase

from schedtrace.record import worker_hooks
from schedtrace.record.plugin import register
from schedtrace.record.worker_hooks import EXECUTION
from tests.contract.facts.told import Traced, steps

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("recording")]

HELD_S = 0.03


def sleeping(**methods):
    """vLLM's wrapper around a worker."""
    register()
    wrapper = object.__new__(WorkerWrapperBase)
    vars(wrapper).update(worker=SimpleNamespace(**methods), mm_receiver_cache=None)
    return wrapper


def after(output):
    def method(*_):
        time.sleep(HELD_S)
        return output

    return method


def sampled():
    return ModelRunnerOutput(["r"], {"r": 0}, [[7]])


def timed(call):
    began = time.monotonic_ns()
    output = call()
    return output, began, time.monotonic_ns()


def test_one_call(recording):
    worker = sleeping(execute_model=after(sampled()))
    output, began, ended = timed(lambda: worker.execute_model(None))
    machine, first, last = vars(output)[EXECUTION]
    assert began <= first <= last - 1e9 * HELD_S < last <= ended
    assert machine == worker_hooks.machine() != ""
    assert recording.name == "run"


def test_the_wrapped_output_crosses_processes_with_it():
    worker = sleeping(execute_model=after(sampled()))
    output = worker.execute_model(None)
    arrived = pickle.loads(pickle.dumps(output))  # noqa: S301  # our own
    assert worker_hooks.execution_of(arrived) == vars(output)[EXECUTION]
    assert arrived == sampled()


def test_execution_and_sampling_are_one_batch():
    worker = sleeping(execute_model=after(None), sample_tokens=after(sampled()))
    (_, began, _), (output, _, ended) = (
        timed(lambda: worker.execute_model(None)),
        timed(lambda: worker.sample_tokens(None)),
    )
    _, first, last = vars(output)[EXECUTION]
    assert began <= first <= last - 2e9 * HELD_S < last <= ended


def test_an_output_that_is_ready_later_ends_then():
    class Later(AsyncModelRunnerOutput):
        def get_output(self):
            time.sleep(HELD_S)
            return sampled()

    worker = sleeping(execute_model=after(Later()))
    later = worker.execute_model(None)
    time.sleep(HELD_S)
    output, _, ended = timed(later.get_output)
    _, first, last = vars(output)[EXECUTION]
    assert first <= last - 3e9 * HELD_S
    assert last <= ended


def test_what_many_steps_share_is_left_alone():
    worker = sleeping(execute_model=after(EMPTY_MODEL_RUNNER_OUTPUT))
    assert worker.execute_model(None) is EMPTY_MODEL_RUNNER_OUTPUT
    assert EXECUTION not in vars(EMPTY_MODEL_RUNNER_OUTPUT)


def test_what_the_worker_raises_is_raised():
    def broken(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sleeping(execute_model=broken).execute_model(None)


def played(engine, noted):
    """One step whose output carries ``noted``; (start, end, output back) of the step in nanoseconds."""
    engine.add("r", max_tokens=1)
    clock = time.monotonic_ns
    began = clock()
    output = engine.scheduler.schedule()
    result = sampled()
    if noted is not None:
        setattr(result, EXECUTION, noted(began))
    engine.scheduler.update_from_output(output, result)
    engine.scheduler.shutdown()


@pytest.mark.parametrize("lines", ["full", "delta"])
def test_the_step_says_when(recording, monkeypatch, lines):
    monkeypatch.setenv("SCHEDTRACE_LINES", lines)
    played(Traced(), lambda began: (worker_hooks.machine(), began + 5_000_000, began + 9_000_000))
    [step] = steps(recording)
    assert step["execute_us"] == 4000
    assert 4000 < step["execute_after_us"] <= 5000


@pytest.mark.parametrize("noted", [None, lambda began: ("another machine", began, began)])
def test_where_nobody_told_or_the_clock_is_another_nothing_is_said(recording, noted):
    played(Traced(), noted)
    [step] = steps(recording)
    assert (step["execute_after_us"], step["execute_us"]) == (None, None)


def test_in_deltas_too(recording):
    engine = Traced()
    engine.add("r", max_tokens=5)
    for _ in range(5):
        output = engine.scheduler.schedule()
        result = sampled()
        now = time.monotonic_ns()
        setattr(result, EXECUTION, (worker_hooks.machine(), now, now + 1_000_000))
        engine.scheduler.update_from_output(output, result)
    engine.scheduler.shutdown()
    assert [step["execute_us"] for step in steps(recording)] == [1000] * 5
