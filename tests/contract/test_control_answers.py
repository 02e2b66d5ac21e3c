"""What an engine answers over its socket: ids as they are written, and refusals with a next step."""

import json
import re
import socket
import time
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import urlopen

import pytest

pytest.importorskip("vllm")

from schedtrace.model.live import (
    AskAttach,
    AskDetach,
    AskMeasure,
    AskQueue,
    AskSnapshot,
    AskStatus,
    Measured,
    Refused,
)
from schedtrace.model.printable import hashed
from schedtrace.record.live import attachment, control_answers, queue_copy
from schedtrace.record.live.class_swap import RefusedError
from schedtrace.record.live.stall_causes import StallCause
from schedtrace.record.metrics.counting_recorder import CountingRecorder
from schedtrace.record.traced import RECORDERS
from schedtrace.simulate import Driver
from tests.ports import reserved_port
from tests.toys import Now, core_of

pytestmark = pytest.mark.vllm


@pytest.fixture
def engine(monkeypatch):
    """An engine with one seat, of which r0 has it and r1 waits."""
    monkeypatch.setenv("SCHEDTRACE_WATCHDOG", "off")
    monkeypatch.setattr(control_answers, "BetweenSteps", lambda _core: Now())
    driver = Driver(max_num_seqs=1)
    for name in ("r0", "r1"):
        driver.add(name, 40, 40)
    driver.step()
    made = control_answers._Engine(core_of(driver), 1)
    made.driver = driver
    yield made
    if made._attachment.attached:
        made.answer(AskDetach())


def waiting(engine):
    """Ids and causes of who waits."""
    return [(one.request_id, one.refused_for) for one in engine.answer(AskQueue()).queue.waiting]


def written(engine):
    """Make a step, and wait until it is in the trace."""
    engine.driver.step()
    writer = engine._attachment.recorder.writer
    while not writer.latest_exits:
        pass


@pytest.mark.parametrize("server", [True, False])
def test_ids_are_hashed_in_trace_and_queue_where_attach_or_the_server_asks_for_it(
    engine, tmp_path, monkeypatch, server
):
    if server:
        monkeypatch.setenv("SCHEDTRACE_HASH_IDS", "1")
    engine.answer(AskAttach(run_dir=str(tmp_path / "run"), hash_ids=not server))
    written(engine)
    assert waiting(engine) == [(hashed("r1"), "max_num_seqs")]
    assert engine._attachment.ids["r1"] == hashed("r1")
    engine.answer(AskDetach())
    assert b'"r1"' not in (tmp_path / "run" / "engine-0.jsonl").read_bytes()
    assert engine._attachment.ids["r1"] == (hashed("r1") if server else "r1")


