"""Kills processes of ``schedtrace run`` at random times on vLLM's real engine, and counts what is left.

``python -m tools.bench.run_kills [--kills 20] [--seed 0]``: in turn the command, a guard, the engine process,
the engine core and a worker (before there is one, the process above it), while vLLM starts or in a trial. A
process is of the run if it was below the command at any look, is in the session of the engine process, or has
the run folder in its environment. Ends with 1 if one is left 5 s after the kill.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from schedtrace.errors import SchedtraceError
from schedtrace.model.manifest import read_manifest
from schedtrace.read.run import read_run
from schedtrace.record.processes import children
from tests.e2e.conftest import environment, run_options

KINDS = ("command", "outer guard", "inner guard", "engine process", "engine core", "worker")
LIMIT_S = 5.0
STARTING = 0.3
"""Share of the kills that come before the engine is up."""
LOOK_EVERY_S = 0.05
LOAD = {"input_len": 64, "output_len": 4000, "num_prompts": 4, "max-model-len": 8192, "warmup": 0}


def began(pid: int) -> str | None:
    """What tells a process from a later one of the same id; None: it is gone, or waits to be reaped only."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def descendants(pid: int) -> list[int]:
    """All processes below one, the nearest first."""
    below = children(pid)
    return below + [one for child in below for one in descendants(child)]


def of_run(folder: Path, session: int) -> set[int]:
    """Processes that belong to the run by their session or their environment, whoever their parent is."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            named = os.fsencode(folder) in (entry / "environ").read_bytes()
        except OSError:
            continue
        if named or int(fields[3]) == session:
            found.add(int(entry.name))
    return found


class Run:
    """``schedtrace run`` of the tiny model, and every process of it that was ever seen.

    Args:
        home: Its working folder.
        label: Name of its run folder.
        options: In place of ``LOAD``.
    """

    def __init__(self, home: Path, label: str, **options: object) -> None:
        self.folder = home / "logs" / label
        arguments = run_options(label=label, **(options or LOAD))
        self.command = subprocess.Popen(
            [sys.executable, "-m", "schedtrace", "run", *map(str, arguments)],
            cwd=home,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.seen: dict[int, str] = {}

    def look(self) -> list[int]:
        """The line from the command to the deepest of its processes, as far as it has come."""
        for pid in (self.command.pid, *descendants(self.command.pid)):
            if (start := began(pid)) is not None:
                self.seen.setdefault(pid, start)
        line = [self.command.pid]
        while below := children(line[-1]):
            line.append(below[-1])
        return line

    def left(self) -> list[int]:
        """Its processes that still run."""
        self.command.poll()
        session = next(iter(list(self.seen)[1:]), -1)
        more = {pid: start for pid in of_run(self.folder, session) if (start := began(pid))}
        return [pid for pid, start in (self.seen | more).items() if began(pid) == start]

    def gone_after(self, limit_s: float) -> float | None:
        """Seconds until none of its processes is left; None: some are left after the limit."""
        since = time.monotonic()
        while self.left():
            if time.monotonic() - since > limit_s:
                return None
            time.sleep(LOOK_EVERY_S)
        return time.monotonic() - since


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    draw, left = random.Random(chosen.seed), 0  # noqa: S311  # for repeatable moments
    with tempfile.TemporaryDirectory() as home:
        for at in range(chosen.kills):
            left += _kill(Path(home), at, draw)
    print(f"{chosen.kills} kills, {left} processes left after {LIMIT_S:g} s")
    return 1 if left else 0


def _kill(home: Path, at: int, draw: random.Random) -> int:
    run = Run(home, f"kill-{at}")
    line, kind, pause_s = run.look(), at % len(KINDS), draw.uniform(0.1, 8)
    starts = draw.random() < STARTING
    trace = run.folder / "engine-0.jsonl"
    while not starts and not trace.exists() and run.command.poll() is None:
        time.sleep(LOOK_EVERY_S)
        line = run.look()
    until = time.monotonic() + pause_s
    while time.monotonic() < until and run.command.poll() is None:
        time.sleep(LOOK_EVERY_S)
        line = run.look()
    victim = line[min(kind, len(line) - 1)]
    os.kill(victim, signal.SIGKILL)
    took = run.gone_after(LIMIT_S)
    still = run.left()
    what = f"{KINDS[min(kind, len(line) - 1)]} of {len(line)}"
    gone = "not gone" if took is None else f"gone after {took:.1f} s"
    print(f"{at + 1:>3} {what:<20} {gone}, {len(still)} left; {_told(run.folder)}", flush=True)
    for pid in still:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.command.wait()
    return len(still)


def _told(folder: Path) -> str:
    manifest = read_manifest(folder) if folder.exists() else None
    try:
        steps = sum(trace.steps.height for trace in read_run(folder).traces)
    except SchedtraceError as error:
        return f"{manifest and manifest.status}, {type(error).__name__}"
    return f"{manifest and manifest.status}, {steps} steps"


if __name__ == "__main__":
    sys.exit(main())
