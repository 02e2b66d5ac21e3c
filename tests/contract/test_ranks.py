"""Simulated data-parallel ranks: exact times and decisions on small loads, written and read back."""

import threading
from functools import partial

import polars as pl
import pytest

pytest.importorskip("vllm.v1.engine.core", reason="needs vLLM")

from schedtrace.errors import UsageError
from schedtrace.read.run import read_run
from schedtrace.simulate import VirtualClock
from schedtrace.simulate.engine_options import engine_options
from schedtrace.simulate.ranks import Ranks
from schedtrace.simulate.replay import play_loads as play_load
from schedtrace.simulate.simulation import NoProgressError
from schedtrace.step_times.batch import Batch
from schedtrace.step_times.constants import Constants
from schedtrace.step_times.fitted import fit
from schedtrace.timeline.timeline import make_timeline
from schedtrace.whatif.figures import compositions
from schedtrace.whatif.prediction import predict, recorded_load
from schedtrace.workloads import LoadRequest
from schedtrace.workloads.recorded_load import loads_of_run
from schedtrace.workloads.workload import make_workload
from tests.contract.test_simulation import times
from tests.simulated import simulated

pytestmark = pytest.mark.vllm

STEP = ("start_us", "output_us", "total_requests", "wave", "step_counter", "dummy_batches", "dummy_us")


@pytest.fixture
def play(tmp_path):
    """``play(load, ...)``: the traces of two ranks on which ``load`` puts requests; or it lists them.

    Each as time, id, prompt tokens, output tokens, rank.
    """

    def played(load, **options):
        def arrive(ranks):
            if callable(load):
                load(ranks)
            else:
                for *request, rank in load:
                    ranks.arrive(*request, rank=rank)
            ranks.run()

        settings = {"data_parallel_size": 2, "lockstep": True, "times": times(), **options}
        return simulated(tmp_path / "run", arrive, **settings).traces

    return played


def rows(trace, *columns):
    return trace.steps.select(*columns).rows()


def test_a_step_takes_as_long_as_that_of_the_slowest_rank(play):
    """Rank 0 prefills 60 tokens (1.6 ms), rank 1 keeps it company; then both decode."""
    load = [(0, "a", 60, 3, 0), (1500, "b", 10, 3, 1)]
    first, other = play(load)
    assert rows(first, *STEP) == [
        (0, 1600, 1, 0, 0, 0, 0),
        (1600, 2710, 1, 0, 1, 0, 0),
        (2710, 3821, 1, 0, 2, 0, 0),
        (3821, 3821, 0, 0, 3, 0, 0),  # without tokens: only says who is finished
    ]
    assert rows(other, *STEP) == [
        (1600, 2710, 1, 0, 1, 1, 1600),
        (2710, 3821, 1, 0, 2, 0, 0),
        (3821, 4882, 1, 0, 3, 0, 0),
        (4882, 4882, 0, 0, 4, 0, 0),
    ]
    assert first.header.clock == other.header.clock == "virtual"
    assert (first.header.engine_rank, other.header.engine_rank, other.header.data_parallel_size) == (0, 1, 2)


def test_dummy_batches_last_until_the_ranks_agree_that_all_is_done(play):
    """VLLM asks after pass 1 and each 16th whether the wave is over: 3 passes with tokens, 13 without.

    The next wave is over after its first pass.
    """
    load = [(0, "a", 60, 3, 0), (50_000, "b", 10, 1, 1)]
    first, other = play(load)
    assert rows(first, "start_us", "wave", "dummy_batches") == [
        (0, 0, 0),
        (1600, 0, 0),
        (2710, 0, 0),
        (3821, 0, 0),
    ]
    assert rows(other, "start_us", "wave", "dummy_batches") == [(50_000, 1, 16), (51_100, 2, 0)]


def test_the_host_of_each_rank_has_its_own_time(play):
    """A pass begins when the last rank has scheduled it."""
    load = [(0, "a", 60, 2, 0), (0, "b", 10, 2, 1)]
    first, other = play(load, times=times(schedule_us=200, gap_us=100, update_us=50))
    assert rows(first, "start_us", "schedule_us", "output_us")[:2] == [(0, 200, 1800), (1950, 200, 3260)]
    assert rows(other, "start_us", "schedule_us", "output_us")[:2] == [(0, 200, 1800), (1950, 200, 3260)]


def test_with_two_batches_in_flight_ranks_take_passes_together(play):
    load = [(0, "a", 60, 3, 0), (0, "b", 10, 3, 1)]
    first, other = play(load, async_scheduling=True)
    expected = [(0, 1600), (0, 2710), (1600, 3821)]
    assert rows(first, "start_us", "output_us")[:3] == expected
    assert rows(other, "start_us", "output_us")[:3] == expected
    assert first.finishes.select("request_id", "output_tokens").rows() == [("a", 3)]


