"""Whatever happens to the trace file: the scheduler decides as the plain one, and one warning says so."""

import errno
import os
from functools import partial
from pkgutil import resolve_name

import pytest

pytest.importorskip("vllm")

from schedtrace.read.run import read_run
from schedtrace.record import run_folders, trace_files, writer
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver as Engine
from tests.contract.deciding import LOAD, decisions, failing_from, first_difference
from tests.contract.loads import under_load

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "broken", ["writer.Assembler.step_line", "writer.Assembler.side_fields", "assemble.to_lines"]
)
def test_an_error_in_the_writers_thread_stops_the_recording_only(
    broken, plain, recording, warnings, monkeypatch
):
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 0.01)
    name = f"schedtrace.record.{broken}"
    monkeypatch.setattr(name, failing_from(10, resolve_name(name), RuntimeError("broken")))
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    path = recording / "engine-0.jsonl"
    told = "RuntimeError('broken')"
    assert warnings == [f"schedtrace: recording to {path} stopped: {told}; serving continues"]
    [trace] = read_run(recording).traces
    assert trace.notices == [f"recording stopped: {told}"]
    assert trace.end is None


class FullDisk:
    """The module ``os`` with room for so many bytes; the last write is cut off in the middle of a line."""

    def __init__(self, room):
        self.room = room

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, file, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(file, data[: self.room])
        self.room -= written
        return written


def test_a_disk_that_fills_up_ends_the_trace_with_a_whole_line(plain, recording, warnings, monkeypatch):
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 0.01)
    monkeypatch.setattr(writer, "WRITE_AFTER_ROWS", 10)
    monkeypatch.setattr(trace_files, "os", FullDisk(room=50_000))
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    path = recording / "engine-0.jsonl"
    full = f"OSError({errno.ENOSPC}, {os.strerror(errno.ENOSPC)!r})"
    assert warnings == [f"schedtrace: recording to {path} stopped: {full}; serving continues"]
    [trace] = read_run(recording).traces
    assert (trace.problems.garbled_lines, trace.problems.truncated) == ([], False)
    assert trace.problems.unclosed
    assert trace.steps["step"].to_list() == list(range(trace.steps.height))
    assert 0 < trace.steps.height < sum("tokens" in decision for decision in plain)


@pytest.mark.usefixtures("recording")
def test_nothing_piles_up_once_the_disk_is_full(monkeypatch):
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 0.01)
    monkeypatch.setattr(trace_files, "os", FullDisk(room=50_000))
    engine = under_load(partial(Engine, traced_class), "tight_kv")
    recorder = engine.scheduler._schedtrace_recorder
    held = [recorder._preempted, recorder._in_flight, recorder.writer._pending]
    held += [recorder.writer.arrived, recorder.writer.finished]
    assert not recorder.active
    assert sum(map(len, held)) < 10 < len(engine.requests)


@pytest.mark.usefixtures("recording")
def test_a_disk_without_room_for_the_header_means_no_recording(plain, warnings, monkeypatch):
    monkeypatch.setattr(trace_files, "os", FullDisk(room=10))
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    [warning] = warnings
    assert warning.startswith(f"schedtrace: not recording: OSError({errno.ENOSPC}, ")


@pytest.mark.parametrize("death", [SystemExit("killed"), KeyboardInterrupt("killed")])
def test_a_writer_thread_that_is_killed_says_so_and_stops_the_recording_only(
    death, plain, recording, warnings, monkeypatch
):
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 0.01)
    work = writer.Writer._work

    def killed(self, *, last):
        if self.path.parent != recording:  # an engine of another test, not closed
            return work(self, last=last)
        raise death

    monkeypatch.setattr(writer.Writer, "_work", killed)
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    path = recording / "engine-0.jsonl"
    assert warnings == [f"schedtrace: recording to {path} stopped: {death!r}; serving continues"]
    [trace] = read_run(recording).traces
    assert (trace.notices, trace.end) == ([f"recording stopped: {death!r}"], None)


def test_a_writer_thread_that_died_costs_no_step_once_the_engine_ends(
    plain, recording, warnings, monkeypatch
):
    monkeypatch.setattr(writer.Writer, "_run", lambda _: None)
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    [trace] = read_run(recording).traces
    assert trace.steps.height == trace.end.steps == sum("tokens" in decision for decision in plain)
    assert warnings == []


@pytest.mark.parametrize("where", ["run", "run/below"])
def test_a_file_in_the_run_folders_place_means_no_recording(where, plain, tmp_path, warnings, monkeypatch):
    (tmp_path / "run").write_text("in the way")
    monkeypatch.setenv("SCHEDTRACE_RUN_DIR", str(tmp_path / where))
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    [warning] = warnings
    assert warning.startswith("schedtrace: not recording: ")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.usefixtures("recording")
def test_a_run_folder_that_may_not_be_written_means_no_recording(plain, warnings, monkeypatch):
    class ReadOnly(FullDisk):
        def open(self, path, *_):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(run_folders, "os", ReadOnly(room=0))
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    [warning] = warnings
    assert warning.startswith("schedtrace: not recording: PermissionError(")
