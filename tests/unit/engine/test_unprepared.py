"""Engines that began without schedtrace: found by their names, and made to listen where Python can."""

import ast
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from schedtrace.engine import unprepared
from schedtrace.errors import InputError
from schedtrace.model import live
from schedtrace.model.live import AskDetach, Detached, Refused
from schedtrace.record.live.control_socket import ask_process

TITLE = "VLLM::EngineCore_DP0"
HERE = {"PYTHONHOME": sys.base_prefix, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
"""For a Python that does not find itself by its name."""
ENGINE = """
import sys, time
from types import SimpleNamespace
class Engine:
    scheduler = SimpleNamespace(running=[], requests={})
    def run_busy_loop(self):
        exec(open(sys.argv[1]).read()) if len(sys.argv) > 1 else None
        while True:
            time.sleep(0.01)
Engine().run_busy_loop()
"""


@contextmanager
def engine(*arguments, title=TITLE):
    command = [title, "-c", ENGINE, *map(str, arguments)]
    process = subprocess.Popen(command, executable=sys.executable, env={**os.environ, **HERE})
    try:
        while ENGINE.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes():  # within execve(2)
            time.sleep(0.001)
        yield process.pid
    finally:
        process.kill()
        process.wait()
        live.socket_of(process.pid, os.geteuid()).unlink(missing_ok=True)


def test_engines_by_name_whose_process_or_one_above_is_meant():
    with engine() as pid:
        assert pid in unprepared.unprepared_engines("all")
        assert unprepared.unprepared_engines(str(pid)) == [pid]
        assert pid in unprepared.unprepared_engines(str(os.getpid()))
        assert unprepared.unprepared_engines("1234567890") == []


@pytest.mark.parametrize(
    ("title", "found"),
    [
        ("VLLM::EngineCore", True),
        ("mine::EngineCore_0", True),
        ("ray::DPEngineCoreActor.run", True),
        ("VLLM::Worker_TP0", False),
        (sys.executable, False),
    ],
)
def test_only_the_title_counts(title, found):
    with engine(os.devnull, "VLLM::EngineCore.txt", title=title) as pid:
        assert (unprepared.unprepared_engines(str(pid)) == [pid]) is found


def test_the_script_has_an_engine_listen_that_is_in_its_loop(tmp_path):
    script = tmp_path / "listen.py"
    script.write_text(unprepared.SCRIPT.format(place=str(Path(unprepared.__file__).parents[2])))
    with engine(script) as pid:
        socket = live.socket_of(pid, os.geteuid())
        until = time.monotonic() + 60
        while not socket.exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        assert ask_process(socket, AskDetach(), Detached, 20) == Refused(why="nothing is attached to it")
        assert unprepared.unprepared_engines(str(pid)) == []


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (PermissionError(1, "Operation not permitted"), "no permission to reach into it: run as root"),
        (
            RuntimeError("remote debugging is not enabled"),
            "cannot be made to: remote debugging is not enabled.",
        ),
        (None, "has not run Python code for 0.1 s: it idles, or is held up in a step"),
    ],
)
def test_an_engine_that_cannot_be_reached_into(monkeypatch, raised, said):
    scripts = []

    def remote_exec(reached, script):
        assert reached == pid
        scripts.append((Path(script), Path(script).read_text()))
        if raised is not None:
            raise raised

    monkeypatch.setattr(sys, "remote_exec", remote_exec, raising=False)
    monkeypatch.setattr(unprepared, "LISTENS_S", 0.1)
    with engine() as pid, pytest.raises(InputError, match="it") as error:
        unprepared.make_listen(str(pid))
    assert said in str(error.value)
    (script, text), (later, nothing) = scripts  # whoever could make the first anew would have it run
    assert (script.exists(), "listen_from_now_on()" in text) == (False, True)
    assert later.parent == Path(unprepared.__file__).parent
    assert [type(line) for line in ast.parse(nothing).body] == [ast.Expr]  # its docstring


def test_older_pythons_cannot_and_it_is_said_what_can_be_done(monkeypatch):
    monkeypatch.delattr(sys, "remote_exec", raising=False)
    with engine() as pid:
        unprepared.make_listen(str(pid))
        starting = unprepared.nobody_listens(str(pid))
        assert f"pid {pid} does not listen yet: it began " in starting
        assert "Else schedtrace must be installed" in starting
        assert unprepared.without_socket(pid).startswith("an engine of vLLM that is starting (for ")
        monkeypatch.setattr(unprepared, "STARTS_S", 0.0)
        assert unprepared.without_socket(pid) == "an engine of vLLM that does not listen"
        old = unprepared.nobody_listens(str(pid))
        assert f"pid {pid} does not listen: schedtrace must be installed" in old
        assert "from Python 3.14 on" in old
