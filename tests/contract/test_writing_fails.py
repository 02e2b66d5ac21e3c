"""Whatever happens to the trace file: the scheduler decides as the plain one, and one warning says so."""

import errno
import os
import re
import shutil
import time
from functools import partial
from pkgutil import resolve_name

import pytest

pytest.importorskip("vllm")

from schedtrace.read.run import read_run
from schedtrace.record import run_folders, trace_files, writer
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver as Engine
from tests.contract.deciding import LOAD, Deciding, decisions, failing_from, first_difference, num_steps
from tests.contract.loads import under_load
from tests.disks import small_disk

pytestmark = pytest.mark.vllm

STEP = 30
STEP_LINE = re.compile(rb'"type":"(?:step|delta)"')
DISK_IS_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(autouse=True)
def _drained_often(monkeypatch):
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 0.01)


@pytest.fixture
def _written_at_once(monkeypatch):
    monkeypatch.setattr(writer, "WRITE_LATEST_NS", 0)
    monkeypatch.setattr(writer, "WRITE_AFTER_ROWS", 10)


def stopped(folder, error):
    """The only warning."""
    return [f"schedtrace: recording to {folder / 'engine-0.jsonl'} stopped: {error!r}; serving continues"]


@pytest.mark.parametrize(
    "broken", ["writer.Assembler.step_line", "writer.Assembler.side_fields", "assemble.to_lines"]
)
def test_an_error_in_the_writers_thread_stops_the_recording_only(
    broken, plain, recording, warnings, monkeypatch
):
    name, error = f"schedtrace.record.{broken}", RuntimeError("broken")
    monkeypatch.setattr(name, failing_from(10, resolve_name(name), error))
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    assert warnings == stopped(recording, error)
    [trace] = read_run(recording).traces
    assert (trace.notices, trace.end) == ([f"recording stopped: {error!r}"], None)


class FullDisk:
    """The module ``os`` with room for so many bytes; the last write is cut off in the middle of a line."""

    def __init__(self, room):
        self.room = room

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, file, data):
        if not self.room:
            raise DISK_IS_FULL
        written = os.write(file, data[: self.room])
        self.room -= written
        return written


@pytest.fixture
def mounted(tmp_path, monkeypatch):
    """A disk of 64 KiB that everything is recorded to."""
    with small_disk(tmp_path / "disk", 64) as disk:
        monkeypatch.setenv("SCHEDTRACE_RUN_DIR", str(disk / "run"))
        monkeypatch.setenv("SCHEDTRACE_LINES", "full")  # or all of it would fit
        yield disk


@pytest.mark.usefixtures("_written_at_once")
@pytest.mark.parametrize("is_real", [False, True])
def test_a_disk_that_fills_up_ends_the_trace_with_a_whole_line(
    is_real, plain, request, warnings, monkeypatch
):
    folder = request.getfixturevalue("mounted") / "run" if is_real else request.getfixturevalue("recording")
    if not is_real:
        monkeypatch.setattr(trace_files, "os", FullDisk(room=50_000))
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    assert warnings == stopped(folder, DISK_IS_FULL)
    [trace] = read_run(folder).traces
    assert (trace.problems.garbled_lines, trace.problems.truncated) == ([], False)
    assert trace.problems.unclosed
    assert trace.steps["step"].to_list() == list(range(trace.steps.height))
    assert 0 < trace.steps.height < num_steps(plain)
    if is_real:
        assert trace.notices in ([], [f"recording stopped: {DISK_IS_FULL!r}"])  # if the disk had room for it


