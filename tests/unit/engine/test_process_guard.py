"""The guards with a toy for an engine process; ``tests/e2e/test_ends.py`` kills real ones."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from schedtrace.model.manifest import Manifest, read_manifest, write_manifest
from schedtrace.record import switches
from schedtrace.record.processes import children

TOY = """
import os, signal, subprocess, sys, time
from schedtrace.engine import child, process_guard

STUBBORN = '''
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
time.sleep(600)
'''

def toy(pipe):
    said = subprocess.PIPE
    spawned = subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True, stdout=said)
    spawned.stdout.readline()
    forked = os.fork() or time.sleep(600)
    if not (between := os.fork()):
        os.setsid()
        daemon = os.fork() or time.sleep(600)
        os.write(pipe, f"{daemon} ".encode())
        os._exit(0)
    os.waitpid(between, 0)
    os.write(pipe, f"{spawned.pid} {forked} {os.getpid()}\\n".encode())
    END

child.run_commands = toy
process_guard.guard_engine()
"""
LIMIT_S = 60.0


class Guarded:
    """A toy below its guards; the test is the command."""

    def __init__(self, folder, end):
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TOY.replace("END", end), str(write)],
            stdin=subprocess.PIPE,
            pass_fds=[write],
            start_new_session=True,
            env={**os.environ, switches.RUN_DIR: str(folder)},
        )
        os.close(write)
        with os.fdopen(read) as events:
            self.started = [int(pid) for pid in events.readline().split()]
        *_, self.toy = self.started
        self.outer = self.process.pid
        (self.inner,) = children(self.outer)

    def await_guards_in(self, folder):
        """Until both guards have gone to the run's folder."""
        until = time.monotonic() + LIMIT_S
        for pid in (self.outer, self.inner):
            while Path(f"/proc/{pid}/cwd").readlink() != folder.resolve():
                assert time.monotonic() < until, "not in the run's folder"
                time.sleep(0.02)

    def await_handlers(self):
        """Until the guards and the toy all have their handlers of SIGTERM."""
        until = time.monotonic() + LIMIT_S
        for pid in (self.outer, self.inner, self.toy):
            while not self._caught(pid) >> signal.SIGTERM - 1 & 1:
                assert time.monotonic() < until, "no handler of SIGTERM"
                time.sleep(0.02)

    @staticmethod
    def _caught(pid):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))

    def left(self):
        """Those that still run, after at most the limit."""
        until = time.monotonic() + LIMIT_S
        left = {Path(f"/proc/{pid}") for pid in (self.inner, *self.started)}
        while left and time.monotonic() < until:
            time.sleep(0.02)
            left = {process for process in left if process.exists()}
        return [process.name for process in left]


RUNNING = Manifest(schedtrace_version="1", status="running", started_at="")


@pytest.fixture
def guarded(tmp_path):
    write_manifest(tmp_path, RUNNING)
    made = []

    def start(end="time.sleep(600)", folder=tmp_path):
        made.append(Guarded(folder, end))
        return made[-1]

    yield start
    for one in made:
        one.process.stdin.close()
        one.process.wait()


def status(folder):
    manifest = read_manifest(folder)
    return manifest.status, manifest.error


def test_without_the_command_all_its_processes_end_and_the_manifest_says_why(guarded, tmp_path):
    toy = guarded()
    toy.process.stdin.close()  # the kernel does so when the command is killed
    assert toy.left() == []
    assert toy.process.wait() == -signal.SIGTERM  # as the toy ended
    assert status(tmp_path) == ("failed", "the schedtrace command was killed")


@pytest.mark.parametrize("victim", ["outer", "inner", "toy"])
def test_whoever_is_killed_nobody_is_left(guarded, tmp_path, victim):
    toy = guarded()
    os.kill(getattr(toy, victim), signal.SIGKILL)
    assert toy.left() == []
    assert toy.process.wait() == -signal.SIGKILL
    assert status(tmp_path) == ("running", None)  # the command is there to say what happened


def test_the_command_and_the_outer_guard_may_be_killed_together(guarded, tmp_path):
    toy = guarded()
    os.kill(toy.outer, signal.SIGKILL)
    toy.process.stdin.close()
    assert toy.left() == []
    assert status(tmp_path) == ("failed", "the schedtrace command was killed")


def test_an_engine_process_that_ends_leaves_nobody_and_its_exit_code(guarded, tmp_path):
    toy = guarded("os._exit(7)")
    assert toy.process.wait(LIMIT_S) == 7
    assert toy.left() == []
    assert status(tmp_path) == ("running", None)


def test_sigterm_reaches_the_engine_process(guarded):
    toy = guarded("signal.signal(signal.SIGTERM, lambda *_: os._exit(3)); time.sleep(600)")
    toy.await_handlers()
    toy.process.terminate()
    assert toy.process.wait(LIMIT_S) == 3


def test_a_run_that_took_the_folder_since_keeps_its_manifest(guarded, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    toy = guarded(folder=folder)
    toy.await_guards_in(folder)
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    write_manifest(folder, RUNNING)
    toy.process.stdin.close()
    assert toy.left() == []
    toy.process.wait()
    assert status(folder) == ("running", None)
