"""Balance scheduling on vLLM's real scheduler: only admissions change, and every request ends."""

import random
from functools import partial
from itertools import cycle

import pytest

pytest.importorskip("vllm")

from vllm.config import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from schedtrace.balance import SCHEDULER_CLS, BalanceScheduler, balanced, closed
from schedtrace.read.run import read_run
from schedtrace.record import traced
from schedtrace.record.marks.marking import Instrumented
from schedtrace.record.plugin import register
from schedtrace.record.queues import max_running_requests
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from schedtrace.simulate.driver import engine_config, kv_cache_groups, scheduler_arguments
from tests.contract.deciding import Deciding, decisions, first_difference
from tests.contract.loads import FAMILIES, under_load

pytestmark = pytest.mark.vllm

SEATS = 4


def with_counts(counts):
    """Makes a balanced class that is told other counts before every step, its own put first."""

    def wrap(base):
        class Told(balanced(base)):
            def schedule(self, *args):
                if counts is not None:
                    self.observe_ranks([len(self.running), next(counts)])
                return super().schedule(*args)

        return Told

    return wrap


@pytest.mark.parametrize("name", ["few_seqs", "priority_tight", "async_aborts", "max_num_active_seqs"])
def test_without_counts_of_other_ranks_it_decides_as_vllm(name):
    assert first_difference(decisions(name, 1), decisions(name, 1, balanced)) is None


def test_with_the_gate_open_it_decides_as_vllm():
    """Twice the seats, so that no rank comes near them."""
    plain = under_load(Deciding, "async_tight", max_num_seqs=200)
    with_gate = partial(Deciding, with_counts(cycle([0, 50, 190])))
    gated = under_load(with_gate, "async_tight", max_num_seqs=200)
    assert first_difference(plain.decisions, gated.decisions) is None


def seats_of(name):
    """``SEATS`` where the family does not say how many."""
    return {"max_num_seqs": SEATS} | FAMILIES[name].engine


class Gated(Deciding):
    """An engine that checks in every step what the gate has let in."""

    refusals = 0

    def __init__(self, seed, **options):
        chance = random.Random(seed)  # noqa: S311  # counts, no secret
        most = max_running_requests(Driver(**options).scheduler)
        counts = (chance.randint(0, most) for _ in cycle([0]))
        super().__init__(with_counts(counts), **options)

    def schedule(self, *args):
        scheduler = self.scheduler
        own, free = len(scheduler.running), max_running_requests(scheduler)
        waited = sum(len(queue) for queue in queues(scheduler))
        output = super().schedule(*args)
        assert max_running_requests(scheduler) == free
        is_closed = closed(own, scheduler._ranks, free)
        assert scheduler.held_back_by_ranks == (is_closed and own < free)
        if is_closed:
            assert not output.scheduled_new_reqs
            assert not self.decisions[-1]["resumed"]
            assert len(scheduler.running) <= own
            self.refusals += waited > 0 and own < free
        return output


def queues(scheduler):
    names = ("waiting", "skipped_waiting", "kv_holding_waiting")
    return [getattr(scheduler, name) for name in names if hasattr(scheduler, name)]