@pytest.mark.usefixtures("recording")
def test_nothing_piles_up_once_the_disk_is_full(monkeypatch):
    monkeypatch.setattr(trace_files, "os", FullDisk(room=50_000))
    engine = under_load(partial(Engine, traced_class), "tight_kv")
    recorder = engine.scheduler._schedtrace_recorder
    held = [recorder._preempted, recorder._in_flight, recorder.writer._pending]
    held += [recorder.writer.arrived, recorder.writer.finished]
    assert not recorder.active
    assert sum(map(len, held)) < 10 < len(engine.requests)


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("is_real", [False, True])
def test_a_disk_without_room_for_the_header_means_no_recording(
    is_real, plain, request, warnings, monkeypatch
):
    if is_real:
        with pytest.raises(OSError, match="No space"):
            (request.getfixturevalue("mounted") / "fills").write_bytes(b"x" * 65537)
    else:
        monkeypatch.setattr(trace_files, "os", FullDisk(room=10))
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    [warning] = warnings
    assert warning.startswith(f"schedtrace: not recording: OSError({errno.ENOSPC}, ")


def decisions_with(accident):
    """The decisions of a traced engine to whose writer this happens before step ``STEP``."""

    class Unlucky(Deciding):
        def schedule(self, *args):
            if self.scheduler.current_step == STEP:
                of_engine = self.scheduler._schedtrace_recorder.writer
                while len(STEP_LINE.findall(of_engine.path.read_bytes())) < STEP:
                    time.sleep(0.01)
                accident(of_engine)
            return super().schedule(*args)

    return under_load(partial(Unlucky, traced_class), *LOAD).decisions


def put_in_its_place(path, flags):
    def accident(of_engine):
        other = os.open(path, flags)
        os.dup2(other, of_engine._output._file)
        os.close(other)

    return accident


UNWRITABLE = {
    "the disk is full": (put_in_its_place("/dev/full", os.O_WRONLY), errno.ENOSPC),
    "the file was closed": (lambda of_engine: os.close(of_engine._output._file), errno.EBADF),
    "the file is read-only": (put_in_its_place("/dev/null", os.O_RDONLY), errno.EBADF),
}


@pytest.mark.usefixtures("_written_at_once")
@pytest.mark.parametrize(("accident", "code"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_file_that_can_be_written_no_more_keeps_what_it_has(accident, code, plain, recording, warnings):
    assert first_difference(plain, decisions_with(accident)) is None
    assert warnings == stopped(recording, OSError(code, os.strerror(code)))
    [trace] = read_run(recording).traces
    assert trace.steps["step"].to_list() == list(range(STEP))
    problems = trace.problems
    assert (problems.unclosed, problems.garbled_lines, problems.truncated) == (True, [], False)


@pytest.mark.usefixtures("_written_at_once")
def test_a_run_folder_that_is_removed_is_noticed(plain, recording, warnings):
    assert first_difference(plain, decisions_with(lambda _: shutil.rmtree(recording))) is None
    removed = FileNotFoundError(errno.ENOENT, "the file was removed while it was written")
    assert warnings == stopped(recording, removed)
    assert not recording.exists()


@pytest.mark.usefixtures("_written_at_once")
def test_a_run_folder_that_is_moved_is_written_on(plain, recording, tmp_path, warnings):
    assert first_difference(plain, decisions_with(lambda _: recording.rename(tmp_path / "moved"))) is None
    [trace] = read_run(tmp_path / "moved").traces
    assert trace.steps.height == trace.end.steps == num_steps(plain)
    assert warnings == []


@pytest.mark.parametrize("death", [SystemExit("killed"), KeyboardInterrupt("killed")])
def test_a_writer_thread_that_is_killed_says_so_and_stops_the_recording_only(
    death, plain, recording, warnings, monkeypatch
):
    work = writer.Writer._work

    def killed(self, *, last):
        if self.path.parent != recording:  # an engine of another test, not closed
            return work(self, last=last)
        raise death

    monkeypatch.setattr(writer.Writer, "_work", killed)
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    assert warnings == stopped(recording, death)
    [trace] = read_run(recording).traces
    assert (trace.notices, trace.end) == ([f"recording stopped: {death!r}"], None)


def test_a_writer_thread_that_died_costs_no_step_once_the_engine_ends(
    plain, recording, warnings, monkeypatch
):
    monkeypatch.setattr(writer.Writer, "_run", lambda _: None)
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    [trace] = read_run(recording).traces
    assert trace.steps.height == trace.end.steps == num_steps(plain)
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
