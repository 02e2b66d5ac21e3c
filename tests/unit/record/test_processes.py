"""An engine's process knows whether the front end that started it has ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from schedtrace.record.processes import front_end_ended

LIMIT_S = 20
FRONT_END = """
import json, multiprocessing, os, socket, sys, time
from schedtrace.record.processes import front_end_ended

def engine(addresses):
    print(os.getpid(), flush=True)
    while True:
        print(json.dumps([front_end_ended(each) for each in addresses]), flush=True)
        time.sleep(0.02)

if __name__ == "__main__":
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    addresses = json.loads(sys.argv[2])
    multiprocessing.get_context("spawn").Process(target=engine, args=(addresses,)).start()
    time.sleep(60)
"""


@pytest.fixture
def folder():
    """A folder whose path is short enough for sockets."""
    with TemporaryDirectory() as name:
        yield Path(name)


def test_a_front_end_has_ended_if_its_process_has_and_nobody_listens_at_its_address(folder):
    own, others = folder / "own", folder / "others"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(others))
    listener.listen()
    (folder / "front_end.py").write_text(FRONT_END)
    addresses = [
        [f"ipc://{own}"],
        [f"ipc://{own}", f"ipc://{others}"],
        [f"ipc://{own}", "tcp://10.0.0.1:5555"],
        [],
    ]
    command = [sys.executable, folder / "front_end.py", own, json.dumps(addresses)]
    with listener, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front_end:
        engine = int(front_end.stdout.readline())
        try:
            before = json.loads(front_end.stdout.readline())
            front_end.kill()
            end_s = time.monotonic() + LIMIT_S
            while (answer := json.loads(front_end.stdout.readline())) == before:
                assert time.monotonic() < end_s
        finally:
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)
    assert before == [None] * 4
    assert answer == [front_end.pid, None, None, None]


def test_a_process_that_no_front_end_started_has_none_that_ended():
    assert front_end_ended(["ipc:///tmp/nowhere"]) is None
