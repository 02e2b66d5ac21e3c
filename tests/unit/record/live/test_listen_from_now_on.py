"""An engine that began without schedtrace is made to listen once, however many reach into it."""

import threading
from contextlib import contextmanager

import pytest

from schedtrace.record.live import control_answers
from schedtrace.record.live.control_answers import listen_from_now_on


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
        def listening(self):
            yield

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
