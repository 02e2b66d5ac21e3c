"""Who was there when a trace began, as it is read: whole, by way of files, and while it grows."""

import pytest

from schedtrace.diagnose.serving_metrics import request_presence
from schedtrace.explain.request import explain_request
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Cpu, Events, Present, ScheduledRequest
from schedtrace.read.follow import Following
from schedtrace.read.growing import still_there
from schedtrace.read.lines import ReadOptions
from schedtrace.read.run import read_run
from schedtrace.read.trace import read_trace
from schedtrace.timeline.queue_waits import waiting_after
from schedtrace.timeline.timeline import make_timeline
from schedtrace.workloads.recorded_load import from_trace
from tests.makers import arrival, finish, header, step, write_trace

THERE = [
    Present("runs", "running", -900, 8, computed_tokens=11, output_tokens=4),
    Present("stands", "running", -850, 8, computed_tokens=3),
    Present("lost", "preempted", -800, 8, output_tokens=3, num_preemptions=1),
    Present("waits", "waiting", -700, 5, queued_us=-600),
]
"""One decodes, one gets nothing, one lost all that it had computed, one has not run yet."""
END_US = 270


@pytest.fixture
def path(tmp_path):
    runs, again = ScheduledRequest("runs", 12, 1), ScheduledRequest("lost", 0, 11, "resumed")
    full = {"ended": Cause.MAX_NUM_SEQS, "took": 10, "back": 60}
    return write_trace(
        tmp_path / "run" / "engine-0.jsonl",
        header(attached=True),
        Cpu(at_us=40),
        Events(at_us=50, present=THERE),
        step(
            0,
            start=100,
            got={"runs": 1},
            requests=[ScheduledRequest("runs", 11, 1)],
            running=2,
            waiting=2,
            **full,
        ),
        step(
            1,
            start=200,
            got={"runs": 1, "lost": 11},
            requests=[runs, again],
            arrived=[arrival("new", 140, 150)],
            running=3,
            waiting=2,
            **full,
        ),
        Events(
            at_us=END_US, finished=[finish("runs", finished_us=END_US, arrived_us=-900, last_token_us=260)]
        ),
    )


def test_they_are_the_same_however_a_trace_is_read(path):
    whole = read_trace(path).present
    assert whole["request_id"].to_list() == [one.request_id for one in THERE]
    assert whole["at_us"].to_list() == [50] * len(THERE)
    by_files = ReadOptions(memory_bytes=0)
    assert read_trace(path, by_files).present.equals(whole)
    assert read_trace(path, by_files).present.equals(whole)  # from the cache
    following = Following(path, 10**9)
    assert following.trace(following.read()).present.equals(whole)
    saved = write_trace(path.parent.parent / "saved.jsonl", following.saved(0).rstrip(b"\n"), closed=False)
    assert read_trace(saved).present.drop("at_us").equals(whole.drop("at_us"))


def test_a_window_of_a_growing_trace_begins_with_them_as_they_are_by_then(path):
    following = Following(path, 10**9)
    following.read()
    now = still_there(following.lives)
    assert now.select("request_id", "state", "at_us").rows() == [
        ("stands", "running", 50),
        ("lost", "running", 50),
        ("waits", "waiting", -600),
    ]


def test_they_are_in_states_and_in_the_queue_from_the_beginning(path):
    timeline = make_timeline(read_trace(path))
    states = timeline.request_states.filter(timeline.request_states["request_id"] != "new")
    full = str(Cause.MAX_NUM_SEQS)
    assert states.select("request_id", "state", "cause", "begin_us", "end_us", "tokens").rows() == [
        ("lost", "preempted", "next_step", 50, 100, 0),
        ("lost", "preempted", full, 100, 200, 0),
        ("lost", "recompute", None, 200, 260, 11),
        ("lost", "decode", None, 260, END_US, 0),
        ("runs", "decode", None, 50, END_US, 2),
        ("stands", "prefill", None, 50, 100, 0),
        ("stands", "stalled", "other", 100, END_US, 0),
        ("waits", "waiting", "next_step", 50, 100, 0),
        ("waits", "waiting", full, 100, END_US, 0),
    ]
    assert timeline.mismatches.is_empty()
    assert not timeline.begins
    for number, names in enumerate((["lost", "waits"], ["waits", "new"])):
        assert waiting_after(timeline.waits, number)["request_id"].to_list() == names
    assert timeline.waits["wanted_tokens"].to_list() == [11, 5, 100]
    assert timeline.first_arrivals["request_id"].to_list() == ["new"]
    there = request_presence(read_trace(path), 0, 300)
    assert sorted(there.rows()) == [(50, END_US), (50, 300), (50, 300), (50, 300), (150, 300)]


def test_what_was_before_the_recording_is_said_to_be_unknown(path):
    life = explain_request(read_run(path.parent), "waits")
    assert [(state.state, state.from_ms, state.to_ms) for state in life.states][:2] == [
        ("unrecorded", 0.0, 0.75),
        ("waiting", 0.75, 0.8),
    ]
    assert [event.what for event in life.events][:2] == ["arrived", "present"]
    gone = explain_request(read_run(path.parent), "runs")
    assert (gone.e2e_ms, gone.ttft_ms) == (1.17, None)


def test_a_replay_has_those_who_came(path, recorded_words):
    load = from_trace(read_trace(path))
    assert [one.request_id for one in load] == ["new"]
    recorded_words(load.notes[-1])
