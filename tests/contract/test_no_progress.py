"""Requests that vLLM's own scheduler takes in and throws out again and again, and those that merely wait."""

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.rules import never_fits, no_progress
from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from schedtrace.timeline.timeline import make_timeline
from tests.contract.test_never_fits import stepped

pytestmark = pytest.mark.vllm

SMALL = {"num_blocks": 13, "max_model_len": 256, "max_num_batched_tokens": 64}


def found(recording):
    [trace] = read_run(recording).traces
    timeline = make_timeline(trace)
    assert never_fits.RULE(timeline) == []
    return no_progress.RULE(timeline)


def starts_again(steps, **options):
    """One request grows; the other one's first chunk fits beside it, the second does not."""
    driver = Driver(traced_class, **{**SMALL, "scheduler_reserve_full_isl": False, **options})
    driver.add("holder", 100, 90)
    driver.step()
    driver.step()
    driver.add("starts", 160, 4)
    return stepped(driver, steps)


def test_a_request_that_starts_again_with_every_chunk(recording):
    starts_again(40)
    [finding] = found(recording)
    evidence = finding.evidence
    assert (finding.leads, finding.evidence.holders) == (True, ["holder"])
    assert (evidence.request_id, evidence.high_tokens, evidence.unfinished) == ("starts", 63, 1)
    assert evidence.restarts == evidence.fruitless == evidence.recomputed_tokens // 63 > 10


def test_it_is_done_in_the_end(recording):
    driver = starts_again(200)
    assert driver.scheduler.requests == {}
    [finding] = found(recording)
    assert (finding.evidence.unfinished, finding.evidence.high_tokens) == (0, 63)


@pytest.mark.parametrize(
    "advised", [{"scheduler_reserve_full_isl": True}, {"max_num_seqs": 1}, {"num_blocks": 24}], ids=str
)
def test_the_advice_ends_it(recording, advised):
    starts_again(200)
    [finding] = found(recording)
    assert {one.setting for one in finding.advice} == {
        "scheduler_reserve_full_isl", "kv_cache_memory_bytes", "max_num_seqs"
    }  # fmt: skip
    driver = starts_again(200, **advised)
    preempted = [driver.requests["starts"].num_preemptions, driver.requests["holder"].num_preemptions]
    assert (driver.scheduler.requests, preempted) == ({}, [0, 0])


def test_two_requests_of_which_one_makes_room_for_the_other(recording):
    """The older one goes on and ends; the younger one is preempted once, which is no circle."""
    driver = Driver(traced_class, num_blocks=12, max_model_len=256)
    driver.add("older", 90, 70)
    driver.add("younger", 70, 80)
    stepped(driver, 300)
    assert (driver.scheduler.requests, driver.requests["younger"].num_preemptions) == ({}, 1)
    assert found(recording) == []


def test_one_that_preempts_itself_alone_is_left_to_never_fits(recording):
    driver = Driver(traced_class, **SMALL, scheduler_reserve_full_isl=False)
    driver.add("long", 250, 4)
    stepped(driver, 60)
    [trace] = read_run(recording).traces
    timeline = make_timeline(trace)
    assert len(never_fits.RULE(timeline)) == 1
    assert no_progress.RULE(timeline) == []