def test_a_privacy_switch_that_is_not_understood_hides_ids_and_refuses_a_recording(
    engine, tmp_path, monkeypatch
):
    monkeypatch.setenv("SCHEDTRACE_HASH_IDS", "jawohl")
    monkeypatch.setattr(attachment.time, "sleep", lambda _s: engine.driver.step())
    assert waiting(engine) == [(hashed("r1"), "max_num_seqs")]
    with pytest.raises(RefusedError, match="its server was started with SCHEDTRACE_HASH_IDS=jawohl: "):
        engine.answer(AskAttach(run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("variable", "touched"), [("off", False), ("30s", False), ("explain,30s", True)])
def test_the_watchdog_touches_the_scheduler_only_if_it_was_asked_to(variable, touched, monkeypatch, engine):
    monkeypatch.setenv("SCHEDTRACE_WATCHDOG", variable)
    kinds = set()
    monkeypatch.setattr(
        attachment.time, "sleep", lambda _s: kinds.add(type(engine.driver.scheduler).__name__)
    )
    asked = []
    monkeypatch.setattr(control_answers, "make_watchdog", lambda *given, **_: asked.append(given[2]))
    control_answers._Engine(engine._core, 1)
    asked[0]()
    assert kinds == ({"TracedScheduler"} if touched else set())


def test_of_an_engine_that_nobody_records_the_causes_come_from_a_glance(engine, monkeypatch):
    monkeypatch.setattr(attachment.time, "sleep", lambda _s: engine.driver.step())
    assert waiting(engine) == [("r1", "max_num_seqs")]
    assert not hasattr(engine.driver.scheduler, "_schedtrace_recorder")


def test_without_a_glance_nothing_is_recorded_and_no_cause_known(engine, monkeypatch):
    glances = []
    monkeypatch.setattr(attachment.time, "sleep", glances.append)
    queue = engine.answer(AskQueue(glance=False)).queue
    assert [(entry.request_id, entry.refused_for) for entry in queue.waiting] == [("r1", None)]
    assert glances == []


@pytest.mark.parametrize("ask", [AskAttach(run_dir="/run"), AskMeasure(address="on")])
def test_an_engine_that_is_held_up_is_not_attached_to(engine, ask):
    stall = StallCause("worker", "the worker does not answer")
    engine._watchdog = SimpleNamespace(stall=stall, stalled_s=12.3)
    with pytest.raises(RefusedError) as refused:
        engine.answer(ask)
    assert str(refused.value) == (
        "it was not attached to: no step has made progress for 12 s: the worker does not answer"
    )


def test_a_snapshot_of_an_engine_without_a_ring_is_refused_with_what_can_be_done(engine, tmp_path):
    ask = AskSnapshot(run_dir=str(tmp_path / "snapshot"))
    assert engine.answer(ask) == Refused(
        why="it keeps nothing in memory: start the server with SCHEDTRACE_KEEP=120s, or schedtrace attach "
        "records from now on, without a restart"
    )
    engine.answer(AskAttach(run_dir=str(tmp_path / "run")))
    path = tmp_path / "run" / "engine-0.jsonl"
    assert engine.answer(ask) == Refused(why=f"it keeps nothing in memory, but is recorded to {path}")


def test_the_status_during_a_glance_is_that_of_an_engine_that_nobody_records(engine, monkeypatch):
    seen = []
    monkeypatch.setattr(attachment.time, "sleep", lambda _s: seen.append(engine.answer(AskStatus())))
    engine.answer(AskQueue())
    [status] = seen
    assert (status.recording, status.keeps, status.attached) == (None, None, False)


def test_after_the_disk_has_filled_every_answer_says_so(engine, tmp_path, monkeypatch):
    def full(_lines):
        raise OSError(28, "No space left on device")

    engine.answer(AskAttach(run_dir=str(tmp_path / "run")))
    written(engine)
    writer = engine._attachment.recorder.writer
    assert (engine.answer(AskStatus()).stopped, writer.incomplete_reason) == (None, None)
    monkeypatch.setattr(writer._output, "write", full)
    while writer.working:
        engine.driver.step()
        time.sleep(0.01)
    engine.driver.step()  # the recorder notices
    said = (
        r"its recording stopped 0 s ago: OSError\(28, 'No space left on device'\); "
        r"the steps from about \d+ on are missing"
    )
    status = engine.answer(AskStatus())
    assert (status.attached, status.recording) == (True, None)
    assert re.fullmatch(said, status.stopped)
    assert re.fullmatch(said, engine.answer(AskSnapshot(run_dir=str(tmp_path / "snapshot"))).why)
    assert re.fullmatch(said, engine.answer(AskDetach()).stopped)


@pytest.mark.parametrize("for_s", [-1.0, 1e11, float("inf"), float("nan")])
def test_a_time_that_no_timer_can_wait_is_refused_before_anything_is_done(engine, tmp_path, for_s):
    with pytest.raises(RefusedError, match="is not a time for a recording: at most 3"):
        engine.answer(AskAttach(run_dir=str(tmp_path / "run"), for_s=for_s))
    assert not (tmp_path / "run").exists()
    assert not hasattr(engine.driver.scheduler, "_schedtrace_recorder")


def test_an_answer_has_so_many_requests_and_counts_the_others(engine, monkeypatch):
    monkeypatch.setattr(queue_copy, "MOST_ENTRIES", 1)
    monkeypatch.setattr(attachment.time, "sleep", lambda _s: engine.driver.step())
    for name in ("r2", "r3"):
        engine.driver.add(name, 40, 40)
    found = engine.answer(AskQueue()).queue
    assert [one.request_id for one in (*found.running, *found.waiting)] == ["r0", "r1"]
    assert (found.more_running, found.more_waiting, found.num_waiting) == (0, 2, 3)


@pytest.fixture
def free_port(monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    with reserved_port() as port:
        yield port


def test_metrics_are_switched_on_and_off(engine, free_port):
    page = f"http://127.0.0.1:{free_port}"
    answer = engine.answer(AskMeasure(address=str(free_port)))
    assert answer.where == engine.answer(AskStatus()).measured == f"{page}/metrics"
    for _ in range(3):
        engine.driver.step()
    refusals = f'schedtrace_refusals_total{{cause="max_num_seqs",engine="0",model_name="tiny"}} {3.0}'
    while refusals not in urlopen(f"{page}/metrics").read().decode():
        time.sleep(0.05)
    assert json.load(urlopen(f"{page}/health")) == {"state": "busy"}
    assert waiting(engine) == [("r1", "max_num_seqs")]
    assert engine.answer(AskStatus()).recording is None
    assert engine.answer(AskMeasure(address="off")) == Measured(where=None, held_us=pytest.approx(0, abs=1e6))
    assert engine.answer(AskStatus()).measured is None
    assert type(engine.driver.scheduler).__module__.startswith("vllm.")
    with pytest.raises(URLError):
        urlopen(f"{page}/metrics")


def test_metrics_are_refused_with_a_reason(engine, free_port):
    with pytest.raises(RefusedError, match="expected on, off, a port"):
        engine.answer(AskMeasure(address="everywhere"))
    with socket.create_server(("127.0.0.1", free_port)), pytest.raises(RefusedError, match="in use"):
        engine.answer(AskMeasure(address=str(free_port)))
    assert type(engine.driver.scheduler).__module__.startswith("vllm.")


def test_spans_are_made_of_lines_and_totals_alone_are_counted(engine, free_port):
    """Asking for spans begins a recording with lines, which goes on until metrics are switched off."""

    def recorder(asked):
        engine.answer(AskMeasure(address=asked))
        return RECORDERS.look_up(engine.driver.scheduler)

    counting = recorder(str(free_port))
    assert isinstance(counting, CountingRecorder)
    assert recorder(str(free_port)) is counting
    with_lines = recorder(f"{free_port},spans=all")
    assert not isinstance(with_lines, CountingRecorder)
    assert not counting.active
    assert recorder(f"{free_port},spans=all") is with_lines
    assert recorder(str(free_port)) is with_lines
    engine.answer(AskMeasure(address="off"))
    assert isinstance(recorder(str(free_port)), CountingRecorder)
    engine.answer(AskMeasure(address="off"))


def test_metrics_go_on_after_a_recording_and_their_port_is_closed_with_them(engine, free_port, tmp_path):
    engine.answer(AskMeasure(address=str(free_port)))
    engine.answer(AskAttach(run_dir=str(tmp_path)))
    assert engine.answer(AskStatus()).attached
    engine.answer(AskDetach())
    assert engine.answer(AskStatus()).measured is not None
    engine.driver.step()
    steps = f'schedtrace_steps_total{{engine="0",model_name="tiny"}} {1.0}'
    while steps not in urlopen(f"http://127.0.0.1:{free_port}/metrics").read().decode():
        time.sleep(0.05)
    engine.answer(AskMeasure(address="off"))
