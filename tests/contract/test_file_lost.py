"""Whatever happens to a file in mid-run: the scheduler decides as the plain one, and one warning says so."""

import errno
import os
import re
import shutil
import subprocess
import time
from functools import partial

import pytest

pytest.importorskip("vllm")

from schedtrace.read.run import read_run
from schedtrace.record import writer
from schedtrace.record.traced import traced_class
from tests.contract.deciding import LOAD, Deciding, decisions, first_difference
from tests.contract.loads import under_load

pytestmark = pytest.mark.vllm

STEP = 30
STEP_LINE = re.compile(rb'"type":"(?:step|delta)"')


@pytest.fixture(autouse=True)
def _written_at_once(monkeypatch):
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 0.01)
    monkeypatch.setattr(writer, "WRITE_LATEST_NS", 0)
    monkeypatch.setattr(writer, "WRITE_AFTER_ROWS", 10)


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


def close(of_engine):
    os.close(of_engine._output._file)


UNWRITABLE = {
    "the disk is full": (put_in_its_place("/dev/full", os.O_WRONLY), errno.ENOSPC),
    "the file was closed": (close, errno.EBADF),
    "the file is read-only": (put_in_its_place("/dev/null", os.O_RDONLY), errno.EBADF),
}


@pytest.mark.parametrize(("accident", "code"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_file_that_can_be_written_no_more_keeps_what_it_has(accident, code, plain, recording, warnings):
    assert first_difference(plain, decisions_with(accident)) is None
    path = recording / "engine-0.jsonl"
    why = repr(OSError(code, os.strerror(code)))
    assert warnings == [f"schedtrace: recording to {path} stopped: {why}; serving continues"]
    [trace] = read_run(recording).traces
    assert trace.steps["step"].to_list() == list(range(STEP))
    problems = trace.problems
    assert (problems.unclosed, problems.garbled_lines, problems.truncated) == (True, [], False)


def test_a_run_folder_that_is_removed_is_noticed(plain, recording, warnings):
    assert first_difference(plain, decisions_with(lambda _: shutil.rmtree(recording))) is None
    path = recording / "engine-0.jsonl"
    why = repr(FileNotFoundError(errno.ENOENT, "the file was removed while it was written"))
    assert warnings == [f"schedtrace: recording to {path} stopped: {why}; serving continues"]
    assert not recording.exists()


def test_a_run_folder_that_is_moved_is_written_on(plain, recording, tmp_path, warnings):
    assert first_difference(plain, decisions_with(lambda _: recording.rename(tmp_path / "moved"))) is None
    [trace] = read_run(tmp_path / "moved").traces
    assert trace.steps.height == trace.end.steps == sum("tokens" in taken for taken in plain)
    assert warnings == []


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A disk of 64 KiB that everything is recorded to."""
    mount, umount, disk = shutil.which("mount"), shutil.which("umount"), tmp_path / "disk"
    if os.geteuid() != 0 or mount is None or umount is None:
        pytest.skip("a file system can be mounted by root only")
    disk.mkdir()
    made = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    monkeypatch.setenv("SCHEDTRACE_RUN_DIR", str(disk / "run"))
    monkeypatch.setenv("SCHEDTRACE_LINES", "full")  # or all of it would fit
    yield disk
    subprocess.run([umount, "--lazy", disk], check=True)


def test_a_disk_that_fills_up_holds_whole_lines(plain, small_disk, warnings):
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    path = small_disk / "run" / "engine-0.jsonl"
    full = repr(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert warnings == [f"schedtrace: recording to {path} stopped: {full}; serving continues"]
    [trace] = read_run(small_disk / "run").traces
    assert (trace.problems.garbled_lines, trace.problems.truncated) == ([], False)
    assert trace.problems.unclosed
    assert trace.steps["step"].to_list() == list(range(trace.steps.height))
    assert 0 < trace.steps.height < sum("tokens" in taken for taken in plain)
    assert trace.notices in ([], [f"recording stopped: {full}"])  # where the disk had room for it


def test_a_disk_that_is_full_already_means_no_recording(plain, small_disk, warnings):
    with pytest.raises(OSError, match="No space"):
        (small_disk / "fills").write_bytes(b"x" * 65537)
    assert first_difference(plain, decisions(*LOAD, traced_class)) is None
    [warning] = warnings
    assert warning.startswith(f"schedtrace: not recording: OSError({errno.ENOSPC}, ")
