"""What ``step`` and ``request`` say of interruptions, and of the facts beside the decisions."""

import pytest

from schedtrace.diagnose.verdict import engine_split
from schedtrace.explain.request import explain_request
from schedtrace.explain.step import explain_step
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Cpu, Events, Present, ScheduledRequest
from schedtrace.model.trace_facts import (
    Admission,
    CacheGroup,
    Control,
    Grammar,
    HeadRefusal,
    KvLoad,
    KvSend,
    ThreadTime,
)
from schedtrace.present.pages.story import request_page
from schedtrace.present.renderers.text import render
from schedtrace.read.run import read_run
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, finish, header, step, write_trace


def facts_of(run_of, line, **header):
    return explain_step(run_of("r", line, **header), line.step).facts


def with_facts(one, **facts):
    for name, value in facts.items():
        setattr(one, name, value)
    return one


def test_a_step_of_a_trace_without_facts_says_nothing(run_of):
    assert facts_of(run_of, step(0, got={"a": 1})) == []


def test_what_the_head_needs_and_who_holds_the_blocks(run_of, recorded_words):
    refusal = HeadRefusal("head", [5, 4], 2, ["a", "b"], [[6, 3], [3, 1]], ["b"], 3, [7, 0])
    groups = [CacheGroup("FullAttention", 16, 2), CacheGroup("SlidingWindow", 16, 2, window=64)]
    recorded_words(facts_of(run_of, with_facts(step(0), refusals=[refusal]), cache_groups=groups))


def test_one_group_is_not_named_and_the_sixth_holder_is_one_of_the_rest(run_of, recorded_words):
    refusal = HeadRefusal("head", [5], 2, list("abcdef"), [[6, 5, 4, 3, 2, 1]])
    about = {"cache_groups": [CacheGroup("Mamba", 16, 1)], "enable_prefix_caching": False}
    recorded_words(facts_of(run_of, with_facts(step(0), refusals=[refusal]), **about))


def test_what_is_not_known_is_not_said(run_of, recorded_words):
    """Nobody could be asked, and a group had too many blocks to look at."""
    refusal = HeadRefusal("head", [], 2, ["a"], [[6], []])
    recorded_words(facts_of(run_of, with_facts(step(0), refusals=[refusal]), enable_prefix_caching=False))


def test_what_the_caches_gave(run_of, recorded_words):
    arrivals = [
        Admission("a", 32, 0, 4), Admission("b", 16, 48, 4), Admission("c", 0, 0, 4, miss="not_cached"),
        Admission("d", 0, 0, 4, miss="not_cached"), Admission("e", 0, 0, 1, miss="unknown"),
    ]  # fmt: skip
    recorded_words(facts_of(run_of, with_facts(step(0), admitted=arrivals)))


def test_execution_limbo_encoder_and_ranks(run_of, recorded_words):
    values = {
        "execute_after_us": 1500, "execute_us": 8250, "finished_holding": 2, "deferred_free_blocks": 1,
        "kv_loads_parked": 3, "sessions_paused": 1, "encoder_slots_free": 64, "encoder_slots_freeable": 1096,
        "dummy_us": 2500, "dummy_batches": 2, "wave": 4, "step_counter": 17,
    }  # fmt: skip
    recorded_words(facts_of(run_of, with_facts(step(0), **values)))
    zeros = dict.fromkeys(
        ["finished_holding", "deferred_free_blocks", "kv_loads_parked", "sessions_paused"], 0
    )
    assert facts_of(run_of, with_facts(step(0), **zeros)) == []


def test_the_life_of_a_request_has_them(run_of, recorded_words):
    came = with_facts(
        arrival("r", 0, 9_000),
        received_us=1_000, input_queue_us=3_500, structured=True, logprobs=5, min_tokens=2, logit_bias=1,
    )  # fmt: skip
    gone = with_facts(
        finish("r", finished_us=50_000), abort_us=40_000, drafts=30, drafts_accepted=12, drafts_invalid=3
    )
    first = with_facts(
        step(0, start=20_000, got={"r": 1}, arrived=[came]),
        grammars=[Grammar("r", 5_000, 8_000, submitted_us=3_000), Grammar("other", 1, 2)],
        kv_loads=[KvLoad("r", "begun", 10_000, [3, 1]), KvLoad("r", "arrived", 15_000, [3, 1])],
        admitted=[Admission("r", 16, 48, 4)],
    )
    last = with_facts(
        step(1, start=60_000, finished=[gone]),
        kv_sends=[KvSend("r", "begun", 50_500, [3, 1]), KvSend("r", "ended", 55_000, [3, 1])],
    )
    events = explain_request(run_of("r", first, last), "r").events
    facts = [event for event in events if event.what in WHAT]
    assert [(event.at_ms, event.what) for event in facts] == [
        (1.0, "received"),
        (8.0, "grammar"),
        (9.0, "asked"),
        (10.0, "kv_load"),
        (15.0, "kv_load"),
        (20.0, "cached"),
        (40.0, "abort"),
        (50.0, "drafts"),
        (50.5, "kv_send"),
        (55.0, "kv_send"),
    ]
    recorded_words(event.message for event in facts)


WHAT = {"received", "asked", "grammar", "kv_load", "kv_send", "cached", "abort", "drafts"}


def test_a_request_that_was_there_asks_when_the_recording_begins(run_of):
    there = Events(at_us=20_000, present=[Present("r", "waiting", 1_000, 5, 3_000, structured=True)])
    events = explain_request(run_of("r", there, step(0, start=30_000, got={"r": 5})), "r").events
    assert [(event.at_ms, event.what) for event in events][:3] == [
        (0.0, "arrived"),
        (19.0, "present"),
        (19.0, "asked"),
    ]


def test_a_life_without_facts_has_none_of_these_events(run_of):
    run = run_of("r", step(0, got={"r": 1}, arrived=[arrival("r", 0, 5)]), step(1, finished=[finish("r")]))
    assert {event.what for event in explain_request(run, "r").events}.isdisjoint(WHAT)


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
