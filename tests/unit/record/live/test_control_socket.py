"""Who may ask a process over its socket, and what happens to what is no question."""

import contextlib
import errno
import os
import queue
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from loguru import logger

from schedtrace.model import live
from schedtrace.model.live import AskStatus, AskTimes, Done, Refused, SquattedError
from schedtrace.record.live import control_answers, control_socket
from schedtrace.record.live.control_socket import ControlSocket, ask_process


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "FOLDER", tmp_path)
    return tmp_path / f"schedtrace-{os.geteuid()}"


@pytest.fixture
def listener():
    asked = []

    def answer(question):
        asked.append(question)
        if question == AskStatus():
            msg = "not now"
            raise ValueError(msg)
        return Done()

    made = ControlSocket(answer)
    made.asked = asked
    yield made
    made.close()


def sent(path, data):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(2**16)


def test_only_its_user_can_enter_the_folder(listener, folder):
    assert listener.path == folder / f"{os.getpid()}.sock"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(listener.path.stat().st_mode) == 0o600


def test_questions_are_answered_one_after_the_other(listener):
    assert [ask_process(listener.path, AskTimes(on=on), Done, 60) for on in (True, False)] == [Done(), Done()]
    assert listener.asked == [AskTimes(on=True), AskTimes(on=False)]


def test_what_an_answer_raises_is_a_refusal(listener):
    assert ask_process(listener.path, AskStatus(), Done, 60) == Refused(why="not now")


@pytest.mark.parametrize("line", [b"{}\n", b'{"ask":"burn"}\n', b"\xff\n", b'{"ask":"times"}\n'])
def test_what_is_no_question_is_refused_and_the_next_one_answered(listener, line):
    answer = msgspec.json.decode(sent(listener.path, line), type=Refused)
    assert answer.why.startswith("this schedtrace does not understand the question")
    assert ask_process(listener.path, AskTimes(on=True), Done, 60) == Done()


@pytest.mark.parametrize("data", [b"", b"no newline", b"x" * (control_socket.LONGEST_ASK + 1)])
def test_who_says_no_line_gets_no_answer_and_the_next_one_does(listener, data):
    with contextlib.suppress(ConnectionResetError):
        assert sent(listener.path, data) == b""
    assert ask_process(listener.path, AskTimes(on=True), Done, 60) == Done()


@pytest.mark.parametrize(("user", "may"), [(os.geteuid(), True), (0, True), (os.geteuid() + 12345, False)])
def test_another_user_may_not_ask(listener, monkeypatch, user, may):
    class Credentials(struct.Struct):
        def unpack(self, _):
            return 1, user, 1

    monkeypatch.setattr(control_socket, "CREDENTIALS", Credentials("3i"))
    answer = ask_process(listener.path, AskTimes(on=True), Done, 60)
    refused = Refused(why=f"user {user} may not ask a process of user {os.geteuid()}")
    assert answer == (Done() if may else refused)
    assert listener.asked == ([AskTimes(on=True)] if may else [])


def test_a_folder_that_others_may_enter_is_not_used(folder):
    folder.mkdir(mode=0o755)
    with pytest.raises(SquattedError, match=r"may be entered by other users \(mode 0755\)"):
        ControlSocket(lambda _: Done())


def test_a_link_in_the_place_of_the_folder_is_not_followed(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SquattedError, match="is a link"):
        ControlSocket(lambda _: Done())


def test_nothing_is_left_once_it_is_closed(listener):
    listener.close()
    assert not listener.path.exists()
    listener._thread.join(60)
    assert not listener._thread.is_alive()
    with pytest.raises(FileNotFoundError):
        ask_process(listener.path, AskStatus(), Done, 1)


def test_the_socket_of_a_killed_process_of_this_number_is_replaced(folder):
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / f"{os.getpid()}.sock"))
    made = ControlSocket(lambda _: Done())
    assert ask_process(made.path, AskTimes(on=True), Done, 60) == Done()
    made.close()


@pytest.fixture
def busy():
    """A socket whose answers, but for the status, wait for ``goes_on``."""
    begun, goes_on = threading.Event(), threading.Event()

    def answer(question):
        if question != AskStatus():
            begun.set()
            goes_on.wait(60)
        return Done()

    made = ControlSocket(answer)
    made.begun, made.goes_on = begun, goes_on
    yield made
    goes_on.set()
    made.close()


def test_the_status_is_answered_while_another_question_is(busy):
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(ask_process(busy.path, AskTimes(on=True), Done, 60))
    )
    thread.start()
    assert busy.begun.wait(60)
    assert ask_process(busy.path, AskStatus(), Done, 60) == Done()
    assert answers == []
    busy.goes_on.set()
    thread.join()
    assert answers == [Done()]


def test_no_more_than_a_few_are_listened_to_at_once(listener):
    with contextlib.ExitStack() as stack:
        for _ in range(control_socket.MOST_AT_ONCE):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(listener.path))
        with pytest.raises(TimeoutError):
            ask_process(listener.path, AskTimes(on=True), Done, 0.1)
    assert ask_process(listener.path, AskTimes(on=True), Done, 60) == Done()