@pytest.mark.parametrize("name", ["few_seqs", "priority_tight", "aborts", "async_aborts"])
def test_while_it_is_closed_nobody_is_admitted_and_at_the_end_nobody_is_missing(name):
    engine = under_load(partial(Gated, 1), name, **seats_of(name))  # ends only when every request has ended
    assert engine.refusals > 50
    statuses = {request.status.name for request in engine.requests.values()}
    assert statuses <= {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED"}


def test_running_requests_go_on_while_the_gate_is_closed_and_the_next_ones_come_in_when_it_opens():
    engine = Driver(balanced, max_num_seqs=SEATS)
    for number in range(3):
        engine.add(f"r{number}", prompt=10, max_tokens=50)
    engine.step()
    engine.add("next", prompt=10)
    engine.scheduler.observe_ranks([3, 1])
    assert engine.step().num_scheduled_tokens == {"r0": 1, "r1": 1, "r2": 1}
    engine.abort("r0")
    assert engine.step().num_scheduled_tokens == {"r1": 1, "r2": 1}  # the counts are old
    engine.scheduler.observe_ranks([2, 1])
    assert engine.step().num_scheduled_tokens == {"r1": 1, "r2": 1, "next": 10}


def test_a_rank_that_runs_nothing_admits_as_many_as_it_has_seats():
    engine = Driver(balanced, max_num_seqs=SEATS)
    for number in range(6):
        engine.add(f"r{number}", prompt=10)
    engine.scheduler.observe_ranks([SEATS, SEATS])
    assert len(engine.step().num_scheduled_tokens) == SEATS


def test_the_seats_come_back_where_schedule_raises(monkeypatch):
    engine = Driver(balanced, max_num_seqs=SEATS)
    engine.add("runs", prompt=10)
    engine.step()
    engine.scheduler.observe_ranks([1, SEATS])
    monkeypatch.setattr(engine.scheduler.kv_cache_manager, "allocate_slots", None)
    with pytest.raises(TypeError):
        engine.step()
    assert max_running_requests(engine.scheduler) == SEATS


@pytest.mark.parametrize("overlapped", [False, True])
def test_ranks_that_gather_after_every_step_all_end_their_random_loads(overlapped):
    """Three ranks with random lengths, arrivals and aborts; the counts are a step old, or two."""
    chance = random.Random(7)  # noqa: S311  # a load, no secret
    ranks = [
        Driver(balanced, max_num_seqs=SEATS, num_blocks=60, async_scheduling=overlapped) for _ in range(3)
    ]
    together = apart = 0
    for step in range(3000):
        if step < 150:
            for rank in ranks:
                if chance.random() < 0.3:
                    prompt, most = chance.randint(1, 200), chance.randint(1, 40)
                    rank.add(f"r{len(rank.requests)}", prompt=prompt, max_tokens=most)
                if rank.requests and chance.random() < 0.05:
                    rank.abort(chance.choice(list(rank.requests)))
        busy = [rank for rank in ranks if rank.scheduler.has_requests() or rank.in_flight]
        if step >= 150 and not busy:
            break
        prefills = [bool(rank.step().scheduled_new_reqs) for rank in busy]
        together += sum(prefills) > 1
        apart += sum(prefills) == 1
        counts = [len(rank.scheduler.running) for rank in ranks]
        for rank in ranks:
            assert max(counts) <= SEATS
            rank.scheduler.observe_ranks(counts)
    assert not any(rank.scheduler.requests for rank in ranks)
    assert together
    assert apart


@pytest.mark.parametrize(("overlapped", "base"), [(False, Scheduler), (True, AsyncScheduler)])
def test_it_builds_on_the_class_that_vllm_would_choose(overlapped, base):
    config = engine_config(async_scheduling=overlapped, scheduler_cls=SCHEDULER_CLS)
    scheduler = BalanceScheduler(**scheduler_arguments(config, kv_cache_groups(config)))
    assert (isinstance(scheduler, AsyncScheduler), isinstance(scheduler, base)) == (overlapped, True)
    assert balanced(type(scheduler)) is type(scheduler)


def test_with_one_rank_it_says_that_it_has_no_effect(warnings):
    config = engine_config()
    scheduler = BalanceScheduler(**scheduler_arguments(config, kv_cache_groups(config)))
    assert not scheduler.counts_gathered
    assert warnings == [
        "schedtrace: balance scheduling has no effect: this engine runs in lock-step with no other rank"
    ]


def test_a_diffusion_model_is_refused():
    config = engine_config()
    arguments = scheduler_arguments(config, kv_cache_groups(config))
    config.diffusion_config = object()
    with pytest.raises(ValueError, match="does not support diffusion models"):
        BalanceScheduler(**arguments)


@pytest.mark.skipif(not hasattr(SchedulerConfig, "get_scheduler_cls"), reason="vLLM 0.11.1 and newer")
def test_the_plugin_records_it_by_its_name(recording):
    register()
    config = engine_config(async_scheduling=True, scheduler_cls=SCHEDULER_CLS)
    chosen = config.scheduler_config.get_scheduler_cls()
    scheduler = chosen(**scheduler_arguments(config, kv_cache_groups(config)))
    assert isinstance(scheduler, AsyncScheduler)
    scheduler.shutdown()
    header = read_run(recording).traces[0].header
    assert header.scheduler_class == "schedtrace.balance.scheduler.BalanceAsyncScheduler"
    assert (header.exits_via, header.notices) == ("source", [])


def told_causes(recording, engine):
    for number in range(4):
        engine.add(f"r{number}", prompt=10, max_tokens=50)
    engine.scheduler.observe_ranks([0, SEATS])
    engine.step()  # it runs nothing, so it fills its seats
    engine.scheduler.observe_ranks([SEATS, 1])
    engine.add("next", prompt=10)
    engine.step()  # no seat is free: that is max_num_seqs, whatever the gate says
    engine.abort("r0")
    engine.step()  # the gate
    engine.scheduler.observe_ranks([SEATS - 1, 1])
    engine.abort("r1")
    engine.step()  # the gate, by an old count of its own
    engine.scheduler.observe_ranks([SEATS - 2, 1])
    engine.step()
    engine.scheduler.shutdown()
    [trace] = read_run(recording).traces
    return trace, trace.exits().select(["cause", "request_id", "via"]).collect().rows()


def expected(via):
    return [
        ("queue_empty", None, via),
        ("max_num_seqs", "next", via),
        ("rank_balance", "next", via),
        ("rank_balance", "next", via),
        ("queue_empty", None, via),
    ]


def test_the_trace_says_where_the_gate_was_closed_and_has_the_real_number_of_seats(recording):
    engine = Driver(lambda base: traced_class(balanced(base)), max_num_seqs=SEATS)
    trace, causes = told_causes(recording, engine)
    assert causes == expected("source")
    assert trace.steps["max_num_running_reqs"].to_list() == [SEATS] * 5
    assert trace.header.scheduler_class == "schedtrace.balance.scheduler.BalancedScheduler"


def test_it_is_inferred_where_the_exits_cannot_be_recorded(recording, monkeypatch):
    monkeypatch.setattr(traced, "instrument", lambda _: Instrumented((), ("schedule: no source",)))
    engine = Driver(lambda base: traced_class.__wrapped__(balanced(base)), max_num_seqs=SEATS)
    assert told_causes(recording, engine)[1] == expected("inferred")


@pytest.mark.parametrize("name", ["few_seqs", "async_aborts"])
def test_recording_changes_none_of_its_decisions(name, recording):
    balance, traced_too = (with_counts(cycle([0, 3, 4, 1, 2])) for _ in range(2))
    wraps = balance, lambda base: traced_class(traced_too(base))
    plain, recorded = (under_load(partial(Deciding, wrap), name, **seats_of(name)) for wrap in wraps)
    assert first_difference(plain.decisions, recorded.decisions) is None
    [trace] = read_run(recording).traces
    assert {"rank_balance", "queue_empty"} <= set(trace.exits().collect()["cause"])
    assert set(trace.exits().collect()["via"]) == {"source"}
