"""Whatever breaks at a mark in ``schedule()``: it decides as the plain one, and what is missing is told."""

from itertools import count
from pkgutil import resolve_name

import polars as pl
import pytest

pytest.importorskip("vllm")

from schedtrace.read.run import read_run
from schedtrace.record.allocation import stand_in
from schedtrace.record.marks import exits
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver as Engine
from tests.contract.deciding import LOAD, decisions, failing_from, first_difference

pytestmark = pytest.mark.vllm

SAID = "exits may lack details: a mark in schedule() failed: RuntimeError('broken')"


def kinds_of(trace):
    return trace.exits().collect().select("step", "loop", "kind", "cause", "location", "via")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What is recorded of the load where nothing breaks."""
    with pytest.MonkeyPatch.context() as patch:
        run = tmp_path_factory.mktemp("whole") / "run"
        patch.setenv("SCHEDTRACE_RUN_DIR", str(run))
        decisions(*LOAD, traced_class)
    return read_run(run).traces[0]


@pytest.mark.parametrize("broken", ["queues.head", "queues.pause_state", "why_refused"])
def test_a_detail_that_cannot_be_noted_is_left_out_and_the_exit_is_told(
    broken, plain, whole, recording, warnings, monkeypatch
):
    name = f"schedtrace.record.marks.exits.{broken}"
    monkeypatch.setattr(name, failing_from(10, resolve_name(name), RuntimeError("broken")))
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    [trace] = read_run(recording).traces
    assert (warnings, trace.notices) == ([f"schedtrace: {SAID}"], [SAID])
    assert trace.steps.height == trace.end.steps == whole.steps.height
    assert kinds_of(trace).equals(kinds_of(whole))
    assert not trace.exits().collect().equals(whole.exits().collect())


def test_exits_that_were_not_noted_are_inferred_where_they_can(
    plain, whole, recording, warnings, monkeypatch
):
    names = ("end", "done", "exit", "exit_at_head", "allocation_refused")
    noted = [getattr(exits.Marks, name) for name in names]
    calls = count()

    def until_then(mark):
        return staticmethod(lambda *told: mark(*told) if next(calls) < 100 else None)

    for mark in noted:
        monkeypatch.setattr(exits.Marks, mark.__name__, until_then(mark))
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    [trace] = read_run(recording).traces
    assert warnings == []
    assert trace.steps.height == trace.end.steps == whole.steps.height
    [from_here] = trace.notices
    step = int(from_here.removeprefix("step ").partition(" ")[0])
    before = pl.col("step") < step
    assert kinds_of(trace).filter(before).equals(kinds_of(whole).filter(before))
    inferred = kinds_of(trace).filter(via="inferred", loop="waiting")
    assert inferred["step"].to_list() == list(range(step, whole.steps.height))


MARKS = {"exit": 3, "allocation_refused": 3, "end": 3, "cap": 4, "preempts": 2}
"""With so many arguments beside the scheduler and the site."""


@pytest.mark.parametrize("mark", MARKS)
def test_no_mark_raises_whatever_it_is_given(mark, recording, warnings):
    class Unlike:
        """Nothing that a request could be."""

        def __getattr__(self, name):
            raise RuntimeError(name)

    engine = Engine(traced_class)
    recorder = engine.scheduler._schedtrace_recorder
    recorder.events = []
    told = [Unlike()] * MARKS[mark]
    if mark == "end":
        told[1:] = [Unlike()], 0  # those that run, and the next of them
    assert getattr(exits.Marks, mark)(engine.scheduler, 0, *told) is None
    assert len(recorder.events) == 1
    engine.finish()
    [notice] = read_run(recording).traces[0].notices
    assert notice.startswith("exits may lack details: a mark in schedule() failed: ")
    assert warnings == [f"schedtrace: {notice}"]


def test_an_allocation_that_nobody_can_look_into_is_told_without_its_limit(plain, whole, recording, warnings):
    """A cache manager whose ``allocate_slots`` only hands on: asked for its source once, not each time."""

    def wrap(base):
        class HandsOn(base):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                own = type(self.kv_cache_manager)

                class Foreign(own):
                    def allocate_slots(self, *args, **options):
                        return own.allocate_slots(self, *args, **options)

                self.kv_cache_manager.__class__ = Foreign

        return traced_class(HandsOn)

    before = stand_in.cache_info().misses
    assert first_difference(plain, decisions(*LOAD, wrap)) is None
    [trace] = read_run(recording).traces
    assert stand_in.cache_info().misses == before + 1
    assert len(trace.notices) == 1
    assert trace.notices[0].startswith("which limit makes an allocation fail cannot be told from ")
    assert kinds_of(trace).equals(kinds_of(whole))
    refused = trace.exits().collect().filter(cause="kv_blocks")
    assert refused.height > 0
    assert (
        refused.select("detail", "blocks_needed", "blocks_free").null_count().row(0) == (refused.height,) * 3
    )
    assert warnings == []