def test_prefills_are_put_off_to_every_fourth_pass(play):
    """``b`` comes during pass 1; rank 1 decodes, so it waits for pass 4."""
    load = [(0, "long", 10, 8, 1), (1200, "b", 10, 1, 1)]
    _, other = play(load, prefill_schedule_interval=4)
    assert rows(other, "total_requests")[:6] == [(1,), (1,), (1,), (1,), (2,), (1,)]
    assert [counter for (counter,) in rows(other, "step_counter")[:6]] == list(range(6))


def test_ranks_of_a_dense_model_do_what_each_would_alone(play, tmp_path):
    loads = [[(700 * n, f"{rank}-{n}", 10 + 40 * n % 90, 3 + n % 7) for n in range(12)] for rank in (0, 1)]
    made = {"times": times(200, 100, 50), "max_num_seqs": 3, "num_blocks": 60}

    load = [(*arrival, rank) for rank, requests in enumerate(loads) for arrival in requests]
    together = play(load, lockstep=False, **made)
    for rank, requests in enumerate(loads):

        def load(alone, requests=requests):
            for arrival in requests:
                alone.arrive(*arrival)
            alone.run()

        [trace] = simulated(tmp_path / str(rank), load, **made).traces
        columns = ("start_us", "schedule_us", "output_us", "total_requests", "num_waiting_after")
        assert rows(together[rank], *columns) == rows(trace, *columns)
        assert together[rank].steps["wave"].null_count() == together[rank].steps.height
        assert not together[rank].steps["dummy_batches"].sum()


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        ("round-robin", [0, 1, 0, 1, 0]),
        ("least-running", [0, 1, 0, 1, 1]),  # the last comes when one of rank 1 is done
        ("least-tokens", [0, 1, 1, 1, 1]),
        ("vllm", [0, 1, 0, 1, 0]),  # its count of what is in flight is equal: in turn
    ],
)
def test_who_gets_a_request(play, router, expected):
    lengths = [(100, 20), (10, 2), (30, 20), (10, 20)]
    load = [(number, f"r{number}", *lengths[number], None) for number in range(4)]
    load.append((6000, "r4", 10, 1, None))
    traces = play(load, router=router)
    rank_of = {
        request: rank
        for rank, trace in enumerate(traces)
        for request in trace.arrivals["request_id"].to_list()
    }
    assert [rank_of[f"r{number}"] for number in range(5)] == expected


def test_vllms_router_learns_of_a_full_cache_when_counts_are_published(play):
    """Rank 0 has two requests, one waits for its cache; rank 1 has four. Counts come out every 100 ms."""
    load = [(0, f"big{number}", 240, 60, 0) for number in range(2)]
    load += [(0, f"small{number}", 4, 30, 1) for number in range(4)]
    load += [(50_000, "before", 4, 1, None), (150_000, "after", 4, 1, None)]
    slow = Constants(10_000, 10, 50)
    traces = play(load, router="vllm", num_blocks=22, max_model_len=320, times=slow)
    came = [trace.arrivals["request_id"].to_list() for trace in traces]
    assert "before" in came[0]
    assert "after" in came[1]


@pytest.mark.parametrize(("balance_ranks", "admitted_in"), [(False, 2), (True, 6)])
def test_no_rank_admits_while_another_has_all_but_one_seat_taken(play, balance_ranks, admitted_in):
    """Rank 0 runs 3 of 4 up to pass 5; the ranks learn after it that they are done."""
    load = [(0, f"a{number}", 10, 6, 0) for number in range(3)]
    load += [(0, "b", 10, 12, 1), (2000, "c", 10, 1, 1)]
    _, other = play(load, max_num_seqs=4, balance_ranks=balance_ranks)
    [came] = other.steps.filter(pl.col("total_requests") == 2)["step_counter"]
    assert came == admitted_in
    assert ("rank_balance" in other.exits().collect()["cause"].to_list()) == balance_ranks


def test_an_abort_reaches_the_rank_that_has_the_request(play):
    def load(ranks):
        ranks.arrive(0, "a", 10, 200, rank=1)
        ranks.at(3000, lambda: ranks.abort("a"))
        ranks.at(3000, lambda: ranks.abort("nobody"))

    _, other = play(load)
    [(status, finished, aborted)] = other.finishes.select("status", "finished_us", "abort_us").rows()
    assert (status, finished, aborted) == ("ABORTED", 3221, 3000)


