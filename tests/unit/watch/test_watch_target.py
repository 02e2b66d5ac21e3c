"""Which trace is meant by a path, a process or nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from schedtrace.errors import InputError, UsageError
from schedtrace.watch.find import Target, process_target, target
from tests.unit.watch.growing import Growing


def test_what_is_meant_is_found(tmp_path, folder, growing):
    assert target(str(folder), {}, tmp_path) == Target(folder, only=True)
    assert target(str(growing.path), {}, tmp_path) == Target(growing.path, only=True)
    assert target(str(tmp_path), {}, tmp_path) == Target(tmp_path, only=False)
    assert target(None, {"SCHEDTRACE_DIR": str(tmp_path)}, tmp_path) == Target(tmp_path, only=False)
    assert target(None, {}, tmp_path) == Target(folder, only=True)
    os.utime(growing.path, (1, 1))
    with pytest.raises(UsageError, match=r"no trace grows below .* and SCHEDTRACE_DIR is not set"):
        target(None, {}, tmp_path)
    with pytest.raises(InputError, match=r"nowhere: no such file or folder, and no process id"):
        target("nowhere", {}, tmp_path, wait=False)
    with pytest.raises(InputError, match=r"nowhere/logs: no such file or folder, and no process id"):
        target("nowhere/logs", {}, tmp_path)


def test_a_file_that_is_no_trace_is_refused_and_one_that_only_begins_is_not(tmp_path):
    log, begun, pipe = (tmp_path / name for name in ("log", "begun", "pipe"))
    log.write_text("INFO server\n")
    begun.write_text('{"type":"header"')
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="log:1: not a schedtrace trace"):
        target(str(log), {}, tmp_path)
    with pytest.raises(InputError, match=r"pipe: cannot be read \(not a regular file\)"):
        target(str(pipe), {}, tmp_path)
    assert target(str(begun), {}, tmp_path) == Target(begun, only=True)


def test_a_process_without_a_readable_environment_records_nothing(monkeypatch):
    def gone(_):
        raise ProcessLookupError

    monkeypatch.setattr(Path, "read_bytes", gone)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with pytest.raises(InputError, match="records nothing"):
            process_target(process.pid)
        process.communicate(b"\n")


def test_a_process_is_found_by_its_open_trace_its_child_s_and_its_environment(tmp_path, folder):
    path = Growing(folder).path
    holds = f"import sys; file = open({str(path)!r}, 'ab'); print(flush=True); sys.stdin.read()"
    reads = holds.replace("'ab'", "'rb'")
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holds!r}])"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SCHEDTRACE_")}

    def found(code, **more):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code], env=clean | more, **pipes) as process:
            process.stdout.readline()
            try:
                return target(str(process.pid), {}, tmp_path)
            finally:
                process.stdin.close()

    assert found(starts) == Target(folder, only=True)
    idle = "import sys; print(flush=True); sys.stdin.read()"
    assert found(idle, SCHEDTRACE_DIR=str(tmp_path)) == Target(tmp_path, only=False)
    with pytest.raises(InputError, match="records nothing: start it with SCHEDTRACE_DIR=DIR"):
        found(idle)
    with pytest.raises(InputError, match="records nothing"):
        found(reads)
    with pytest.raises(InputError, match="no such process, file or folder"):
        target(str(2**22 + 1), {}, tmp_path)
