"""The waiting queue rebuilt from a trace is vLLM's own, and the causes explain everybody in it."""

import polars as pl
import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.limits import limit_shares, refused_demand
from schedtrace.present.phrases import plain
from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from schedtrace.timeline.timeline import make_timeline
from schedtrace.timeline.waits import mismatches, waiting_after, waits
from tests.contract.loads import FAMILIES, make_script, play

pytestmark = pytest.mark.vllm


class Queued(Driver):
    """Keeps who waited after each step, in the order of vLLM's queues."""

    def __init__(self, **options):
        super().__init__(traced_class, **options)
        self.queues = []

    def schedule(self, *args):
        output = super().schedule(*args)
        scheduler = self.scheduler
        self.queues.append([r.request_id for r in (*scheduler.kv_holding_waiting, *scheduler.waiting)])
        return output


UNTOLD = {"streaming_input"}
"""A session that waits for its next part is in the queue, and no event says when it went back there."""


@pytest.fixture(params=sorted(FAMILIES.keys() - UNTOLD))
def played(request, recording):
    family = FAMILIES[request.param]
    engine = play(Queued(**family.engine), make_script(family, 1))
    [trace] = read_run(recording).traces
    return request.param, engine, make_timeline(trace)


def test_as_many_wait_as_vllm_says_after_every_step(played):
    _, _, view = played
    assert mismatches(view, waits(view)).rows() == []


def test_who_waits_is_who_waited(played):
    _, engine, view = played
    waited = waits(view)
    for number, queue in enumerate(engine.queues):
        assert set(waiting_after(waited, number)["request_id"]) == set(queue)


def test_the_causes_of_a_step_add_up_to_all_who_wait(played):
    _, _, view = played
    explained = refused_demand(view).group_by("step").agg(pl.col("requests").sum())
    waiting = view.steps.filter(pl.col("num_waiting_after") > 0).select("step", "num_waiting_after")
    assert sorted(explained.rows()) == sorted(waiting.rows())
    shares = [share.share_frac for share in limit_shares(view)]
    assert sum(shares) == pytest.approx(1 if waiting.height else 0)


IN_ORDER = ("fcfs", "tight_kv", "few_seqs", "async_tight", "watermark", "priority")
"""Loads in which nobody is skipped or put back from outside: the order is vLLM's, too."""


@pytest.mark.parametrize("name", [name for name in IN_ORDER if name in FAMILIES])
def test_they_wait_in_vllms_order(name, recording):
    family = FAMILIES[name]
    engine = play(Queued(**family.engine), make_script(family, 1))
    [trace] = read_run(recording).traces
    waited = waits(make_timeline(trace))
    for number, queue in enumerate(engine.queues):
        assert (number, waiting_after(waited, number)["request_id"].to_list()) == (number, queue)


def test_where_the_queue_cannot_be_rebuilt_it_is_said(recording):
    [name] = UNTOLD
    play(Queued(**FAMILIES[name].engine), make_script(FAMILIES[name], 1))
    [problem] = analyze_run(read_run(recording)).problems
    assert plain(problem).startswith(
        "The waiting queue rebuilt from the trace disagrees with the recorded count after"
    )
