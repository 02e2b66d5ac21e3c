"""On the vLLM that is installed: every exit of its own schedulers is known, and told from their source."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from schedtrace.read.run import read_run
from schedtrace.record import header
from schedtrace.record.marks.exits import SITES, unknown_guards
from schedtrace.record.marks.marking import instrument
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler])
def test_every_guard_is_known(scheduler):
    marked = instrument(scheduler)
    assert (marked.refused, unknown_guards(marked.sites)) == ((), [])
    files = {SITES[site].location.rsplit(":", 1)[0] for site in marked.sites}
    assert files == {"vllm/v1/core/sched/scheduler.py"}


def test_a_release_that_was_not_tried_is_recorded_and_says_so(recording, warnings, monkeypatch):
    monkeypatch.setattr(header, "vllm_version", lambda: "0.99.0")
    driver = Driver(traced_class)
    driver.add("only", prompt=10, max_tokens=4)
    driver.finish()
    [trace] = read_run(recording).traces
    [notice] = trace.notices
    assert notice.startswith("vLLM 0.99.0 has not been tested with this version of schedtrace (tested: 0.")
    assert trace.steps.height == trace.end.steps == 4
    assert trace.exits().collect()["cause"].to_list() == ["queue_empty"] * 4
    assert warnings == []
