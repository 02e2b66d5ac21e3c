"""A recording that begins while vLLM's scheduler works, and ends again: it changes and leaves nothing."""

import os
import threading
import time
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

pytest.importorskip("vllm")

from typer.testing import CliRunner
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from schedtrace.cli.main import app
from schedtrace.diagnose.offered_load import came_at_once
from schedtrace.diagnose.run_statistics import engine_sums
from schedtrace.read.run import read_run
from schedtrace.record.disguise import RECORDERS
from schedtrace.record.live import attachment, class_swap
from schedtrace.record.live.attachment import Attachment
from schedtrace.record.live.between_steps import NotReachedError
from schedtrace.record.live.class_swap import RefusedError
from schedtrace.record.traced import traced_class
from schedtrace.timeline.queue_waits import waiting_after
from schedtrace.timeline.timeline import make_timeline
from tests.contract.deciding import Deciding, first_difference
from tests.contract.loads import FAMILIES, LOADS, SHORT_STEPS, make_script
from tests.contract.switched import Switched
from tests.toys import Now

pytestmark = pytest.mark.vllm

ATTACHED_STEPS = max(100, SHORT_STEPS)
"""Steps of a load: as many as every command needs to say something of a window."""
WINDOWS = [
    tuple(ATTACHED_STEPS * percent // 100 for percent in window) for window in [(13, 40), (50, 73), (80, 97)]
]
"""First step that is recorded, and the first one that is not any more."""
SESSIONS = {"streaming_input"}
"""A session that waits for its next part is in the queue, and no event says when it went back there."""


@pytest.fixture
def idle():
    """An engine that has made some steps and is not recorded."""
    engine = Switched()
    for number in range(4):
        engine.add(f"r{number}", 40)
    engine.step()
    return engine


def open_files():
    return sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208  # numbers


def is_plain(engine):
    names = [name for name in vars(engine.scheduler) if name.startswith("_schedtrace")]
    return type(engine.scheduler) in {Scheduler, AsyncScheduler} and not names


def test_where_no_file_can_be_made_nothing_is_changed(idle, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError, match="it cannot be recorded: NotADirectoryError"):
        idle.attachment.start_recording(tmp_path / "file" / "run", None, hash_ids=False)
    assert is_plain(idle)
    assert not idle.attachment.attached


def test_a_scheduler_that_cannot_be_read_costs_no_file_and_no_thread(idle, tmp_path, monkeypatch):
    def unreadable(*_, **__):
        raise AttributeError("kv_cache_manager")  # noqa: EM101  # as Python says it

    monkeypatch.setattr("schedtrace.record.traced.Recorder", unreadable)
    before = open_files(), threading.active_count()
    with pytest.raises(RefusedError, match="it cannot be recorded: AttributeError"):
        idle.attachment.start_recording(tmp_path / "run", None, hash_ids=False)
    assert (open_files(), threading.active_count()) == before
    assert is_plain(idle)


def test_an_engine_that_does_not_come_to_the_end_of_its_step_is_left_alone(idle, tmp_path, monkeypatch):
    def never(_what, _timeout_s):
        raise NotReachedError("within one step")  # noqa: EM101, TRY003  # stands for another text

    monkeypatch.setattr(Now, "do", staticmethod(never))
    with pytest.raises(RefusedError, match="was not attached to: within one step"):
        idle.attachment.start_recording(tmp_path / "run", None, hash_ids=False)
    assert is_plain(idle)


def test_an_engine_whose_requests_cannot_be_counted_is_left_alone(idle, tmp_path):
    class Mine(type(idle.scheduler)):  # whose waiting requests are counted by all there are
        pass

    shutdown = EngineCore.shutdown
    idle.scheduler.__class__, idle.scheduler.requests = Mine, UserDict(idle.scheduler.requests)
    with pytest.raises(RefusedError, match="was not attached to: descriptor '__len__' requires a 'dict'"):
        idle.attachment.start_recording(tmp_path / "run", None, hash_ids=False)
    assert type(idle.scheduler) is Mine
    assert [name for name in vars(idle.scheduler) if name.startswith("_schedtrace")] == []
    assert not idle.attachment.attached
    assert EngineCore.shutdown is shutdown


def test_a_signal_while_the_class_changes_undoes_it(idle, tmp_path, monkeypatch):
    counter = iter([0])
    monkeypatch.setattr(class_swap.time, "perf_counter_ns", lambda: next(counter))  # the second call raises
    with pytest.raises(RefusedError, match="was not attached to"):
        idle.attachment.start_recording(tmp_path / "run", None, hash_ids=False)
    assert is_plain(idle)


class Stuck(Now):
    """Reached at some visits, within one step at the others."""

    def __init__(self, *reached: bool) -> None:
        self.reached = list(reached)
        self.over = threading.Event()

    def do(self, what: Any, _timeout_s: float) -> None:
        if not self.reached.pop(0):
            raise NotReachedError("within one step")  # noqa: EM101, TRY003  # stands for another text
        what()
        if not self.reached:
            self.over.set()


@pytest.fixture
def stuck(idle, monkeypatch):
    """``stuck(*reached)``: whether the engine comes to the end of its step at each visit."""
    monkeypatch.setattr(class_swap, "AGAIN_S", 0.01)
    monkeypatch.setattr(attachment, "AGAIN_S", 60)
    monkeypatch.setattr(attachment, "LENGTH_S", 0)

    def make(*reached):
        visits = Stuck(*reached)
        return Attachment(idle.core, visits), visits

    return make


def test_a_recording_whose_time_is_over_is_ended_as_soon_as_the_engine_allows(idle, stuck, tmp_path):
    attached, visits = stuck(True, False, False, True)
    path = attached.start_recording(tmp_path / "run", 0.01, hash_ids=False).path
    assert visits.over.wait(60)
    assert attached.stop_recording().path == path
    assert is_plain(idle)


def test_a_glance_that_the_engine_does_not_let_go_is_nobodys_recording_and_ends_later(idle, stuck):
    attached, visits = stuck(True, False, False, True)
    attached.exits_now()
    assert not is_plain(idle)
    assert not RECORDERS[idle.scheduler].active
    assert (attached.attached, attached.trace_path, attached.recorder) == (False, None, None)
    with pytest.raises(RefusedError, match="nothing is attached to it"):
        attached.stop_recording()
    attached._brief.alarm.cancel()
    attached._brief.alarm.set(0)
    assert visits.over.wait(60)
    with attached._lock:
        assert is_plain(idle)
        assert attached._client.result is None


def test_a_timer_that_comes_too_late_ends_no_later_recording(idle, tmp_path, monkeypatch):
    idle.attachment.start_recording(tmp_path / "run", 60, hash_ids=False)
    late = idle.attachment._client.alarm.timer
    idle.attachment.stop_recording()
    idle.attachment.start_recording(tmp_path / "again", None, hash_ids=False)
    monkeypatch.setattr(class_swap.threading, "current_thread", lambda: late)
    late.function()
    monkeypatch.undo()
    assert idle.attachment.attached
    idle.attachment.stop_recording()


def test_a_recording_that_gave_up_makes_way_for_another(idle, tmp_path):
    idle.attachment.start_recording(tmp_path / "full", None, hash_ids=False)
    idle.scheduler._schedtrace_recorder.writer._give_up(OSError(28, "No space left on device"))
    idle.step()
    assert idle.attachment.trace_path is None
    begun = idle.attachment.start_recording(tmp_path / "again", None, hash_ids=False)
    assert (begun.path, begun.present) == (str(tmp_path / "again" / "engine-0.jsonl"), 4)
    idle.step()
    idle.attachment.stop_recording()
    assert is_plain(idle)
    assert read_run(tmp_path / "again").traces[0].steps.height == 1


def test_it_ends_by_itself_and_says_so_to_who_asks_then(idle, tmp_path):
    path = idle.attachment.start_recording(tmp_path / "run", 0.05, hash_ids=True).path
    idle.attachment._client.alarm.timer.join()
    assert is_plain(idle)
    assert idle.attachment.stop_recording().path == path
    with pytest.raises(RefusedError, match="nothing is attached to it"):
        idle.attachment.stop_recording()
    assert read_run(tmp_path / "run").traces[0].header.hashed_ids


def test_a_wall_clock_that_is_set_back_makes_nobody_wait(idle, tmp_path, monkeypatch):
    idle.attachment.start_recording(tmp_path / "run", None, hash_ids=False)
    for name, hour in (("time", 3600), ("time_ns", 3600 * 10**9)):
        clock = getattr(time, name)
        monkeypatch.setattr(time, name, lambda now=clock, hour=hour: now() - hour)
    idle.add("later", 40)
    idle.finish()
    idle.attachment.stop_recording()
    [later] = read_run(tmp_path / "run").traces[0].arrivals.to_dicts()
    assert 0 <= later["queued_us"] - later["arrived_us"] < 60e6


def test_an_engine_that_ends_while_it_is_attached_to_closes_the_trace(idle, tmp_path, monkeypatch):
    cleanup = "vllm.v1.engine.core.cleanup_dist_env_and_memory"
    monkeypatch.setattr(cleanup, lambda: None, raising=False)
    idle.attachment.start_recording(tmp_path / "run", None, hash_ids=False)
    idle.step()
    core = SimpleNamespace(
        structured_output_manager=idle.scheduler.structured_output_manager,
        model_executor=SimpleNamespace(shutdown=lambda: None),
        scheduler=idle.scheduler,
    )
    EngineCore.shutdown(core)
    [trace] = read_run(tmp_path / "run").traces
    assert (trace.steps.height, trace.end.steps, trace.problems.unclosed) == (1, 1, False)
    idle.attachment.stop_recording()
    assert is_plain(idle)


def play_on(engine, script):
    """Play a script and leave open what is not done: every window is over by then."""
    for turn in script:
        for event in turn.events:
            event(engine)
        engine.step(*[True] * turn.throttled)
    return engine


@pytest.fixture(params=LOADS, scope="module")
def played(request, tmp_path_factory):
    name, seed = request.param.rsplit("-", 1)
    engine, script = FAMILIES[name].engine, make_script(FAMILIES[name], int(seed), ATTACHED_STEPS)
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDTRACE_RUN_DIR", str(folder / "whole"))
        traced = play_on(Deciding(traced_class, **engine), script)
        traced.scheduler._schedtrace_recorder.close()
    visits = {}
    for number, (begin, end) in enumerate(WINDOWS):
        visits[begin] = lambda the, run=folder / str(number): the.start_recording(run, None, hash_ids=False)
        visits[end] = lambda the: the.stop_recording()
    visited = play_on(Switched(visits, **engine), script)
    whole = read_run(folder / "whole").traces[0]
    windows = [read_run(folder / str(number)).traces[0] for number in range(len(WINDOWS))]
    return SimpleNamespace(
        plain=Deciding(**engine).scheduler,
        traced=traced,
        visited=visited,
        whole=whole,
        windows=windows,
        timeline=make_timeline(whole),
        attached=[make_timeline(window) for window in windows],
        name=name,
    )


def test_the_scheduler_decides_as_the_traced_one(played):
    """``test_oracle.py`` compares the traced one's decisions with the untouched scheduler's."""
    assert first_difference(played.traced.decisions, played.visited.decisions) is None


def test_nothing_is_left(played):
    scheduler = played.visited.scheduler
    assert type(scheduler) is type(played.plain)
    assert vars(scheduler).keys() == vars(played.plain).keys()
    assert [name for name in vars(played.visited.core) if name.startswith("_")] == []


def test_steps_exits_and_caps_are_those_of_a_trace_from_the_start(played):
    for (begin, end), window in zip(WINDOWS, played.windows, strict=True):
        assert window.steps.height == end - begin
        here = pl.col("step").is_between(begin, end, closed="left")
        for table in ("exits", "caps", "preempted"):
            of_whole, of_window = played.whole.large[table].filter(here), window.large[table]
            if table == "preempted":  # by a reset right before: nobody was there to see it
                of_whole = of_whole.filter(pl.col("in_schedule") | (pl.col("step") > begin))
            of_whole = of_whole.with_columns(pl.col("step") - begin)
            rows = [one.drop("start_us", "trial").collect() for one in (of_whole, of_window)]
            assert rows[0].equals(rows[1]), table


TIMES = {
    "step",
    "trial",
    "start_us",
    "schedule_us",
    "output_us",
    "update_us",
    "execute_after_us",
    "execute_us",
}
NOT_KNOWN = {"recomputed_tokens", "decode_tokens", "waiting_tokens_after"}
"""What a request lost that was preempted before; the queue's tokens count its output up to the attachment."""


def test_all_else_of_a_step_is_as_in_a_trace_from_the_start(played):
    for (begin, end), window in zip(WINDOWS, played.windows, strict=True):
        here = played.whole.steps.filter(pl.col("step").is_between(begin, end - 1))
        back = window.steps["output_us"].is_not_null()  # of the last ones it was not, at the detachment
        for name in sorted(set(here.columns) - TIMES - NOT_KNOWN - {"trial"}):
            differ = window.steps[name].ne_missing(here[name])
            assert not (differ & back if name == "output_tokens" else differ).any(), name


def states_by_step(timeline):
    """(request, step) to the states and causes in it."""
    rows = timeline.request_states.drop_nulls("begin_step").select(
        "request_id", pl.int_ranges("begin_step", pl.col("end_step") + 1).alias("step"), "state", "cause"
    )
    found = {}
    for request_id, step, *state in rows.explode("step").iter_rows():
        found.setdefault((request_id, step), set()).add(tuple(state))
    return found


def test_requests_are_in_the_states_that_a_trace_from_the_start_has(played):
    whole = states_by_step(played.timeline)
    for (begin, end), attached in zip(WINDOWS, played.attached, strict=True):
        told = states_by_step(attached)
        known = {
            (name, step - begin): states for (name, step), states in whole.items() if begin <= step < end
        }
        differ = {at for at in told.keys() | known.keys() if told.get(at) != known.get(at)}
        # What they had lost is not known, or not whether a token was in flight.
        lost = (pl.col("state") == "preempted") | (pl.col("num_preemptions") > 0)
        preempted = set(attached.present.filter(lost)["request_id"])
        assert {name for name, _ in differ} <= preempted
        # A step that passes over one whose recomputed tokens are in flight names no state of it.
        assert all(known.get(at, {("recompute", None)}) == {("recompute", None)} for at in differ)


def test_the_waiting_queue_begins_with_those_who_waited(played):
    if played.name in SESSIONS:
        pytest.skip("the queue of sessions cannot be told from a trace")
    for (begin, _), attached in zip(WINDOWS, played.attached, strict=True):
        assert attached.mismatches.is_empty()
        for step in attached.steps["step"]:
            told, known = (
                waiting_after(attached.waits, step).select("request_id", "preempted"),
                waiting_after(played.timeline.waits, begin + step).select("request_id", "preempted"),
            )
            assert told.equals(known), step


def test_who_was_there_is_no_arrival_and_has_only_figures_that_are_known(played):
    went = {one["request_id"]: one for one in played.whole.finishes.to_dicts()}
    for attached in played.attached:
        there = dict(attached.present.select("request_id", "output_tokens").rows())
        assert there.keys().isdisjoint(attached.arrivals["request_id"])
        for gone in attached.finishes.to_dicts():
            name = gone["request_id"]
            assert gone["output_tokens"] == went[name]["output_tokens"]
            if gone["first_token_us"] is None:  # it has come before, or was in flight
                assert went[name]["first_token_us"] is None or name in there
            else:
                assert not there.get(name)
        outcomes = engine_sums(attached).counts
        assert outcomes["arrived"] == attached.first_arrivals.height
        assert outcomes["present"] == len(there)
        assert not came_at_once(attached)


@pytest.mark.parametrize("played", ["async_mixed-1"], indirect=True)
def test_every_command_takes_an_attached_trace(played, tmp_path):
    folder, other = (str(window.path.parent) for window in played.windows[:2])
    name = played.windows[0].present["request_id"][0]
    for command in (
        ["analyze", folder, "--details"],
        ["analyze", folder, "--format", "json", "--last", "0.02s"],
        ["step", folder, "0"],
        ["request", folder, name],
        ["diff", folder, other],
        ["export", folder, "--output", str(tmp_path / "tables")],
        ["export", folder, "--to", "chrome", "--output", str(tmp_path)],
        ["report", folder, "--output", str(tmp_path / "report.html")],
        ["replay", folder],
    ):
        shown = CliRunner().invoke(app, command)
        assert shown.exception is None or isinstance(shown.exception, SystemExit), command
        if command[0] in {"analyze", "diff"}:
            assert "present when the recording began" in " ".join(shown.output.split()), command
    assert "present when the recording began" in " ".join(
        CliRunner().invoke(app, ["request", folder, name]).output.split()
    )
