"""Processor time of threads, against what the threads themselves measure."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from schedtrace.record.processes import (
    EVERY_US,
    CpuTimes,
    ProcessorWaits,
    process_state,
    thread_states,
    threads_of,
)

pytest.importorskip("vllm")

from tests.contract.facts.told import Traced, lines, trace_file

pytestmark = pytest.mark.vllm

LIMIT_S = 60


def busy(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def of(times, now_us, role):
    [line] = times.line(now_us, steps=now_us)
    return [one for one in line.threads if one.role == role]


def test_it_is_the_thread_that_made_it():
    times = CpuTimes()
    [before] = of(times, 0, "engine")
    busy(0.3)
    other = threading.Thread(target=busy, args=(0.2,))
    other.start()
    other.join()
    [after] = of(times, EVERY_US, "engine")
    assert (before.pid, before.tid) == (os.getpid(), threading.get_native_id())
    assert 0.29e6 < after.ran_us - before.ran_us < 0.4e6


def test_a_thread_that_shares_its_processor_waits_about_as_long_as_it_runs():
    allowed = os.sched_getaffinity(0)
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        one = min(allowed)
        os.sched_setaffinity(rival.pid, {one})
        os.sched_setaffinity(0, {one})
        times = CpuTimes()
        [before] = of(times, 0, "engine")
        busy(0.3)
        [after] = of(times, EVERY_US, "engine")
    finally:
        os.sched_setaffinity(0, allowed)
        rival.kill()
        rival.wait()
    ran, waited = after.ran_us - before.ran_us, after.waited_us - before.waited_us
    assert waited > ran / 2


def test_a_process_without_a_processor_waits_and_neither_a_sleeping_nor_a_stopped_one_does():
    """Victims at the lowest priority beside two rivals on their processor, as on an overloaded machine."""
    one = {min(os.sched_getaffinity(0))}
    spins, sleeps = "while True: pass", "import time; print(flush=True); time.sleep(60)"
    programs = [spins, spins, spins, sleeps, spins]
    started = [subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) for text in programs]
    victims = _, sleeping, stopped = started[2:]
    try:
        for each in started:
            os.sched_setaffinity(each.pid, one)
        for each in victims:
            os.setpriority(os.PRIO_PROCESS, each.pid, 19)
        stopped.send_signal(signal.SIGSTOP)
        sleeping.stdout.readline()  # while it starts it may pause as well
        while process_state(stopped.pid).state != "T" or process_state(sleeping.pid).state != "S":
            time.sleep(0.05)
        waits = [ProcessorWaits(lambda pid=each.pid: thread_states(threads_of([pid]))) for each in victims]
        begin_s = before_s = time.monotonic()
        for _ in range(4):
            now_s = time.monotonic()
            for each in waits:
                each.look(now_s, now_s - before_s)
            before_s = now_s
            time.sleep(0.5)
        lasted_s = before_s - begin_s
    finally:
        for each in started:
            each.kill()
            each.communicate()
    assert waits[0].waited_s > 0.6 * lasted_s
    assert [each.waited_s for each in waits[1:]] == [0.0, 0.0]


def test_processes_that_it_started_are_workers():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        found = of(CpuTimes(), 0, "worker")
    finally:
        child.kill()
        child.wait()
    assert child.pid in [one.pid for one in found]


def test_one_line_a_second():
    times, looks = CpuTimes(), (0, 500_000, 999_999, 1_000_000, 1_500_000, 2_000_001)
    assert [len(times.line(now, steps=now)) for now in looks] == [1, 0, 0, 1, 0, 1]


def test_an_idle_engine_has_one_in_five_seconds_after_the_one_that_ends_its_work():
    times, steps = CpuTimes(), (0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2)
    assert [len(times.line(second * EVERY_US, done)) for second, done in enumerate(steps)] == [
        1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0
    ]  # fmt: skip


def test_where_the_system_does_not_tell_nothing_is_written(monkeypatch):
    monkeypatch.setattr("schedtrace.record.processes._read", lambda *_: None)
    assert CpuTimes().line(0, 0) == []


def test_the_trace_has_it(recording):
    began = time.monotonic()
    engine = Traced()
    engine.add("r")
    engine.step()
    while '"type":"cpu"' not in trace_file(recording).read_text() and time.monotonic() < began + LIMIT_S:
        time.sleep(0.02)
    busy(0.3)
    time.sleep(1.2)
    engine.finish()
    lasted_s = time.monotonic() - began
    told = [line for line in lines(recording) if line["type"] == "cpu"]
    mine = [one for line in told for one in line["threads"] if one["role"] == "engine"]
    assert 2 <= len(told) <= 2 + lasted_s
    assert {one["tid"] for one in mine} == {threading.get_native_id()}
    assert mine[-1]["ran_us"] - mine[0]["ran_us"] > 0.25e6