def test_requests_that_never_can_be_done_are_an_error():
    before = set(threading.enumerate())
    with (
        VirtualClock() as clock,
        Ranks(clock, data_parallel_size=2, lockstep=True, num_blocks=4) as ranks,
    ):
        ranks.arrive(0, "never", 100, 4, rank=1)
        with pytest.raises(NoProgressError, match="1 requests cannot go on: 2001 steps without a token"):
            ranks.run()
    assert set(threading.enumerate()) <= before


SETTINGS = {"data_parallel_size": 2, "lockstep": True, "max_num_seqs": 4, "prefill_schedule_interval": 3}


@pytest.fixture(scope="module")
def recorded_ranks(tmp_path_factory):
    """A run of two ranks in lock-step, with a request that goes away and an idle time in between."""
    folder = tmp_path_factory.mktemp("runs") / "skewed"
    load = [
        LoadRequest(
            request_id=f"r{n}",
            arrived_us=900.0 * n + (60_000 if n > 9 else 0),
            prompt_tokens=20 + 30 * n % 200,
            output_tokens=2 + 5 * n % 17,
            data_parallel_rank=int(n % 3 == 0),
            abort_us=9000.0 if n == 4 else None,
        )
        for n in range(16)
    ]
    workload = make_workload("skewed", "jsonl", partial(iter, load))
    played = play_load([workload], SETTINGS, times(100, 50, 20), folder)
    assert played.steps == 72
    return read_run(folder)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("by_step", [False, True])
def test_ranks_in_lockstep_replay_what_was_recorded(recorded_ranks, tmp_path, by_step, asynchronous):
    """The same steps with the same requests; by time the same times, too."""
    if asynchronous:
        [load] = loads_of_run(recorded_ranks.traces)
        play_load([load], {**SETTINGS, "async_scheduling": True}, times(100, 50, 20), tmp_path / "other")
        recorded_ranks = read_run(tmp_path / "other")
    header = recorded_ranks.traces[0].header
    options = engine_options(header, ranks=2)
    assert (options["lockstep"], options["data_parallel_size"], "router" in options) == (True, 2, False)
    loads = loads_of_run(recorded_ranks.traces)
    assert [request.data_parallel_rank for request in loads[0]][:4] == [1, 0, 0, 1]
    play_load(
        loads, options, times(100, 50, 20) if not by_step else times(), tmp_path / "again", by_step=by_step
    )
    again = read_run(tmp_path / "again")
    ours, theirs = (
        compositions([make_timeline(trace) for trace in run.traces]) for run in (again, recorded_ranks)
    )
    assert ours == theirs
    if not by_step:
        columns = ("start_us", "output_us", "wave", "step_counter", "dummy_batches", "dummy_us")
        for one, other in zip(again.traces, recorded_ranks.traces, strict=True):
            assert rows(one, *columns) == rows(other, *columns)


def test_step_times_are_fitted_to_the_rank_that_a_pass_waited_for(recorded_ranks):
    """1 ms, 10 us a prompt token and 50 us a decode are found again, though ranks wait for each other."""
    timelines = [make_timeline(trace) for trace in recorded_ranks.traces]
    fitted = fit(timelines, ["skewed"])
    for prefill, decodes in ((150, 0), (0, 3)):
        batch = Batch({"a": 1}, prefill, decodes, 0, decode_requests=decodes)
        assert fitted.device_us(batch) == pytest.approx(times().device_us(batch), rel=0.1)


def test_a_prediction_is_of_all_ranks(recorded_ranks):
    base = recorded_load(recorded_ranks)
    checked = predict(base, {})
    baseline = checked.baseline
    assert (baseline.same_steps, baseline.compared_steps, checked.load.requests) == (72, 72, 16)
    changed = predict(base, {"prefill_schedule_interval": 1}, resamples=0)
    ttft = changed.configurations[-1].figure("TTFT p50")
    assert ttft.change_frac < 0
    routed = predict(base, {"router": "round-robin", "balance_ranks": True}, resamples=0)
    assert routed.settings == {"router": None, "balance_ranks": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router": "best"}, "router=best: one of vllm, round-robin, least-running, least-tokens"),
        ({"data_parallel_size": 0}, "data_parallel_size=0: expected a number of ranks, 1 or more"),
        ({"data_parallel_size": 1, "balance_ranks": True}, "a single rank has no other to wait for"),
    ],
)
def test_changes_that_ranks_cannot_make(recorded_ranks, changes, message):
    with pytest.raises(UsageError, match=message):
        engine_options(recorded_ranks.traces[0].header, changes, ranks=2)
