"""The watchdog on vLLM's real scheduler: stalls of the exam, healthy loads, a connector, a worker."""

import logging
import re
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from schedtrace.record import writer
from schedtrace.record.live import watchdog
from schedtrace.record.live.attachment import Attachment
from schedtrace.record.live.between_steps import BetweenSteps
from schedtrace.record.live.stall_causes import ThreadPlace, thread_place
from schedtrace.record.live.watchdog import HELD_UP, Watchdog
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver, Simulation, VirtualClock
from schedtrace.simulate.simulation import NoProgressError
from tests.contract.causes.toy_connectors import KV
from tests.exam.answers import CASES

pytestmark = pytest.mark.vllm

ELSEWHERE = ThreadPlace("other", "test.py:1 load", connector=False)
STEP_LINE = re.compile(rb'"type":"(?:step|delta)"')
LIMIT_S = 60


@pytest.fixture
def said(caplog, monkeypatch):
    """What the watchdog has said: level and text."""
    log = logging.getLogger("test_watchdog")  # vLLM sets up its own loggers anew at any time
    monkeypatch.setattr(watchdog, "log", log)
    caplog.set_level(logging.INFO, logger=log.name)
    return lambda: [(one.levelname, one.getMessage()) for one in caplog.records if one.name == log.name]


def played(name, folder, monkeypatch, *, after_s, every_us, long_s=13):
    """Play a case of the exam and go on for a while, with a look now and then by its time."""
    case = CASES[name]
    monkeypatch.setenv("SCHEDTRACE_RUN_DIR", str(folder))
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 0.01)
    monkeypatch.setattr(writer, "WRITE_LATEST_NS", -(10**18))  # virtual time may stand still
    with VirtualClock() as clock:
        engine = Simulation(clock, traced_class, **case.engine)
        recorder = engine.scheduler._schedtrace_recorder

        def causes():
            of_engine, wait = recorder.writer, threading.Event().wait
            for _ in range(100 * LIMIT_S):
                if len(STEP_LINE.findall(of_engine.path.read_bytes())) >= of_engine._steps:
                    break
                wait(0.01)
            return of_engine.latest_exits

        watched = Watchdog(engine.core, lambda: ELSEWHERE, causes, after_s, stacks=dict)
        for number in range(1, int(long_s * 1e6 / every_us)):
            engine.at(number * every_us, lambda: watched.check(clock.now_us / 1e6))
        try:
            case.load(engine)
            engine.run(until_us=long_s * 1e6)
        except NoProgressError:
            pass
        engine.close()


NEVER_RUNS = "it needs {0} KV blocks, {1} are free and the cache has {1}: it can never run"
STALLS = {
    "03-never-fits": ("scheduler", "(request too-long); " + NEVER_RUNS.format(13, 12)),
    "03b-outgrows-the-cache": ("scheduler", "(request grows); " + NEVER_RUNS.format(13, 12)),
    "03e-group-never-fits": ("scheduler", NEVER_RUNS.format(40, 30)),
    "11b-image-too-large": (
        "scheduler",
        "the encoder budget or the encoder cache was spent (request poster)",
    ),
}
SOON = {
    "15c-loads-that-never-come": ("connector", "not arrived from elsewhere yet: lost-0, lost-1, lost-2 ["),
    "113-sessions-wait-for-each-other": ("scheduler", "no running request would free any"),
    "03d-prefilled-again-and-again": ("livelock", "request again was preempted"),
}
"""Those that end."""


@pytest.mark.parametrize(("name", "expected"), (STALLS | SOON).items())
def test_stalls_of_the_exam(name, expected, tmp_path, monkeypatch, said):
    if name in STALLS:  # test_stalls.py watches as long as a server's watchdog does
        often = {"after_s": 1.0, "every_us": 100_000, "long_s": 3}
    else:
        often = {"after_s": 0.3, "every_us": 50_000}
    played(name, tmp_path / "run", monkeypatch, **often)
    kind, says = expected
    (level, text), *ended = said()
    assert (level, f"[{kind}]" in text, says in text) == ("WARNING", True, True), text
    if name in STALLS:
        assert ended == []
    else:
        assert (f"[{kind}]" in ended[0][1], " after " in ended[0][1]) == (True, True)


HEALTHY = [name for name in CASES if name.startswith("healthy-")]


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_loads(name, tmp_path, monkeypatch, said):
    played(name, tmp_path / "run", monkeypatch, after_s=1.0, every_us=100_000)
    assert said() == []


