"""What the engine's process writes to its log: in one line, and visible."""

import ast
import logging
import threading
from pathlib import Path

import pytest

from schedtrace import record
from schedtrace.record.live import watchdog
from schedtrace.record.live.stall_causes import StallCause, stacks_here
from schedtrace.record.log import logger

HOSTILE = "logs\nINFO all is well\x1b[2J\udcff"
SHOWN = r"logs\nINFO all is well\x1b[2J\udcff"


def test_what_is_logged_is_one_visible_line(warnings):
    logger.warning("schedtrace: recording to {} stopped: {!r}", HOSTILE, OSError(28, HOSTILE))
    [line] = warnings
    assert line.startswith(f"schedtrace: recording to {SHOWN} stopped: OSError(28, ")
    assert line.isascii()
    assert line.isprintable()


def test_nothing_else_is_used_for_it():
    files = [file for file in Path(record.__file__).parent.rglob("*.py") if file.name != "log.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [getattr(node, "module", None), *(name.name for name in node.names)]
                assert "loguru" not in names, file


def test_a_stall_is_told_line_by_line_whatever_is_in_it(monkeypatch, caplog):
    monkeypatch.setattr(watchdog, "log", logging.getLogger("test_log"))
    watched = object.__new__(watchdog.Watchdog)
    watched._reported_since_s, watched._engine, watched._snapshot = 0.0, None, lambda _: HOSTILE
    watched._stacks_s, watched._stacks, watched._ids = {}, lambda: {"1": [f"Thread {HOSTILE}"]}, dict
    watched._note, watched._unexplained = None, False
    monkeypatch.setattr(watchdog, "holders", lambda *_: [f"running: 1: {HOSTILE}"])
    watched._report(StallCause("worker", f"it waits for {HOSTILE}"), 11.0)
    [told] = caplog.messages
    assert [line for line in told.splitlines() if SHOWN not in line] == []
    assert len(told.splitlines()) == 4
    assert told.encode()


@pytest.mark.parametrize("name", ["a\nThread 0x1 (most recent call first):\n", "bcd-bcd\n\n", "c" * 10_000])
def test_the_name_of_a_thread_adds_no_line_to_the_stacks(name):
    begun, over = threading.Event(), threading.Event()

    def wait():
        begun.set()
        over.wait(60)

    without = len(stacks_here().splitlines())
    thread = threading.Thread(target=wait, name=name)
    thread.start()
    assert begun.wait(60)
    stacks = stacks_here()
    over.set()
    thread.join()
    [line] = [line for line in stacks.splitlines() if " ".join(name.split())[:100] in line]
    assert line.startswith(("Thread 0x", "Current thread 0x"))
    assert len(line) < 200
    assert len(stacks.splitlines()) > without
