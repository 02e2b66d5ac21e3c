"""A probe tells engines that work from those that stall, are silent, or are gone."""

import json
import re

import pytest

from schedtrace.cli.main import main
from schedtrace.engine import running_engines
from schedtrace.engine.running_engines import Listening
from schedtrace.errors import EngineError, InputError
from schedtrace.model.live import AskQueue, EngineQueue, QueueNow, Status
from schedtrace.record.processes import ThreadState


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
