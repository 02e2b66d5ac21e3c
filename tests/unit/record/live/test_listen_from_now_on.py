"""An engine that began without schedtrace is made to listen once, however many reach into it."""

import os
import queue
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from schedtrace.model import live
from schedtrace.record.live import control_answers
from schedtrace.record.live.control_answers import engine_loop, listen_from_now_on


class Core:
    """An engine's loop, in which two threads have it listen."""

    def run_busy_loop(self):
        threads = [threading.Thread(target=listen_from_now_on) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def listeners(monkeypatch):
    """The engines that were made to listen."""
    found = []

    class Engine:
        def __init__(self, core, thread):
            found.append((core, thread))

        @contextmanager
        def answering(self):
            yield True

    monkeypatch.setattr(control_answers, "_Engine", Engine)
    monkeypatch.setattr(control_answers, "_listens", False, raising=False)
    return found


def test_twice_is_once(listeners):
    core = Core()
    core.run_busy_loop()
    assert listeners == [(core, threading.main_thread().ident)]


def test_where_no_loop_runs_yet_another_may_try_later(listeners):
    thread = threading.Thread(target=listen_from_now_on)
    thread.start()
    thread.join()
    assert listeners == []
    Core().run_busy_loop()
    assert len(listeners) == 1


def test_in_a_process_that_is_switched_off_nobody_is_made_to_listen(listeners, monkeypatch):
    monkeypatch.setenv("SCHEDTRACE", "off")
    Core().run_busy_loop()
    assert listeners == []


class Idle(Core):
    """An idle engine whose loop begins while the sockets' folder is squatted; then its user clears that."""

    def __init__(self, folder):
        self.folder = folder
        self.scheduler = SimpleNamespace(running=[], waiting=[], requests={})
        self.input_queue = queue.Queue()
        self.seen = []

    def run_busy_loop(self):
        super().run_busy_loop()
        self.look()
        self.folder.rmdir()
        super().run_busy_loop()
        self.look()

    def look(self):
        watchdogs = [thread for thread in threading.enumerate() if thread.name == "schedtrace-watchdog"]
        self.seen.append((len(watchdogs), (self.folder / f"{os.getpid()}.sock").exists()))


@pytest.fixture
def idle(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "FOLDER", tmp_path)
    folder = tmp_path / f"schedtrace-{os.geteuid()}"
    folder.mkdir(mode=0o755)
    with ExitStack() as forever:
        monkeypatch.setattr(control_answers, "_forever", forever)
        monkeypatch.setattr(control_answers, "_listens", False)
        yield Idle(folder)


def test_an_engine_without_a_socket_listens_later_and_keeps_its_watchdog(idle):
    engine_loop(Idle.run_busy_loop, idle)
    assert idle.seen == [(1, False), (1, True)]


def test_an_engine_that_began_without_schedtrace_listens_later_and_keeps_its_watchdog(idle):
    idle.run_busy_loop()
    assert idle.seen == [(1, False), (1, True)]
