"""Interruptions in a request's life and in a step's story: a pause is no wait for a limit."""

import pytest

from schedtrace.diagnose.time_split import engine_split
from schedtrace.explain.request import explain_request
from schedtrace.explain.step import explain_step
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Cpu, Events, ScheduledRequest
from schedtrace.model.trace_facts import Control, ThreadTime
from schedtrace.present.pages.story import request_page
from schedtrace.present.renderers.text import render
from schedtrace.read.run import read_run
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, finish, header, step, write_trace

PAUSE = Control("pause_state", 5_950, detail="PAUSED_ALL")
ALIVE = Cpu(at_us=900_000, threads=[ThreadTime("engine", 1, 1, 10, 0)])


def decodes(first, count, *, begin=0, **fields):
    """Steps of 1 ms in which ``a`` decodes and ``w`` waits for its seat."""
    given = {"total_requests": 1, "decode_tokens": 1, "waiting": 1, "ended": Cause.MAX_NUM_SEQS} | fields
    return [
        step(
            first + n,
            start=begin + 1_000 * n,
            took=10,
            back=900,
            requests=[ScheduledRequest("a", first + n, 1)],
            **given,
        )
        for n in range(count)
    ]


CAME = step(
    0,
    start=0,
    took=10,
    back=900,
    got={"a": 1},
    new="a",
    waiting=1,
    ended=Cause.MAX_NUM_SEQS,
    arrived=[arrival("a", 0, 0, prompt_tokens=1), arrival("w", 0, 0, prompt_tokens=9)],
)
RESUMED = Control("pause_state", 105_950, detail="UNPAUSED")


@pytest.fixture
def paused(run_of):
    """Paused for 100 ms after six steps; then ``a`` ends, and ``w`` gets its seat."""
    last = step(
        9,
        start=110_000,
        took=10,
        back=900,
        got={"w": 9},
        new="w",
        finished=[finish("a", finished_us=109_000)],
    )
    end = step(10, start=112_000, took=10, finished=[finish("w", finished_us=111_500)])
    resumed = decodes(6, 3, begin=106_000)
    resumed[0].controls = [PAUSE, RESUMED]
    return run_of("paused", CAME, *decodes(1, 5, begin=1_000), *resumed, last, end)


@pytest.fixture
def unended(tmp_path):
    """The same, and never resumed; the engine lives for 900 ms, as its threads' times show."""
    late = Events(at_us=20_000, arrived=[arrival("x", 20_000, 20_000)], controls=[PAUSE])
    lines = [CAME, *decodes(1, 5, begin=1_000), late, ALIVE]
    return read_run(write_trace(tmp_path / "unended.jsonl", header(), *lines, closed=False))


def pieces(life):
    return [
        (state.state, state.cause, round(state.to_ms - state.from_ms, 3), state.tokens)
        for state in life.states
    ]


def test_a_wait_is_for_the_pause_while_it_lasts(paused):
    assert pieces(explain_request(paused, "w")) == [
        ("waiting", "max_num_seqs", 5.95, 0),
        ("interrupted", "paused", 100.0, 0),
        ("waiting", "max_num_seqs", 4.05, 0),
        ("prefill", None, 1.5, 9),
    ]


def test_who_ran_did_not_decode_meanwhile(paused):
    life = explain_request(paused, "a")
    assert pieces(life) == [
        ("prefill", None, 0.9, 1),
        ("decode", None, 5.05, 5),
        ("interrupted", "paused", 100.0, 0),
        ("decode", None, 3.05, 3),
    ]
    assert [(state.first_step, state.last_step) for state in life.states] == [
        (0, 0),
        (1, 5),
        (None, None),
        (6, 8),
    ]


def test_the_events_of_a_life_name_it(paused, recorded_words):
    [scheduled] = [event for event in explain_request(paused, "w").events if event.what == "scheduled"]
    [pause] = [event for event in explain_request(paused, "a").events if event.at_ms == 5.95]
    recorded_words(scheduled.message, pause.message)


def test_the_sums_are_those_of_the_report(paused):
    timeline = make_timeline(paused.traces[0], paused.manifest)
    cut = timeline.interrupted_states
    lost = cut.filter(cut["state"] == "interrupted").select(LENGTH_US.sum()).item()
    bars = engine_split(timeline)
    assert lost == bars.filter(bars["part"] == "interrupted")["us"].sum() == 200_000
    assert cut.select(LENGTH_US.sum()).item() == timeline.requests_us


def test_a_pause_without_an_end_lasts_as_long_as_the_record(unended, recorded_words):
    life = explain_request(unended, "x")
    assert pieces(life) == [("interrupted", "paused", 880.0, 0)]
    recorded_words(event.message for event in life.events if event.what == "waited")
    shown = render(request_page(life), width=80)
    assert "arrived 0.020 s into the recording" in shown
    assert "the scheduler was paused 880 ms (100 %)" in " ".join(shown.split())


def test_a_step_tells_what_came_before_it_and_after(paused, unended, recorded_words):
    interruptions = {number: explain_step(paused, number).interruptions for number in (4, 5, 6, 7)}
    assert {number: len(each) for number, each in interruptions.items()} == {4: 0, 5: 1, 6: 1, 7: 0}
    recorded_words(interruptions[5], interruptions[6], explain_step(unended, 5).interruptions)
