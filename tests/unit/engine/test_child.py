"""The front ends' order of requests, and trials of an engine session, without an engine."""

import asyncio
from types import SimpleNamespace

import pytest

from schedtrace.engine import child
from schedtrace.engine.child import EngineSession, OnlineFrontEnd
from schedtrace.engine.prompts import PromptRequest
from schedtrace.engine.run_spec import Progress, RunSpec


def due(*times, rate=None):
    front_end = object.__new__(OnlineFrontEnd)
    front_end._rate, front_end._burstiness, front_end._seed = rate, 1.0, 0
    return front_end._due([PromptRequest({}, 1, 1, 0, None, at_s) for at_s in times])


def test_requests_are_sent_at_their_own_times():
    assert due(0.0, 1.5, 4.25) == [0.0, 1.5, 4.25]


def test_requests_without_times_are_sent_at_the_rate_or_at_once():
    assert due(None, None) == [0.0, 0.0]
    first, second = due(None, None, rate=2.0)
    assert first == 0.0 < second


def test_only_first_turns_take_times_at_the_rate():
    front_end = object.__new__(OnlineFrontEnd)
    front_end._rate, front_end._burstiness, front_end._seed = 2.0, 1.0, 0
    requests = [PromptRequest({}, 1, 1, 0, after=after) for after in (None, 0, None)]
    first, later, second = front_end._due(requests)
    assert (first, later) == (0.0, 0.0)
    assert second == due(None, None, rate=2.0)[1]


def test_a_turn_is_sent_its_delay_after_the_answer(monkeypatch):
    """Three turns of one session and a request of its own, on an engine that answers after 50 ms."""
    monkeypatch.setattr("schedtrace.engine.child._sampling", lambda *_, **__: None)
    sent, answered = {}, {}

    async def generate(_prompt, _sampling, name, **_options):
        now = asyncio.get_running_loop().time
        sent[name] = now()
        await asyncio.sleep(0.05)
        answered[name] = now()
        yield SimpleNamespace(finished=True, prompt_token_ids=[1], outputs=[])

    front_end = object.__new__(OnlineFrontEnd)
    front_end._rate, front_end._burstiness, front_end._seed = None, 1.0, 0
    front_end._engine = SimpleNamespace(generate=generate, input_processor=SimpleNamespace(tokenizer=None))
    requests = [
        PromptRequest({}, 1, 1, 0),
        PromptRequest({}, 1, 1, 0, after=0, delay_s=0.1),
        PromptRequest({}, 1, 1, 0),
        PromptRequest({}, 1, 1, 0, after=1),
    ]
    result = asyncio.run(front_end._run(1, requests, lambda _: None))
    assert result.num_requests == 4
    assert sent["t1-2"] == pytest.approx(sent["t1-0"], abs=0.04)
    assert sent["t1-1"] >= answered["t1-0"] + 0.1
    assert sent["t1-3"] >= answered["t1-1"]


class Toy:
    """A front end that finishes a request in 30 ms, and whose prefix cache is free after some attempts."""

    def __init__(self, clock, attempts):
        self.clock, self.attempts = clock, attempts

    def run_trial(self, trial, requests, progress):
        for finished, _ in enumerate(requests, start=1):
            self.clock.now += 0.03
            progress(finished)
        return SimpleNamespace(trial=trial, prefix_cache_reset=None)

    def reset_prefix_cache(self):
        self.attempts -= 1
        return self.attempts <= 0


@pytest.fixture
def session(monkeypatch):
    """``session(attempts, ...)``: a session of ten requests, and the numbers of finished ones it reports."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(child.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(child.time, "sleep", lambda _: None)

    def made(attempts=1, **options):
        reported = []
        one = object.__new__(EngineSession)
        one._run = RunSpec(engine_args=[], **options)
        one._send = lambda event: reported.append(event.finished) if isinstance(event, Progress) else None
        one._requests = [PromptRequest({}, 1, 1, 0)] * 10
        one.front_end = Toy(clock, attempts)
        return one, reported

    return made


def test_progress_is_reported_at_most_ten_times_a_second_and_at_the_end(session):
    made, reported = session(warmup=3)
    made.measure(1)
    assert reported == [1, 5, 9, 10]
    reported.clear()
    made.measure(0)
    assert reported == [1, 3]


@pytest.mark.parametrize(
    ("attempts", "options", "reset"),
    [(1, {}, True), (20, {}, True), (21, {}, False), (1, {"keep_prefix_cache": True}, None)],
)
def test_the_prefix_cache_is_reset_in_twenty_attempts_unless_it_is_kept(attempts, options, reset, session):
    made, _ = session(attempts, **options)
    assert made.measure(1).prefix_cache_reset is reset
    tried = 0 if reset is None else min(attempts, 20)
    assert made.front_end.attempts == attempts - tried
