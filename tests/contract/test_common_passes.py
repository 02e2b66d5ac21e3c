"""The devices of ranks in lock-step: two ranks in two threads, with clocks by hand."""

import contextlib
import platform
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from schedtrace.errors import UsageError
from schedtrace.simulate import lockstep
from schedtrace.simulate.executor import Ran
from schedtrace.simulate.lockstep import CommonPasses
from tests.ports import reserved_port

pytestmark = pytest.mark.vllm


@pytest.fixture
def two_ranks():
    """``two_ranks(stages)``: what both were made to, or the error."""
    made = []
    ports = contextlib.ExitStack()

    def make(stages=1):
        port = ports.enter_context(reserved_port())

        def rank(number):
            parallel = SimpleNamespace(
                data_parallel_rank=number,
                data_parallel_size=2,
                data_parallel_master_ip="127.0.0.1",
                get_next_dp_init_port=lambda: port,
            )
            return CommonPasses(parallel, SimpleNamespace(now_us=0.0), stages)

        with ThreadPoolExecutor(2) as threads:
            made.extend(threads.map(rank, range(2)))
        return made

    yield make
    for one in made:
        one.close()
    ports.close()


def launched(ranks, *launches):
    """What each rank is told of one pass; a launch is its time and the time that the batch takes alone."""
    futures = []
    for rank, (now_us, device_us) in zip(ranks, launches, strict=True):
        rank._clock.now_us = now_us
        futures.append(rank.dispatch(device_us))
    return [future.result(10) for future in futures]


def test_a_pass_begins_with_the_last_and_lasts_as_long_as_the_slowest(two_ranks):
    ranks = two_ranks()
    assert launched(ranks, (100.0, 30.0), (150.0, 10.0)) == [Ran(150.0, 180.0)] * 2
    assert launched(ranks, (181.0, 5.0), (200.0, 7.0)) == [Ran(200.0, 207.0)] * 2


def test_a_pass_launched_ahead_waits_for_the_one_before(two_ranks):
    ranks = two_ranks()
    launched(ranks, (100.0, 30.0), (150.0, 10.0))
    assert launched(ranks, (160.0, 5.0), (155.0, 7.0)) == [Ran(180.0, 187.0)] * 2


def test_the_answer_is_there_only_once_all_ranks_have_launched(two_ranks):
    one, other = two_ranks()
    early = one.dispatch(30.0)
    with pytest.raises(TimeoutError):
        early.result(0.1)
    other._clock.now_us = 40.0
    other.dispatch(10.0)
    assert early.result(10) == Ran(40.0, 70.0)


def test_each_stage_of_a_pipeline_takes_its_part(two_ranks):
    ranks = two_ranks(stages=2)
    assert launched(ranks, (100.0, 40.0), (100.0, 10.0)) == [Ran(100.0, 140.0)] * 2
    assert launched(ranks, (110.0, 10.0), (100.0, 20.0)) == [Ran(120.0, 150.0)] * 2


def test_ranks_of_two_machines_are_refused(two_ranks, monkeypatch):
    names = iter(["0123456789ab", "0123456789ac"])
    monkeypatch.setattr(lockstep, "clock_id", lambda: next(names))
    with pytest.raises(UsageError, match="on one machine only"):
        two_ranks()


def test_without_a_clocks_name_the_hosts_counts(two_ranks, monkeypatch):
    monkeypatch.setattr(lockstep, "clock_id", lambda: None)
    monkeypatch.setattr(platform, "node", lambda: "box")
    assert len(two_ranks()) == 2
