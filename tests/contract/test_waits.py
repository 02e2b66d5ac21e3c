"""The waiting queue rebuilt from a trace is vLLM's own, and the causes explain everybody in it."""

import polars as pl
import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.time_split import request_time
from schedtrace.present.phrases import plain
from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from schedtrace.timeline.queue_waits import mismatches, waiting_after
from schedtrace.timeline.request_states import refused
from schedtrace.timeline.spans import steps_of
from schedtrace.timeline.timeline import make_timeline
from tests.contract.loads import FAMILIES, FEWER_STEPS, make_script, play

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


IN_ORDER = ("fcfs", "tight_kv", "few_seqs", "async_tight", "watermark", "priority")
"""Loads in which nobody is skipped or put back from outside: the order is vLLM's, too."""


@pytest.fixture(params=sorted(FAMILIES.keys() - UNTOLD), scope="module")
def played(request, tmp_path_factory):
    """A family's name, its engine with the queues, and the timeline of its trace."""
    folder, family = tmp_path_factory.mktemp("waits"), FAMILIES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDTRACE_RUN_DIR", str(folder))
        engine = play(Queued(**family.engine), make_script(family, 1, FEWER_STEPS))
    [trace] = read_run(folder).traces
    return request.param, engine, make_timeline(trace)


def test_as_many_wait_as_vllm_says_after_every_step(played):
    _, _, view = played
    assert mismatches(view).rows() == []


def test_who_waits_is_who_waited_and_in_vllms_order(played):
    name, engine, view = played
    order = list if name in IN_ORDER else sorted
    waited = view.waits
    for number, queue in enumerate(engine.queues):
        assert (number, order(waiting_after(waited, number)["request_id"])) == (number, order(queue))


def test_as_many_wait_for_a_cause_as_wait(played):
    _, _, view = played
    explained = steps_of(view.steps.select("step"), refused(view))
    waiting = view.steps.filter(pl.col("num_waiting_after") > 0).select("step", "num_waiting_after")
    assert explained.rows() == waiting.rows()
    assert sum(share.share_frac for share in request_time(view)) == pytest.approx(1)


def test_where_the_queue_cannot_be_rebuilt_it_is_said(recording):
    [name] = UNTOLD
    play(Queued(**FAMILIES[name].engine), make_script(FAMILIES[name], 1))
    [problem] = analyze_run(read_run(recording)).problems
    assert plain(problem).startswith(
        "The waiting queue rebuilt from the trace disagrees with the recorded count after"
    )