class Looping:
    """A driver's scheduler in a core that a thread of its own steps, as an engine's loop does."""

    def __init__(self, **options):
        self.driver = Driver(num_blocks=41, max_num_batched_tokens=256, max_num_seqs=4, **options)
        self.core = SimpleNamespace(
            scheduler=self.driver.scheduler, vllm_config=self.driver.config, batch_queue=None,
            step_fn=self.step, model_executor=SimpleNamespace(is_sleeping=False),
        )  # fmt: skip
        self.attachment = Attachment(self.core, BetweenSteps(self.core))
        self.answers, self.over = threading.Event(), threading.Event()
        self.answers.set()
        self.thread = threading.Thread(target=self.loop, daemon=True)

    def execute_model(self):
        self.answers.wait()

    def step(self):
        if self.driver.scheduler.has_requests():
            self.driver.schedule()
            self.execute_model()
            self.driver.update()

    def loop(self):
        while not self.over.is_set():
            self._process_engine_step()

    def _process_engine_step(self):
        self.core.step_fn()
        time.sleep(0.001)

    def watch(self, said, **options):
        """A watchdog's looks, ten times as often and as soon as usual: until it says something, and more."""
        self.thread.start()
        watched = Watchdog(
            self.core, lambda: thread_place(self.thread.ident),
            self.attachment.exits_now, 1.0, stacks=dict, **options,
        )  # fmt: skip
        until, more = time.monotonic() + LIMIT_S, 5
        while more and time.monotonic() < until:
            watched.check(time.monotonic())
            time.sleep(0.1)
            more -= bool(said())
        return watched

    def end(self):
        self.answers.set()
        self.over.set()
        self.thread.join(5)


@pytest.fixture
def looping():
    made = []

    def make(**options):
        made.append(Looping(**options))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_a_connector_that_never_answers_is_told_by_exits_of_a_glance(looping, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    engine = looping(kv_transfer_config=KV)
    engine.driver.scheduler.connector.has["lost"] = (16, True)
    engine.driver.add("lost", 40)
    plain = type(engine.driver.scheduler)
    watched = engine.watch(said)
    [(level, text)] = said()
    assert (level, watched.stall.sentence) == (
        "WARNING",
        "a connector does not answer: the next request's KV blocks had not arrived from elsewhere yet: lost",
    )
    assert "waiting for remote kvs: 1: lost" in text
    assert list(tmp_path.iterdir()) == []
    assert type(engine.driver.scheduler) is plain
    assert [name for name in vars(engine.driver.scheduler) if name.startswith("_schedtrace")] == []


def test_a_scheduler_of_a_users_own_that_keeps_blocks_for_others_is_no_stall(said):
    engine = Driver(num_blocks=41, kv_transfer_config=KV)

    class Mine(type(engine.scheduler)):
        pass

    engine.scheduler.__class__ = Mine
    engine.scheduler.connector.keeps = True
    engine.add("prefill-only", 40, 1)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    assert list(engine.scheduler.requests) == ["prefill-only"]
    core = SimpleNamespace(scheduler=engine.scheduler)
    watched = Watchdog(core, lambda: ELSEWHERE, list, stacks=dict)
    for second in range(30):
        watched.check(second)
    assert said() == []


def test_a_worker_that_sleeps_and_answers_in_the_end(looping, said):
    engine = looping()
    engine.driver.add("runs", 40, 10_000)
    engine.answers.clear()
    watched = engine.watch(said)
    assert watched.stalled_s > 1
    [(_, text)] = said()
    assert "the worker does not answer: a batch is in flight (1 request running)" in text
    assert "KV blocks: 37 of 40 free; held by runs 3 (running)" in text
    engine.answers.set()
    until = time.monotonic() + LIMIT_S
    while len(said()) < 2 and time.monotonic() < until:
        time.sleep(0.02)
        watched.check(time.monotonic())
    assert "the engine goes on after" in said()[1][1]


def test_a_scheduler_that_spins_within_one_call_is_no_scheduler_that_refuses(looping, said):
    """vLLM counts the call when it begins: the counter has moved once since the latest progress."""
    engine, noted = looping(), []
    scheduler = engine.driver.scheduler

    class Spins(type(scheduler)):
        def schedule(self, *args):
            self.current_step += 1
            while not engine.over.is_set():
                time.sleep(0.001)
            return super().schedule(*args)

    engine.driver.add("runs", 40, 10_000)
    engine.driver.schedule()
    engine.driver.update()
    scheduler.__class__ = Spins
    watched = engine.watch(said, note=noted.append)
    [(level, text)] = said()
    assert (level, watched.stall.kind in HELD_UP, noted[0].kind) == ("WARNING", True, "engine")
    assert re.search(
        r"schedule\(\) has not returned for \d s: the engine is in test_watchdog.py:\d+ schedule", text
    )
