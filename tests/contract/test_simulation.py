"""A driver in virtual time: exact times on small loads, written as a trace and read back."""

import time
from functools import partial
from types import SimpleNamespace as Some

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched import scheduler as vllms

from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver, Simulation, VirtualClock
from schedtrace.simulate.executor import ModelRunner
from schedtrace.step_times.constants import Constants, HostTimes

pytestmark = pytest.mark.vllm


def times(schedule_us=0, gap_us=0, update_us=0):
    """1 ms a step, 10 us a prompt token, 50 us an output token, 1 us a token of context."""
    return Constants(1000, 10, 50, 1, HostTimes(schedule_us, 0, update_us, 0, gap_us, 0))


@pytest.fixture
def engine():
    """``engine(max_num_seqs=2, ...)`` in virtual time, on a machine of ``times()``."""
    with VirtualClock() as clock:
        yield partial(Simulation, clock, times=times())


@pytest.fixture
def steps_of(recording, engine):
    """The steps of a load's trace: when each began, how long ``schedule()`` took, when its output came."""

    def play(*load, **options):
        made = engine(traced_class, **options)
        for arrival in load:
            if callable(arrival):
                arrival(made)
            else:
                made.arrive(*arrival)
        made.finish()
        [trace] = read_run(recording).traces
        assert trace.header.clock == "virtual"
        return trace, trace.steps.select("start_us", "schedule_us", "output_us").rows()

    return play


def test_one_batch_at_a_time(steps_of):
    """60 tokens of prefill take 1.6 ms, then one decode over 60 and over 61 tokens of context."""
    _, steps = steps_of((0, "a", 60, 3), times=times(200, 100))
    assert steps == [
        (0, 200, 1800),
        (1900, 200, 2100 + 1110),
        (3310, 200, 3510 + 1111),
        (4721, 200, 4921),
    ]


def test_with_two_batches_in_flight_the_device_takes_one_after_the_other(steps_of):
    _, steps = steps_of((0, "a", 60, 3), times=times(200, 100), async_scheduling=True)
    assert steps[:3] == [(0, 200, 1800), (200, 200, 1800 + 1110), (1900, 200, 2910 + 1111)]


def test_with_a_pipeline_each_stage_takes_its_part_and_the_next_batch_follows(steps_of):
    """Two stages: 0.8 ms each for the first batch, 0.55 ms each for the second."""
    load = (0, "a", 60, 1), (100, "b", 10, 1)
    _, steps = steps_of(*load, times=times(100), pipeline_parallel_size=2)
    assert steps[:2] == [(0, 100, 1700), (100, 100, 1700 + 550)]


def test_who_arrives_during_a_step_is_let_in_after_it(steps_of):
    def load(engine):
        engine.arrive(0, "a", 60, 2)
        engine.arrive(700, "b", 10, 1, front_end_us=900)

    trace, _ = steps_of(load)
    [_, late] = trace.arrivals.select("arrived_us", "received_us", "input_queue_us", "queued_us").rows()
    assert late == (-200, 700, 700, 1600)


def test_an_idle_engine_waits_for_the_next_arrival(steps_of):
    _, steps = steps_of((9000, "b", 10, 1), (0, "a", 10, 1))
    assert [began for began, _, _ in steps] == [0, 1100, 9000, 10_100]


def test_an_idle_engine_stops_at_a_time_before_the_next_arrival(engine):
    made = engine()
    made.arrive(9000, "a", 10, 1)
    made.run(until_us=5000)
    assert (made.clock.now_us, made.steps) == (5000, 0)
    made.run()
    assert made.clock.now_us == 9000 + 1100


def test_a_prompt_that_fills_max_model_len_is_refused_as_by_the_front_end(engine):
    made = engine(max_model_len=64)
    made.arrive(0, "refused", 64, 4)
    made.arrive(0, "fits", 63, 1)
    made.run()
    assert made.requests.keys() == {"fits"}


def test_the_same_load_makes_the_same_trace(tmp_path, monkeypatch):
    """But for the salt of its hashes."""
    monkeypatch.setattr("schedtrace.record.written_ids.os.urandom", bytes)

    def recorded(name):
        monkeypatch.setenv("SCHEDTRACE_RUN_DIR", str(tmp_path / name))
        with VirtualClock() as clock:
            made = Simulation(clock, traced_class, num_blocks=40, async_scheduling=True)
            for number in range(40):
                made.arrive(700 * number, f"r{number}", 10 + number, 30)
            made.finish()
        return (tmp_path / name / "engine-0.jsonl").read_text().splitlines()[1:]

    assert recorded("one") == recorded("other")


