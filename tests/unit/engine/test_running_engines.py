"""Engines are found by their sockets: those that answer and those that do not; and sockets left over."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from schedtrace.cli.main import main
from schedtrace.engine import running_engines, unprepared
from schedtrace.engine.running_engines import Listening, chosen, listening_engines
from schedtrace.errors import EngineError, InputError
from schedtrace.model import live
from schedtrace.model.live import AskQueue, Detached, EngineQueue, QueueNow, Status
from schedtrace.record.live import control_socket
from schedtrace.record.live.control_socket import Peer
from schedtrace.record.processes import ThreadState


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "FOLDER", tmp_path)
    monkeypatch.setattr(running_engines, "STATUS_S", 20.0)
    monkeypatch.setattr(unprepared, "_processes", lambda _: [])
    return live.own_folder()


@pytest.fixture
def impatient(monkeypatch):
    """Shorten the deadlines of tests in which nobody answers."""
    monkeypatch.setattr(running_engines, "STATUS_S", 0.2)


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


ME = os.getpid()
SILENT = f"engine process {ME} has not answered for 0.2 s"


@pytest.mark.usefixtures("impatient")
def test_an_engine_that_does_not_answer_is_named(bound, capsys):
    bound(ME).listen()
    assert listening_engines()[:3] == ([], {ME: SILENT}, [])
    for target in ("all", None, str(ME), str(os.getppid())):
        with pytest.raises(EngineError, match=SILENT):
            chosen(target)
    assert main(["engines", str(ME)]) == 0
    assert capsys.readouterr().out == f"{SILENT}\n"


@pytest.mark.usefixtures("impatient")
def test_nor_does_one_that_takes_no_more_questions(bound):
    bound(ME).listen(0)
    asking = socket.socket(socket.AF_UNIX)
    with asking:
        asking.connect(str(live.socket_of(ME, os.geteuid())))
        assert listening_engines()[:3] == ([], {ME: SILENT}, [])


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_does_not_answer_is_no_engine(bound):
    bound(ME).listen()
    with listener(LISTENER, live.own_folder()) as child:
        assert live.socket_of(child.pid, os.geteuid()).exists()
        assert listening_engines()[:3] == ([], {ME: SILENT}, [])


LISTENER = """
import os, socket, sys, time
made = socket.socket(socket.AF_UNIX)
made.bind(f"{sys.argv[1]}/{os.getpid()}.sock")
made.listen()
print("listens", flush=True)
sys.stdin.read()
"""
FORKED = LISTENER.replace("sys.stdin", "os.fork() and os._exit(0)\nsys.stdin")
"""Ends, and leaves the socket to a child."""


@contextmanager
def listener(code, folder):
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.stdin.close()


def test_the_socket_of_a_process_that_ended_is_removed(bound, ended, folder):
    bound(ended)
    assert listening_engines()[:3] == ([], {}, [])
    assert not list(folder.iterdir())


@pytest.mark.usefixtures("impatient")
def test_also_where_a_child_that_it_forked_holds_it(folder):
    with listener(FORKED, folder) as process:
        process.wait()
        assert [path.stem for path in folder.iterdir()] == [str(process.pid)]
        assert listening_engines()[:3] == ([], {}, [])
        assert not list(folder.iterdir())


def test_that_of_one_that_is_about_to_listen_stays(bound, folder):
    bound(ME)
    assert listening_engines()[:3] == ([], {}, [])
    assert [path.name for path in folder.iterdir()] == [f"{ME}.sock"]


@pytest.mark.parametrize("pid", [pytest.param(0, id="none"), pytest.param(ME, id="this one")])
@pytest.mark.usefixtures("impatient")
def test_a_socket_that_somebody_listens_on_is_left_though_no_process_has_its_number_here(
    pid, bound, ended, folder, monkeypatch
):
    """A live engine in another PID namespace, whose number here is 0 or another one."""
    monkeypatch.setattr(control_socket, "peer_of", lambda _: Peer(pid, os.geteuid()))
    monkeypatch.setattr(running_engines, "pids_within", lambda _: [pid, ended])
    bound(ended).listen()
    said = f"engine process {ended} in another container has not answered for 0.2 s"
    assert listening_engines()[:3] == ([], {ended: said}, [])
    assert [path.stem for path in folder.iterdir()] == [str(ended)]


def test_what_is_no_socket_is_neither_asked_nor_removed(folder):
    for name in ("1.sock", "x.sock", f"{'9' * 200}.sock"):
        (folder / name).touch()
    (folder / "2.sock").mkdir()
    assert listening_engines()[:3] == ([], {}, [])
    assert len(list(folder.iterdir())) == 4


def status(pid=ME, **fields):
    defaults = {"role": "engine", "pid": pid, "engine_pid": pid, "rank": 0, "model": "tiny"}
    return Status(**{**defaults, "schedtrace_version": "1", "vllm_version": "0.32.0", **fields})


@pytest.fixture
def answering(bound):
    """``answering(pid, bytes)``: whoever connects to that socket is sent this at once."""
    threads = []

    def answer(pid, data):
        listens = bound(pid)
        listens.listen()

        def serve():
            with suppress(OSError):
                while True:
                    connection, _ = listens.accept()
                    with connection, suppress(BrokenPipeError, ConnectionResetError):
                        connection.recv(2**16)
                        connection.sendall(data)

        threads.append((threading.Thread(target=serve), listens))
        threads[-1][0].start()

    yield answer
    for thread, listens in threads:
        with suppress(OSError):
            listens.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_who_listens_and_says_to_be_another_process_is_no_engine(answering, ended, folder):
    answering(ME, msgspec.json.encode(status(1)) + b"\n")
    answering(ended, msgspec.json.encode(status(ended)) + b"\n")
    assert listening_engines()[:3] == (
        [],
        {},
        sorted(
            [
                f"{folder}/{ME}.sock is left out: its process says that it is process 1",
                f"{folder}/{ended}.sock is left out: process {ME} listens there, not process {ended}",
            ],
            key=lambda note: note.split("/")[-1],
        ),
    )


def test_the_socket_of_another_user_is_not_asked(answering, folder, monkeypatch):
    monkeypatch.setattr(control_socket, "peer_of", lambda _: Peer(ME, 12345))
    answering(ME, msgspec.json.encode(status()) + b"\n")
    note = f"{folder}/{ME}.sock is left out: user 12345 listens there, not user {os.geteuid()}"
    assert listening_engines()[:3] == ([], {}, [note])


@pytest.mark.parametrize("pid", [0, 54321])
def test_an_engine_in_another_container_answers_and_is_called_so(pid, answering, ended, capsys, monkeypatch):
    monkeypatch.setattr(control_socket, "peer_of", lambda _: Peer(pid, os.geteuid()))
    monkeypatch.setattr(running_engines, "pids_within", lambda _: [54321, ended])
    answering(ended, msgspec.json.encode(status(ended)) + b"\n")
    assert main(["engines"]) == 0
    said = f"engine 0 (pid {ended} in another container): tiny, vLLM 0.32.0, 0 running, 0 waiting\n  not rec"
    assert capsys.readouterr().out.startswith(said)


DEEP = b"[" * 100_000
FAULTS = [
    (b"", "it closed the connection without an answer"),
    (b"half", "it closed the connection after 4 bytes, within its answer"),
    # "nested too deep", unless the stack is deep enough for it (since Python 3.14, which counts no calls).
    (b'{"answer":"status","x":' + DEEP + b"\n", "its answer is n"),
    (DEEP + b"\n", "its answer is not understood (Expected `object`, got `array`)"),
    (
        msgspec.json.encode(Detached(path="x", held_us=0)) + b"\n",
        "its answer is not understood (Invalid value 'det",
    ),
    (b"\xff\n", "its answer is not understood (JSON is malformed"),
    (msgspec.json.encode(status(model="x" * 5_000_000)) + b"\n", "its answer is longer than 1 MiB"),
    (msgspec.json.encode(status(running=10**30)) + b"\n", "its answer has a number that cannot be"),
    (
        msgspec.json.encode(status()).replace(b'"running":', b'"running":' + b"1" * 400 + b',"_":') + b"\n",
        "its answer ",
    ),
    (b'{"answer":"refused","why":"no"}\n', "no"),
]


@pytest.mark.parametrize(("data", "fault"), FAULTS)
def test_one_that_misbehaves_is_named_with_what_it_does(data, fault, answering, capsys):
    answering(ME, data)
    assert main(["engines"]) == 0
    assert capsys.readouterr().out.startswith(f"engine process {ME} does not answer: {fault}")
    for command in ("queue", "attach", "snapshot", "detach"):
        assert main([command]) == 4
        assert f"engine process {ME} does not answer: {fault}" in capsys.readouterr().err


@pytest.mark.usefixtures("impatient")
def test_an_answer_has_one_deadline_however_it_trickles(bound, capsys):
    listens = bound(ME)
    listens.listen()
    over = threading.Event()

    def trickle():
        connection, _ = listens.accept()
        with connection, suppress(OSError):
            while not over.wait(0.01):
                connection.sendall(b" ")

    thread = threading.Thread(target=trickle)
    thread.start()
    assert main(["engines"]) == 0
    over.set()
    thread.join()
    assert capsys.readouterr().out == f"{SILENT}\n"


def test_long_texts_are_cut_and_made_visible(answering, capsys):
    answering(ME, msgspec.json.encode(status(model="\x1b[2J" + "x" * 500_000)) + b"\n")
    assert main(["engines"]) == 0
    out = capsys.readouterr().out
    assert r": \x1b[2Jxxx" in out
    assert len(out) < 1000


def test_others_are_answered_beside_one_that_misbehaves(answering, capsys, monkeypatch, folder):
    """Each of the two is a process of its own to who asks."""
    with listener(LISTENER, folder) as child:
        live.socket_of(child.pid, os.geteuid()).unlink()
        monkeypatch.setattr(
            control_socket,
            "peer_of",
            lambda of: Peer(int(of.getpeername()[-10:-5].split("/")[-1]), os.geteuid()),
        )
        monkeypatch.setattr(running_engines, "_is_worker", lambda *_: False)
        queue = EngineQueue(
            rank=0,
            pid=ME,
            model="tiny",
            unix_s=1,
            held_us=1,
            between_steps=True,
            policy=None,
            seats=1,
            token_budget=1,
            blocks_usable=None,
            blocks_free=None,
            running=[],
            waiting=[],
            exits=[],
        )
        answering(child.pid, DEEP + b"\n")
        monkeypatch.setattr(running_engines.RunningEngine, "answer_to", lambda *_: QueueNow(queue=queue))
        answering(ME, msgspec.json.encode(status()) + b"\n")
        assert main(["queue", "all"]) == 4
        out, err = capsys.readouterr()
    assert out.startswith(f"Engine 0 (pid {ME}): tiny\n")
    assert err.startswith(
        f"schedtrace: engine process {child.pid} does not answer: its answer is not understood"
    )


def test_a_folder_that_is_somebody_elses_is_named(folder, tmp_path, capsys):
    folder.rmdir()
    folder.symlink_to(tmp_path)
    why = live.squatted(folder, os.geteuid())
    assert why.startswith(f"{folder} is a link: no engine of user ")
    assert main(["engines"]) == 0
    assert capsys.readouterr().out == f"no engine of vLLM runs here\n{why}\n"
    assert main(["attach"]) == 3
    assert (
        capsys.readouterr().err == f"schedtrace: no engine of vLLM runs here that can be attached to; {why}\n"
    )


def test_engines_of_other_users_are_named_and_disturb_nobody(capsys, monkeypatch):
    monkeypatch.setattr(unprepared, "_processes", lambda _: [ME])
    monkeypatch.setattr(unprepared, "_user", lambda _: 12345)

    def lstat(path):
        raise PermissionError(13, "Permission denied", str(path))

    said = f"the engine of vLLM with pid {ME} is of user 12345: only that user and root may ask it"
    with monkeypatch.context() as patched:
        patched.setattr(
            Path, "lstat", lambda path: lstat(path) if "12345" in path.parent.name else os.lstat(path)
        )
        assert main(["engines"]) == 0
        assert capsys.readouterr().out == f"{said}\n"
        for command in ("queue", "attach", "snapshot", "detach"):
            assert main([command]) == 3
            assert capsys.readouterr().err == f"schedtrace: {said}\n"
            assert main([command, str(ME)]) == 3
            assert capsys.readouterr().err == f"schedtrace: {said}\n"


def test_a_process_id_of_many_digits_is_none(capsys):
    assert main(["attach", "9" * 5000]) == 2
    assert "expected a process id, or all" in capsys.readouterr().err


@pytest.mark.usefixtures("impatient")
def test_so_many_sockets_are_asked_and_the_others_counted(bound, folder, monkeypatch):
    monkeypatch.setattr(running_engines, "MOST_SOCKETS", 2)
    for pid in (1, 2, 3, 4, 5):
        bound(pid).listen()
    strangers = [
        f"{folder}/{pid}.sock is left out: process {ME} listens there, not process {pid}" for pid in (1, 2)
    ]
    notes = [f"3 more sockets in {folder} are left out: too many to ask", *strangers]
    assert listening_engines()[:3] == ([], {}, notes)
    monkeypatch.setattr(running_engines, "MOST_NOTES", 1)
    assert listening_engines().notes == [notes[0], "2 more are left out for such reasons"]


class Engine:
    def __init__(self, pid=100, rank=0, **about):
        about = {"running": 0, "waiting": 0} | about
        self.status = Status(
            role="engine", pid=pid, engine_pid=pid, rank=rank, schedtrace_version="", vllm_version="", **about
        )
        self.display_name = f"engine {rank} (pid {pid})"
        self.glances = []

    def answer_to(self, question, _expected):
        assert isinstance(question, AskQueue)
        self.glances.append(question.glance)
        if len(self.glances) > 2:
            msg = "gone"
            raise EngineError(msg)
        queue = EngineQueue(
            rank=self.status.rank, pid=self.status.pid, model="tiny", unix_s=0.0, held_us=1.0,
            between_steps=True, policy="fcfs", seats=1, token_budget=1, blocks_usable=1, blocks_free=1,
            running=[], waiting=[], exits=[],
        )  # fmt: skip
        return QueueNow(queue=queue)


@pytest.fixture
def here(monkeypatch):
    """``here(answer, ...)``: what each look finds, the last one again and again."""

    def set_up(*answers):
        left = list(answers)

        def find(_target):
            answer = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(running_engines, "find_engines", find)
        monkeypatch.setattr(running_engines, "RETRY_S", 0.01)

    return set_up


GONE = "its front end, process 99, has ended: no request reaches the engine"
STARVED = "waits for a processor (9 of the last 10 s)"
STALL = {"stalled_s": 12.4, "stall": "the worker does not answer"}


@pytest.mark.parametrize(
    ("about", "line", "alive", "ready"),
    [
        ({}, "healthy: 0 running, 0 waiting", 0, 0),
        ({"running": 8, "waiting": 2400}, "busy: 8 running, 2,400 waiting", 0, 0),
        ({"input_requests": 3}, "busy: 0 running, 0 waiting", 0, 0),
        ({"running": 1, "starved": STARVED}, f"busy: {STARVED}", 0, 0),
        ({"waiting": 1, "paused": "the engine is asleep"}, "paused: the engine is asleep", 0, 1),
        ({"running": 1, "orphaned": GONE}, f"dead: {GONE}", 4, 4),
        (STALL, "stalled: no step has made progress for 12 s: the worker does not answer", 1, 1),
    ],
)
def test_states_and_exit_codes(here, capsys, about, line, alive, ready):
    here(Listening([Engine(**about)], {}))
    assert main(["probe"]) == alive
    assert main(["probe", "--ready"]) == ready
    assert capsys.readouterr().out.splitlines() == [f"engine 0 (pid 100): {line}"] * 2


def test_the_worst_engine_counts(here):
    here(Listening([Engine(100), Engine(101, 1, **STALL)], {}))
    assert main(["probe", "all"]) == 1


def test_a_process_that_answers_late_is_no_failure(here):
    here(Listening([], {100: "has not answered"}), Listening([Engine()], {}))
    assert main(["probe", "--timeout", "5s"]) == 0


def test_a_process_that_never_answers_is_silent(here, capsys):
    here(Listening([], {100: "engine process 100 has not answered for 2 s"}))
    assert main(["probe", "--timeout", "50ms"]) == 4
    assert capsys.readouterr().out == "pid 100: silent: engine process 100 has not answered for 2 s\n"


@pytest.mark.parametrize(
    ("state", "code", "line"),
    [
        ("R", 0, r"pid 100: busy: has not answered: it waits for a processor \((\d) of the last \1 s\)"),
        ("S", 4, "pid 100: silent: has not answered"),
        ("T", 4, "pid 100: silent: has not answered"),
    ],
)
def test_a_process_that_waits_for_a_processor_is_busy(here, capsys, monkeypatch, state, code, line):
    seen = []

    def threads(pids):
        seen.append(pids)
        return [(7, 7)]

    monkeypatch.setattr(running_engines, "threads_of", threads)
    monkeypatch.setattr(
        running_engines, "thread_states", lambda threads: {threads[0]: ThreadState(state, 1, 2, 3)}
    )
    here(Listening([], {100: "has not answered"}, silent_here={100: 7}))
    assert main(["probe", "--timeout", "60ms"]) == code
    assert re.fullmatch(line, capsys.readouterr().out.strip())
    assert seen[0] == [7]
    assert len(seen) > 1


def test_engines_that_are_missing_are_dead(here, capsys):
    here(Listening([Engine()], {}))
    assert main(["probe", "--engines", "2", "--timeout", "50ms"]) == 4
    assert capsys.readouterr().out.splitlines()[1].startswith("an engine: dead: ")
    here(InputError("no engine of vLLM runs here"))
    assert main(["probe", "--timeout", "50ms"]) == 4


def test_the_queue_follows_as_lines_without_recording_anything(monkeypatch, capsys):
    engine = Engine()
    monkeypatch.setattr(running_engines, "_prepare", lambda _: None)
    monkeypatch.setattr(running_engines, "find_engines", lambda _: Listening([engine], {}))
    monkeypatch.setattr(running_engines.time, "sleep", lambda _: None)
    assert main(["queue", "--follow"]) == 4
    assert [json.loads(line)["pid"] for line in capsys.readouterr().out.splitlines()] == [100, 100]
    assert engine.glances == [False] * 3


def test_nobody_is_asked_more_than_once_a_second(capsys):
    assert main(["queue", "--follow", "--every", "0.5s"]) == 2
    assert "at least 1s" in capsys.readouterr().err
