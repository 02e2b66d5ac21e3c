"""What ``schedtrace watch`` costs: ``python tools/bench/watch_cost.py [--screen]``.

A writer process appends a made-up trace of 100 steps a second with 256 running requests in real time, every
0.2 s as the recorder does, deltas included. Printed is the processor time that ``watch`` took meanwhile, as a
share of one core, by ``/proc/<pid>/stat`` of its process after it has started; over a pipe, or with
``--screen`` in a terminal of 200 x 50.
"""

import argparse
import os
import pty
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import msgspec

from tools.bench import big_trace

STEPS_PER_S = 100
BEFORE_S = 70
"""Written at once before: the longer verdict's minute is full from the start."""
STARTING_S = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--screen", action="store_true")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)  # what the writer process is asked for
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made, growing = Path(folder) / "made.jsonl", Path(folder) / "run" / "engine-0.jsonl"
        growing.parent.mkdir()
        big_trace.STEP_US, big_trace.FULL_EVERY = 1_000_000 // STEPS_PER_S, STEPS_PER_S
        big_trace.write_big_trace(made, (BEFORE_S + STARTING_S + chosen.seconds + 5) * STEPS_PER_S, version=2)
        ready, done = threading.Event(), threading.Event()
        writer = threading.Thread(target=_write, args=(made, growing, ready, done))
        writer.start()
        ready.wait()
        watching, screen = _watch(growing.parent, screen=chosen.screen)
        time.sleep(STARTING_S)
        began_s, before = time.monotonic(), _cpu_s(watching.pid)
        time.sleep(chosen.seconds)
        took, wall = _cpu_s(watching.pid) - before, time.monotonic() - began_s
        done.set()
        watching.terminate()
        watching.wait()
        writer.join()
        how = "on a screen of 200 x 50" if screen else "over a pipe"
        print(f"{how}: {took:.2f} s in {wall:.0f} s, {100 * took / wall:.1f} % of a core")


def _watch(folder: Path, *, screen: bool) -> tuple[subprocess.Popen[bytes], bool]:
    command = [sys.executable, "-m", "schedtrace", "watch", str(folder)]
    if not screen:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL), screen
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (50, 200))
    started = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm-256color"}
    )
    threading.Thread(target=_swallow, args=(master,), daemon=True).start()
    return started, screen


def _swallow(master: int) -> None:
    while os.read(master, 65536):
        pass


def _write(made: Path, growing: Path, ready: threading.Event, done: threading.Event) -> None:
    """Lines when their steps' outputs are back, up to 0.2 s later."""
    head, *lines = made.read_bytes().splitlines(keepends=True)[:-1]
    now = time.time()
    header = msgspec.json.decode(head) | {"wall_anchor_us": int((now - BEFORE_S) * 1e6)}
    at = BEFORE_S * STEPS_PER_S
    with growing.open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(header) + b"\n" + b"".join(lines[:at]))
        ready.set()
        while not done.wait(0.2):
            until = BEFORE_S * STEPS_PER_S + int((time.time() - now) * STEPS_PER_S)
            file.write(b"".join(lines[at:until]))
            at = until


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
