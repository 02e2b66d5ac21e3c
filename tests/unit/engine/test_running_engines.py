"""Engines are found by their sockets: those that answer and those that do not; and sockets left over."""

import os
import socket
import subprocess
import sys

import pytest

from schedtrace.cli.main import main
from schedtrace.engine import running_engines
from schedtrace.engine.running_engines import chosen, listening
from schedtrace.errors import EngineError
from schedtrace.model import live


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "FOLDER", tmp_path)
    monkeypatch.setattr(running_engines, "STATUS_S", 0.05)
    monkeypatch.setattr(running_engines, "unprepared_engines", lambda _: [])
    return live.own_folder()


@pytest.fixture
def bound(folder):
    """``bound(pid)``: a socket of this process, as if it were that one's."""
    made = []

    def bind(pid):
        made.append(socket.socket(socket.AF_UNIX))
        made[-1].bind(str(folder / f"{pid}.sock"))
        return made[-1]

    yield bind
    for one in made:
        one.close()


@pytest.fixture
def ended():
    """The process id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_an_engine_that_does_not_answer_is_named(bound, capsys):
    bound(os.getpid()).listen()
    assert listening() == ([], [os.getpid()])
    text = f"engine process {os.getpid()} has not answered for 0.05 s"
    for target in ("all", None, str(os.getpid()), str(os.getppid())):
        with pytest.raises(EngineError, match=text):
            chosen(target)
    assert main(["engines", str(os.getpid())]) == 0
    assert capsys.readouterr().out == f"{text}\n"


def test_nor_does_one_that_takes_no_more_questions(bound):
    bound(os.getpid()).listen(0)
    asking = socket.socket(socket.AF_UNIX)
    with asking:
        asking.connect(str(live.socket_of(os.getpid(), os.geteuid())))
        assert listening() == ([], [os.getpid()])


def test_a_worker_that_does_not_answer_is_no_engine(bound):
    bound(os.getpid()).listen()
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with child:
        bound(child.pid).listen()
        assert listening().silent == [os.getpid()]
        child.communicate()


@pytest.mark.parametrize("listens", [True, False])
def test_the_socket_of_a_process_that_ended_is_removed(listens, bound, ended, folder):
    made = bound(ended)
    if listens:  # a child of it may hold it open
        made.listen()
    assert listening() == ([], [])
    assert not list(folder.iterdir())


def test_that_of_one_that_is_about_to_listen_stays(bound, folder):
    bound(os.getpid())
    assert listening() == ([], [])
    assert [path.name for path in folder.iterdir()] == [f"{os.getpid()}.sock"]