def test_a_closed_loops_client_sends_its_next_request_when_one_is_done(steps_of):
    def load(engine):
        engine.finished = lambda done: engine.arrive(5000, "b", 10, 1) if done == "a" else None
        engine.arrive(0, "a", 10, 1)

    trace, _ = steps_of(load)
    assert trace.arrivals.select("request_id", "queued_us").rows() == [("a", 0), ("b", 5000)]


def test_a_step_without_tokens_takes_what_the_engine_sleeps(engine):
    never = engine(num_blocks=4)
    never.arrive(0, "never", 100, 4)
    never.run(until_us=5000)
    assert never.clock.now_us == 5000
    assert never.scheduler.requests.keys() == {"never"}


def test_actions_happen_at_their_time(engine):
    made = engine()
    made.arrive(0, "a", 10, 200)
    made.at(3000, lambda: made.abort("a"))
    made.run()
    assert made.clock.now_us == 1100 + 1060 + 1061


def test_a_load_without_an_end_is_an_error(engine):
    never = engine(num_blocks=4)
    never.arrive(0, "never", 100, 4)
    with pytest.raises(RuntimeError, match="1 requests cannot go on: 2001 steps without a token"):
        never.run()


def test_it_decides_what_a_driver_decides(engine):
    """The same requests at once: the same tokens in every step."""

    def of(made, run):
        steps = []
        scheduled = made.scheduler.schedule

        def schedule(*args):
            output = scheduled(*args)
            steps.append(dict(output.num_scheduled_tokens))
            return output

        made.scheduler.schedule = schedule
        run(made)
        return [step for step in steps if step]

    def at_once(made):
        for number in range(12):
            made.add(f"r{number}", 10 * number + 5, 30)
        made.finish()

    options = {"num_blocks": 30, "async_scheduling": True}
    assert of(Driver(**options), at_once) == of(engine(**options), at_once)


def output(tokens, *, new=(), cached=()):
    """A ``SchedulerOutput`` with what a model runner reads; new ones have prompts of 4 tokens."""
    news = [
        Some(req_id=name, prompt_token_ids=[7] * 4, sampling_params=None, num_computed_tokens=0)
        for name in new
    ]
    before = Some(req_ids=list(cached), num_computed_tokens=[4] * len(cached), num_output_tokens=[])
    return Some(
        num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()), finished_req_ids=(),
        scheduled_spec_decode_tokens={}, scheduled_new_reqs=news, scheduled_cached_reqs=before,
    )  # fmt: skip


def test_who_was_preempted_after_tokens_were_given_is_answered_as_a_worker_does():
    """vLLM 0.10.2 and 0.11.0 leave those tokens in the output: of a decode one comes back, else none."""
    runner = ModelRunner()
    runner.execute(output({"a": 4, "b": 4, "c": 2}, new="abc"))
    batch, sampled = runner.execute(output({"a": 1, "b": 1, "c": 1}, cached="a"))
    assert (batch.decode_requests, batch.decode_context_tokens, batch.prefill_tokens) == (2, 8, 1)
    assert {name: len(tokens) for name, tokens in sampled.items()} == {"a": 1, "b": 1, "c": 0}


def test_only_vllm_and_the_recorder_read_the_virtual_clock():
    with VirtualClock() as clock:
        clock.advance(1500)
        assert vllms.time.monotonic() == 0.0015
        assert (vllms.time.time_ns(), vllms.time.strftime) == (1_500_000, time.strftime)
        vllms.time.sleep(0.001)
        assert clock.now_us == 2500
        assert time.monotonic_ns() > 1_500_000
    assert vllms.time is time


def test_time_does_not_go_back():
    clock = VirtualClock()
    clock.until(500)
    clock.until(300)
    with clock.at(100):
        assert clock.monotonic_ns() == 100_000
    assert clock.now_us == 500


def test_an_engines_trace_has_the_machines_clock(recording):
    driver = Driver(traced_class)
    driver.add("a")
    driver.finish()
    assert read_run(recording).traces[0].header.clock == "monotonic"
