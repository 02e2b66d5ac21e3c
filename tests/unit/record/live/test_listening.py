"""What an installed schedtrace does while nobody has asked: counted in a process of its own, without vLLM."""

import json
import os
import queue
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from schedtrace.model import live
from schedtrace.record.live import control_answers
from schedtrace.record.live.control_answers import engine_loop, listen_from_now_on

PROGRAM = """
import contextlib, collections.abc, functools, json, os, sys, threading, types, typing
from queue import Queue

core = types.ModuleType("vllm.v1.engine.core")
executor = types.ModuleType("vllm.v1.executor.multiproc_executor")


class EngineCoreProc:
    def run_busy_loop(self):
        seen["engine"] = state()


class WorkerProc:
    def worker_busy_loop(self):
        seen["worker"] = state()


def state():
    folder = f"/tmp/schedtrace-{os.getuid()}"
    socket = f"{folder}/{os.getpid()}.sock"
    there = os.path.exists(socket)
    return {
        "threads": sorted(one.name for one in threading.enumerate()[1:]),
        "modes": [oct(os.stat(one).st_mode & 0o777) for one in (folder, socket)] if there else None,
        "modules": sorted(one for one in set(sys.modules) - before if one.startswith(("schedtrace", "vllm"))),
        "others": sum(not one.startswith(("schedtrace", "vllm")) for one in set(sys.modules) - before),
        "class": type(scheduler).__name__,
        "attributes": [one for one in vars(scheduler) if "schedtrace" in one],
        "wrapped": hasattr(EngineCoreProc.run_busy_loop, "_schedtrace_wrapped"),
    }


class Scheduler(types.SimpleNamespace):
    pass


core.EngineCoreProc, executor.WorkerProc = EngineCoreProc, WorkerProc
scheduler = Scheduler(running=[], waiting=[])
engine = EngineCoreProc()
engine.scheduler, engine.input_queue = scheduler, Queue()
if not sys.argv[1:]:
    sys.modules[core.__name__], sys.modules[executor.__name__] = core, executor
seen, before = {}, set(sys.modules)
from schedtrace.record.plugin import register
register()
register()
seen["front_end"] = state()
if sys.argv[1:] == ["forked"]:  # imported after the plugin was loaded
    sys.modules[core.__name__], sys.modules[executor.__name__] = core, executor
    if pid := os.fork():
        os.waitpid(pid, 0)
        os._exit(0)
EngineCoreProc.run_busy_loop(engine)
WorkerProc().worker_busy_loop()
seen["after"] = state()
print(json.dumps(seen))
sys.stdout.flush()
"""
LIGHT = [
    *("schedtrace", "schedtrace.record", "schedtrace.record.plugin", "schedtrace.record.switches"),
    "schedtrace.version",
]
WAITING = sorted([*LIGHT, "schedtrace.record.hooks"])


def ran(folder, *arguments, **variables):
    """What a process saw of itself, and what it said; it wrote no file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SCHEDTRACE")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=folder, env=kept | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables,
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("off", ["off", " OFF", "no", "0", "false"])
def test_switched_off_it_leaves_nothing(off, tmp_path):
    seen, said = ran(tmp_path, SCHEDTRACE=off, SCHEDTRACE_DIR=str(tmp_path / "logs"), SCHEDTRACE_KEEP="60s")
    for state in seen.values():
        assert state == {
            "threads": [], "modes": None, "modules": LIGHT, "others": 0,
            "class": "Scheduler", "attributes": [], "wrapped": False,
        }  # fmt: skip
    assert said == ""


@pytest.mark.parametrize("how", [(), ("forked",)])
def test_not_asked_it_listens_in_loops_and_does_nothing_else(how, tmp_path):
    seen, said = ran(tmp_path, *how)
    front_end, engine, worker, after = (seen[one] for one in ("front_end", "engine", "worker", "after"))
    assert (front_end["threads"], front_end["modes"]) == ([], None)
    assert (front_end["modules"], front_end["others"]) == (WAITING, 0)
    assert front_end["wrapped"] is (how == ())
    assert engine["threads"] == ["schedtrace-socket", "schedtrace-watchdog"]
    assert worker["threads"] == ["schedtrace-socket"]
    assert engine["modes"] == worker["modes"] == ["0o700", "0o600"]
    assert (engine["class"], engine["attributes"]) == ("Scheduler", [])
    assert (after["threads"], after["modes"]) == ([], None)
    assert said == ""


def test_without_the_watchdog_there_is_a_socket_only(tmp_path):
    seen, said = ran(tmp_path, SCHEDTRACE_WATCHDOG="off")
    assert (seen["engine"]["threads"], said) == (["schedtrace-socket"], "")


def test_a_switch_that_is_not_understood_is_off_and_said_once(tmp_path):
    seen, said = ran(tmp_path, SCHEDTRACE="of")
    assert all(state["modes"] is None and state["threads"] == [] for state in seen.values())
    why = "SCHEDTRACE=of: expected yes or no (1, true, on; 0, false, off)"
    assert [line.partition("schedtrace: ")[2] for line in said.splitlines()] == [
        f"switched off, nobody can attach: {why}"
    ] * 2  # once for each call


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
