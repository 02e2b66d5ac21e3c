"""Traced against plain where the queue, or what a scheduler does with those that run, is not vLLM's."""

from collections import defaultdict
from functools import partial

import polars as pl
import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.analyze import analyze
from schedtrace.explain.request import explain_request
from schedtrace.explain.step import StepStories
from schedtrace.model.causes import Cause
from schedtrace.model.message import plain
from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.record.vllms_own import vllm_version
from schedtrace.simulate import Driver
from schedtrace.timeline.queue_waits import overtakings
from schedtrace.timeline.timeline import make_timeline
from tests.contract.deciding import first_difference
from tests.contract.loads import SHORT_STEPS, under_load
from tests.contract.toy_queues import QUEUES, gives_back, sets_aside, with_queue

OURS = vllm_version().startswith("0.32.")
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not OURS, reason="the toys are for vLLM 0.32")]

LOADS = ["few_seqs", "aborts", "async_tight"]


class Untouched(Driver):
    """Keeps what is decided, and asks no queue for it."""

    def __init__(self, wrap, **options):
        super().__init__(wrap, **options)
        self.decisions = []
        self.waiting = []
        """How many wait after each step, and whom the queue was asked for last."""

    def schedule(self, *args):
        output = super().schedule(*args)
        cached = output.scheduled_cached_reqs
        self.decisions.append(
            (list(output.num_scheduled_tokens.items()), list(cached.new_block_ids), output.finished_req_ids)
        )
        scheduler = self.scheduler
        held = getattr(scheduler.waiting, "held", scheduler.waiting)
        aside = [one for one in getattr(scheduler, "aside", ()) if not one.is_finished()]
        self.waiting.append(len(list(held)) + len(scheduler.kv_holding_waiting) + len(aside))
        return output

    def update(self):
        told = super().update()
        outputs = [one for of_client in told.values() for one in of_client.outputs]
        self.decisions.append([(one.request_id, one.new_token_ids, one.finish_reason) for one in outputs])
        return told


def both(make, load):
    """The engine of a load, plain and traced."""
    wraps = make, lambda base: traced_class(make(base))
    return [under_load(partial(Untouched, wrap), load, steps=SHORT_STEPS) for wrap in wraps]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_a_queue_decides_the_same_whether_it_is_recorded_or_not(queue, load, recording, warnings):
    plain, traced = both(lambda base: with_queue(base, queue), load)
    assert first_difference(plain.decisions, traced.decisions) is None
    [trace] = read_run(recording).traces
    assert (warnings, trace.notices) == ([], [])
    assert trace.header.foreign_queues == [f"tests.contract.toy_queues.{queue.__name__}"]
    assert trace.steps.height == trace.end.steps
    assert trace.steps["num_waiting_after"].to_list() == traced.waiting
    assert wrong_causes(trace) == []


def wrong_causes(trace):
    """Exits that say that nobody was left in the queue, although more waited than were skipped."""
    skipped = defaultdict(int)
    wrong = []
    left = dict(trace.steps.select("step", "num_waiting_after").iter_rows())
    for line in trace.exits().collect().filter(loop="waiting").iter_rows(named=True):
        if line["kind"] == "continue":
            skipped[line["step"]] += line["count"]
        elif line["cause"] == Cause.QUEUE_EMPTY and left[line["step"]] > skipped[line["step"]]:
            wrong.append(line)
    return wrong


def test_a_queue_that_is_false_although_requests_wait_is_not_told_as_empty(recording):
    both(lambda base: with_queue(base, QUEUES["Withholds"]), "few_seqs")
    [trace] = read_run(recording).traces
    told = trace.exits().collect().filter(cause="other", loop="waiting")
    assert told.height > 20
    assert set(told["guard"]) == {"not request_queue"}
    assert set(told["values"]) <= {f"{count} waiting requests" for count in range(1, 300)}


def test_requests_that_are_taken_out_of_the_running_ones_are_told_as_set_aside(recording, warnings):
    plain, traced = both(sets_aside, "few_seqs")
    assert first_difference(plain.decisions, traced.decisions) is None
    [trace] = read_run(recording).traces
    assert (warnings, trace.notices) == ([], [])
    assert trace.header.foreign_queues == []
    told = trace.large["set_aside"].collect()
    assert told.select("step", "request_id").rows() == traced.scheduler.seen
    assert told["blocks_held"].min() >= 1
    assert trace.preemptions().collect().height == 0
    assert trace.steps["num_waiting_after"].to_list() == traced.waiting


def test_every_moment_of_one_that_was_set_aside_is_told_as_that(recording):
    both(sets_aside, "few_seqs")
    run = read_run(recording)
    timeline = make_timeline(run.traces[0], whole=True)
    assert timeline.mismatches.is_empty()
    states = timeline.request_states.filter(state="set_aside")
    assert set(states["request_id"]) <= set(timeline.set_aside["request_id"])
    assert states.height > 5
    assert timeline.request_states.filter(state="stalled").height == 0
    name = states["request_id"][0]
    events = explain_request(run, name).events
    assert "set_aside" in [event.what for event in events]


def test_what_a_scheduler_ends_by_itself_is_not_told_as_aborted_by_a_client(recording, warnings):
    plain, traced = both(gives_back, "aborts")
    assert first_difference(plain.decisions, traced.decisions) is None
    run = read_run(recording)
    [trace] = run.traces
    assert (warnings, trace.notices) == ([], [])
    own = trace.finishes.filter("in_schedule")
    assert own["request_id"].to_list() == [*traced.scheduler.given]
    assert own.height > 5
    others = trace.finishes.filter(~pl.col("in_schedule"), pl.col("status") == "ABORTED").height
    [report] = analyze([run]).runs
    outcomes = report.statistics.outcomes
    assert (outcomes.aborted, outcomes.by_scheduler) == (others, own.height)
    assert explain_request(run, own["request_id"][0]).status == "ABORTED by the scheduler"


def test_of_a_foreign_queue_nothing_is_concluded_from_the_order_of_arrival(recording):
    both(lambda base: with_queue(base, QUEUES["Pins"]), "few_seqs")
    run = read_run(recording)
    [report] = analyze([run]).runs
    [line] = [text for text in map(plain, report.problems) if "is not vLLM's" in text]
    arrived = run.traces[0].arrivals.height
    timeline = make_timeline(run.traces[0], whole=True)
    overtook = overtakings(timeline, timeline.tables.gone)
    assert 0 < overtook < arrived
    assert f"{overtook} of {arrived} requests were admitted before" in line
    stories = StepStories(run, make_timeline(run.traces[0], whole=True))
    full = run.traces[0].exits().collect().filter(cause="max_num_seqs")["step"].unique().to_list()
    assert len(full) > 20
    assert [stories.story(step).what_if for step in full[:20]] == [[]] * 20