def trickle(connection):
    for _ in range(1200):
        connection.sendall(b"x")
        time.sleep(0.05)


def test_a_question_that_comes_byte_by_byte_has_one_deadline(listener, monkeypatch):
    monkeypatch.setattr(control_socket, "MOST_S", 0.2)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(listener.path))
        with pytest.raises(BrokenPipeError):
            trickle(connection)


def test_who_leaves_before_the_answer_puts_nothing_into_the_servers_log():
    """Which loguru writes from DEBUG on, where nobody has set it up."""
    gone, levels = threading.Event(), queue.Queue()
    sink = logger.add(lambda message: levels.put(message.record["level"].name), level="TRACE")
    answers = ControlSocket(lambda _: Done() if gone.wait(60) else None)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(answers.path))
        connection.sendall(msgspec.json.encode(AskTimes(on=True)) + b"\n")
    gone.set()
    assert levels.get(timeout=60) == "TRACE"
    logger.remove(sink)
    answers.close()


def test_a_forked_child_does_not_keep_the_socket(listener):
    inode = os.fstat(listener._socket.fileno()).st_ino
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(read, 1)
    has = {str(one.readlink()) for one in Path(f"/proc/{child}/fd").iterdir()}
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert f"socket:[{inode}]" not in has


def test_a_forked_child_that_closes_it_leaves_it_to_its_parent(listener):
    child = os.fork()
    if child == 0:
        listener.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert ask_process(listener.path, AskTimes(on=True), Done, 60) == Done()


def test_a_process_of_the_same_number_that_listens_is_left_alone(listener):
    with pytest.raises(OSError, match="somebody listens there already") as raised:
        ControlSocket(lambda _: Done())
    assert raised.value.errno == errno.EADDRINUSE
    assert ask_process(listener.path, AskTimes(on=True), Done, 60) == Done()
    assert list(listener.path.parent.iterdir()) == [listener.path]


def test_a_socket_that_has_taken_its_place_stays(listener, monkeypatch):
    monkeypatch.setattr(control_socket, "_is_alive", lambda _path: False)  # as if both began at once
    other = ControlSocket(lambda _: Done())
    listener.close()
    assert ask_process(other.path, AskTimes(on=True), Done, 60) == Done()
    other.close()
    assert not other.path.exists()


CHILD = """
import sys
from schedtrace.model.live import Stacks
from schedtrace.record.live.control_socket import ControlSocket
made = ControlSocket(lambda _: Stacks(text="Thread 1\\n  File x"))
print(made.path, flush=True)
sys.stdin.read()
"""


def test_workers_say_where_their_threads_are_and_of_a_stopped_one_its_state(monkeypatch):
    monkeypatch.setattr(live, "FOLDER", Path("/tmp"))  # noqa: S108  # where a child makes its socket
    monkeypatch.setattr(control_socket, "STACKS_S", 60)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", CHILD], **pipes) as worker:
        worker.stdout.readline()
        answer = control_socket.worker_stacks()
        os.kill(worker.pid, signal.SIGSTOP)
        os.waitpid(worker.pid, os.WUNTRACED)
        monkeypatch.setattr(control_socket, "STACKS_S", 0.2)
        stopped = control_socket.worker_stacks()
        os.kill(worker.pid, signal.SIGCONT)
        worker.stdin.close()
    assert answer == {str(worker.pid): [f"worker with pid {worker.pid}:", "Thread 1", "  File x"]}
    assert stopped == {
        str(worker.pid): [f"worker with pid {worker.pid} (stopped by a signal) does not answer: timed out"]
    }


def test_it_listens_again_after_it_could_not(monkeypatch, warnings):
    """Where the process had no descriptor left, for instance."""
    monkeypatch.setattr(control_socket, "AGAIN_S", 0.001)
    real, failing, asked = socket.socket.accept, [errno.EMFILE, errno.EMFILE, errno.ENFILE], queue.Queue()

    def accept(listens):
        if failing:
            raise OSError(failing.pop(), "Too many open files")
        return real(listens)

    monkeypatch.setattr(socket.socket, "accept", accept)
    made = ControlSocket(lambda question: asked.put(question) or Done())
    assert ask_process(made.path, AskTimes(on=True), Done, 60) == Done()
    made.close()
    assert not made._thread.is_alive()
    said = f"schedtrace: nobody can ask process {os.getpid()} for now: [Errno 23] Too many open files"
    assert (warnings, failing) == ([said], [])


def test_an_answer_with_a_lone_surrogate_is_sent():
    made = ControlSocket(lambda _: Refused(why="no \udcff"))
    assert ask_process(made.path, AskTimes(on=True), Done, 60) == Refused(why="no \\udcff")
    made.close()


def test_where_the_folder_is_somebody_elses_the_log_says_so(folder, tmp_path, warnings):
    folder.symlink_to(tmp_path)
    with control_answers._listening(lambda _: Done()):
        pass
    [said] = warnings
    assert said.startswith(
        f"schedtrace: nobody can attach to process {os.getpid()}: {folder} is a link: no en"
    )
