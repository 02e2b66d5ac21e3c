"""Stalls on vLLM's real scheduler, as ``schedtrace probe`` sees them: within 15 s, each with its cause.

The engine's thread is real and the watchdog's clock is not: it looks once a second, and a second lasts until
the engine has made a few rounds or is held up.
"""

import re
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import StructuredOutputsParams

from schedtrace.cli.main import main
from schedtrace.engine import running_engines
from schedtrace.engine.running_engines import Listening
from schedtrace.model.live import AskStatus
from schedtrace.record import writer
from schedtrace.record.live import control_answers
from schedtrace.record.live.stall_causes import thread_place
from schedtrace.record.live.watchdog import Watchdog
from tests.contract.causes.toy_connectors import KV
from tests.contract.test_watchdog import Looping
from tests.toys import Totals

pytestmark = pytest.mark.vllm

MOST_S = 15
ROUNDS = 3
DRAIN_EVERY_S = 0.01
RUNS = ("runs", 40, 10_000)


class Staged(Looping):
    """An engine whose thread can be held up at a place that a test chooses."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rounds, self.is_held = 0, False
        self.after_step = lambda: None

    def loop(self):
        with suppress(SystemExit):
            super().loop()

    def _process_engine_step(self):
        super()._process_engine_step()
        self.rounds += 1
        self.after_step()

    def hold(self):
        """Wait for the end of the test, at which the thread ends."""
        self.is_held = True
        self.over.wait()
        raise SystemExit

    def second(self):
        """Let the engine make a few rounds, unless it is held up, and its recorder take note of them."""
        time.sleep(2 * DRAIN_EVERY_S)
        rounds = self.rounds + ROUNDS
        while self.rounds < rounds and not self.is_held:
            time.sleep(0.001)


def subclassed(engine, **methods):
    scheduler = engine.driver.scheduler
    scheduler.__class__ = type("Mine", (type(scheduler),), methods)


def never_fits(engine):
    engine.driver.add("too-long", 700, 8)


def blocks_that_nobody_fetches(engine):
    engine.driver.scheduler.connector.keeps = True
    engine.driver.add("prefill-only", 560, 1)
    engine.driver.add("next", 100, 4)


def connector_that_never_delivers(engine):
    engine.driver.scheduler.connector.has["lost"] = (16, True)
    engine.driver.add("lost", 40)


def grammar_never_compiled(engine):
    engine.driver.add("structured", 40, structured_outputs=StructuredOutputsParams(json="{}"))


def device_call_that_never_returns(engine):
    def execute_model():
        engine.hold()

    engine.execute_model = execute_model
    engine.driver.add(*RUNS)


def deadlocked_update(engine):
    def update_from_output(*_):
        engine.hold()

    subclassed(engine, update_from_output=update_from_output)
    engine.driver.add(*RUNS)


def schedule_that_never_returns(engine):
    def schedule(*_):
        engine.hold()

    engine.driver.add(*RUNS)
    subclassed(engine, schedule=schedule)


def dead_peer(engine):
    def _has_global_unfinished_reqs():
        engine.hold()

    engine.driver.add(*RUNS)
    engine.after_step = _has_global_unfinished_reqs


def call_of_a_client(engine):
    def _handle_client_request():
        engine.hold()

    engine.driver.add(*RUNS)
    engine.after_step = _handle_client_request


def pause_that_nobody_ends(engine):
    engine.driver.pause("PAUSED_NEW")
    engine.driver.add("waits", 40, 4)


STALLS = {
    never_fits: (
        {},
        r"the scheduler refuses: .* \(request too-long\); it needs 44 KV blocks, .* it can never run",
    ),
    blocks_that_nobody_fetches: (
        {"kv_transfer_config": KV},
        r"the scheduler refuses: .* \(request next\); it needs 7 .*, and no running request would free any",
    ),
    connector_that_never_delivers: ({"kv_transfer_config": KV}, "a connector does not answer: .*: lost"),
    grammar_never_compiled: ({}, r"the scheduler refuses: .*grammar.* \(request structured\)"),
    device_call_that_never_returns: (
        {},
        r"the worker does not answer: a batch is in flight \(1 request running\); the engine waits in .*",
    ),
    deadlocked_update: ({}, "the engine's thread is in .*"),
    schedule_that_never_returns: (
        {},
        r"schedule\(\) has not returned for 1\d s: the engine is in test_stalls.py:\d+ \w+",
    ),
    dead_peer: ({}, "another rank does not answer: .*"),
    call_of_a_client: ({}, "the engine does what a client asked for, in .*"),
}


@pytest.fixture
def engine(monkeypatch):
    """``engine(**options)``: a served engine whose watchdog looks when the test says."""
    made = []

    def watchdog(core, thread, causes, snapshot, ids, note):
        return Watchdog(
            core, lambda: thread_place(thread), causes, snapshot=snapshot, stacks=dict, ids=ids, note=note
        )

    monkeypatch.setattr(control_answers, "make_watchdog", watchdog)
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", DRAIN_EVERY_S)
    monkeypatch.setattr(writer, "WRITE_LATEST_NS", 0)

    def make(**options):
        staged = Staged(max_model_len=4096, **options)
        made.append(staged)
        staged.thread.start()
        staged.served = control_answers._Engine(staged.core, staged.thread.ident)
        staged.served._attachment.attach_meter(Totals())  # a stall's limit is known from their recording
        return staged

    yield make
    for staged in made:
        staged.end()


def probed(engine, monkeypatch, *options):
    """What ``schedtrace probe`` exits with."""
    status = engine.served.answer(AskStatus())
    listening = Listening([SimpleNamespace(status=status, display_name="engine 0")], {})
    monkeypatch.setattr(running_engines, "find_engines", lambda _: listening)
    return main(["probe", *options])


def look(engine, at_s):
    engine.second()
    engine.served._watchdog.check(at_s)
    return engine.served.answer(AskStatus()).health


@pytest.mark.parametrize("stage", STALLS, ids=lambda stage: stage.__name__)
def test_a_stall_is_found_with_its_cause(stage, engine, monkeypatch, capsys):
    options, cause = STALLS[stage]
    staged = engine(**options)
    assert look(staged, 0).state == "healthy"
    assert probed(staged, monkeypatch) == 0
    stage(staged)
    states = []
    while "stalled" not in states and len(states) < MOST_S:
        health = look(staged, 1 + len(states))
        states.append(health.state)
    assert states == ["busy"] * (len(states) - 1) + ["stalled"]
    assert re.fullmatch(f"no step has made progress for 1[0-5] s: {cause}", health.cause), health.cause
    assert (probed(staged, monkeypatch), probed(staged, monkeypatch, "--ready")) == (1, 1)
    assert capsys.readouterr().out.splitlines()[-1] == f"engine 0: stalled: {health.cause}"


def test_a_pause_that_nobody_ends_is_alive_and_not_ready(engine, monkeypatch):
    staged = engine()
    pause_that_nobody_ends(staged)
    for second in range(MOST_S):
        health = look(staged, second)
        assert health == (
            "paused",
            "the scheduler is paused (PAUSED_NEW): requests wait until somebody resumes it",
        )
    assert (probed(staged, monkeypatch), probed(staged, monkeypatch, "--ready")) == (0, 1)


def test_a_long_queue_is_no_stall(engine, monkeypatch):
    staged = engine()
    for number in range(60):
        staged.driver.add(f"r{number}", 40, 400)
    assert {look(staged, second).state for second in range(MOST_S)} == {"busy"}
    assert probed(staged, monkeypatch, "--ready") == 0
