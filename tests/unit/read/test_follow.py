"""A trace that is read while it grows is the trace that is read when it is done."""

import os
from pathlib import Path

import pytest

from schedtrace.errors import InputError
from schedtrace.model.trace import End, Events, Notice, Output, Preemption, ScheduledRequest
from schedtrace.read import growing as growing_module
from schedtrace.read.follow import Following, require_header
from schedtrace.read.growing import LostError
from schedtrace.read.trace import read_trace
from schedtrace.timeline.timeline import make_timeline
from tests.deltas import Deltas
from tests.makers import arrival, encoded, finish, header, step, write_trace
from tests.unit.watch.growing import Growing

ALL = 10**12
DATA = Path(__file__).parents[2] / "data" / "findings"


@pytest.fixture
def growing(tmp_path):
    return Growing(tmp_path)


def followed(growing, keep_us=ALL):
    return Following(growing.path, keep_us)


def test_only_whole_lines_count_and_each_is_read_once(growing):
    follower = followed(growing)
    growing.grow(3)
    (line,) = growing.lines(1)
    growing.append(tail=line[:20])
    assert [chunk.steps["step"].to_list() for chunk in follower.read()] == [[0, 1, 2]]
    assert follower.read() == []
    growing.append(tail=line[20:] + b"\n")
    assert [chunk.steps["step"].to_list() for chunk in follower.read()] == [[3]]
    assert follower.newest_us == 399_000
    assert follower.garbled_us is None


def test_deltas_go_on_over_the_chunks(growing):
    follower = followed(growing)
    for _ in range(7):
        growing.grow(3)
        follower.read()
    trace, whole = follower.trace(list(follower.chunks)), read_trace(growing.path)
    assert trace.steps.equals(whole.steps)
    assert trace.requests().collect().equals(whole.requests().collect())
    assert trace.exits().collect().equals(whole.exits().collect())


def test_the_states_of_a_window_are_those_of_the_whole_trace(growing):
    growing.grow(40)
    follower = followed(growing, keep_us=1_000_000)
    follower.read()
    for _ in range(5):
        growing.grow(7)
        follower.read()
    window = make_timeline(follower.trace(list(follower.chunks)))
    whole = make_timeline(read_trace(growing.path))
    assert window.steps["step"].to_list() == list(range(61, 75))
    assert window.mismatches.is_empty()
    kind = ["request_id", "state", "cause"]
    last = [
        one.request_states.group_by("request_id").last().select(kind).sort(kind) for one in (window, whole)
    ]
    assert last[0].equals(last[1])
    assert last[0].rows() == [("a", "decode", None), ("b", "decode", None), ("c", "waiting", "max_num_seqs")]


def test_what_came_long_before_is_skimmed(growing):
    growing.append(Notice(at_us=0, message="told early"))
    growing.grow(60)
    follower = followed(growing, keep_us=1_000_000)
    (chunk,) = follower.read()
    assert follower.notices == ["told early"]
    assert chunk.steps["step"].to_list() == list(range(40, 60))  # a full line is every tenth
    assert [(live.entry.request_id, live.waits_since_us) for live in follower.lives] == [
        ("a", None),
        ("b", None),
        ("c", -400),
    ]


def test_one_who_was_preempted_before_the_window_waits_in_it(growing):
    growing.grow(12)
    growing.names = {"a": 1}
    growing.waiting = ("b", "c")
    lost = growing.one(12, first=False)
    lost.preempted.append(Preemption("b", 105, in_schedule=True))
    growing.at = 13
    growing.append(growing.deltas.line_of(lost))
    growing.grow(47)
    follower = followed(growing, keep_us=1_000_000)
    follower.read()
    lives = {live.entry.request_id: live for live in follower.lives}
    assert (lives["b"].waits_since_us, lives["b"].preempted) == (1_200_000, 1)
    timeline = make_timeline(follower.trace(list(follower.chunks)))
    assert timeline.mismatches.is_empty()
    states = timeline.request_states.group_by("request_id").last().sort("request_id")
    assert states["state"].to_list() == ["decode", "preempted", "waiting"]
    growing.names, growing.waiting = {"a": 1, "b": 1}, ("c",)
    back = growing.one(60, first=False)
    growing.at = 61
    back.requests[1] = ScheduledRequest("b", 0, 1, "resumed")
    growing.append(back)
    growing.deltas = Deltas(10)
    for _ in range(4):
        growing.grow(10)
        follower.read()
    late = make_timeline(follower.trace(list(follower.chunks)[-2:]))
    assert late.mismatches.is_empty()
    last = late.request_states.group_by("request_id").last().sort("request_id")
    assert last["state"].to_list() == ["decode", "decode", "waiting"]


def test_idle_events_and_late_outputs_count(growing):
    growing.grow(1)
    growing.append(step(1, start=100_000, back=None, got={"a": 1}))
    growing.append(Output(step=1, output_us=150_000, update_us=5, output_tokens=1))
    growing.append(
        Events(at_us=200_000, arrived=[arrival("z", 190_000)], finished=[finish("a", finished_us=1)])
    )
    growing.append(End(at_us=300_000, steps=2))
    follower = followed(growing)
    follower.read()
    trace = follower.trace(list(follower.chunks))
    assert trace.steps["output_us"].to_list() == [99_000, 150_000]
    assert trace.finishes["request_id"].to_list() == ["a"]
    assert [live.entry.request_id for live in follower.lives] == ["b", "c", "z"]
    assert follower.end is not None
    assert (follower.newest_us, follower.dropped) == (300_000, False)


def test_steps_that_the_recorder_dropped_are_known(growing):
    growing.grow(1)
    growing.append(Events(at_us=200_000, dropped_steps=2))
    follower = followed(growing)
    follower.read()
    assert follower.dropped


def test_a_saved_window_is_a_trace_of_its_own(growing, tmp_path):
    growing.grow(60)
    follower = followed(growing, keep_us=2_000_000)
    follower.read()
    growing.grow(3)
    follower.read()
    saved = tmp_path / "saved" / "engine-0.jsonl"
    saved.parent.mkdir()
    saved.write_bytes(follower.saved(5_500_000))
    trace = read_trace(saved)
    assert trace.steps["step"].to_list()[-1] == 62
    assert trace.notices == ["saved by schedtrace watch: it begins at step 30"]
    assert trace.arrivals["request_id"].to_list() == ["c"]
    assert not trace.problems.garbled_lines
    assert not trace.problems.not_rebuilt
    assert make_timeline(trace).mismatches.is_empty()


def test_a_file_without_a_header_yet_is_waited_for(tmp_path):
    path = tmp_path / "engine-0.jsonl"
    path.write_bytes(b"")
    follower = Following(path, ALL)
    assert follower.read() == []
    path.write_bytes(encoded(header()))
    assert follower.read() == []
    assert follower.header is None
    write_trace(path, header(), step(0, got={"a": 1}, new="a"))
    assert len(follower.read()) == 1
    assert follower.header is not None


def test_what_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "engine-0.jsonl"
    path.write_bytes(b"hello\n")
    with pytest.raises(InputError, match="not a schedtrace trace"):
        Following(path, ALL).read()


@pytest.mark.parametrize(
    ("become", "said"), [("gone", "removed"), ("other", "replaced by another file"), ("short", "cut")]
)
def test_a_file_that_is_lost_says_how(growing, become, said):
    growing.grow(3)
    follower = followed(growing)
    follower.read()
    if become == "gone":
        growing.path.unlink()
    elif become == "other":
        other = growing.path.with_suffix(".new")
        other.write_bytes(growing.path.read_bytes())
        other.replace(growing.path)
    else:
        growing.path.write_bytes(growing.path.read_bytes()[:100])
    with pytest.raises(LostError, match=said):
        follower.read()


def test_a_part_of_a_line_that_the_recorder_takes_back_is_no_loss(growing):
    """On a full disk it truncates to its last whole line."""
    growing.grow(3)
    size = growing.path.stat().st_size
    growing.append(tail=b'{"type":"step","st')
    follower = followed(growing)
    follower.read()
    with growing.path.open("r+b") as file:
        file.truncate(size)
    growing.grow(1)
    assert [chunk.steps["step"].to_list() for chunk in follower.read()] == [[3]]
    assert follower.garbled_us is None


def test_a_broken_line_costs_its_steps_and_nothing_more(growing):
    growing.grow(3)
    growing.append(b'{"type":"step"')
    growing.grow(20)
    follower = followed(growing)
    follower.read()
    assert follower.garbled_us == 299_000
    assert follower.trace(list(follower.chunks)).steps["step"].to_list() == [0, 1, 2, *range(10, 23)]


@pytest.mark.parametrize("sample", ["rank-imbalance/dummies", "kv-bound/shows", "preemption/shows"])
def test_a_recorded_trace_in_any_pieces_is_the_whole_one(sample, tmp_path):
    recorded = DATA / sample / "engine-0.jsonl"
    content, path = recorded.read_bytes(), tmp_path / "engine-0.jsonl"
    path.touch()
    follower = Following(path, ALL)
    for at in range(0, len(content), 7001):
        with path.open("ab") as file:
            file.write(content[at : at + 7001])
        follower.read()
    trace, whole = follower.trace(list(follower.chunks)), read_trace(recorded)
    assert len(follower.chunks) > 1
    assert trace.steps.equals(whole.steps)
    assert make_timeline(trace).request_states.equals(make_timeline(whole).request_states)
    assert trace.dummies.equals(whole.dummies)
    assert trace.cpu.equals(whole.cpu)


def test_steps_that_stand_in_another_order_are_put_in_order(tmp_path):
    told = [
        step(
            number, got={"a": 1 + number}, arrived=[arrival(f"r{number}", 0)], preempted=[Preemption("b", 1)]
        )
        for number in (0, 2, 1, 3)
    ]
    path = write_trace(tmp_path / "engine-0.jsonl", header(), *told)
    follower = Following(path, ALL)
    trace, whole = follower.trace(follower.read()), read_trace(path)
    assert trace.steps["step"].to_list() == [0, 1, 2, 3]
    assert trace.requests().collect().equals(whole.requests().collect())
    assert trace.preemptions().collect()["step"].to_list() == [0, 1, 2, 3]
    assert trace.arrivals["step"].to_list() == [0, 1, 2, 3]


def test_a_step_that_comes_again_is_noted(growing):
    follower = followed(growing)
    growing.grow(3)
    follower.read()
    assert follower.garbled_us is None
    growing.append(step(1))
    follower.read()
    assert follower.garbled_us == follower.newest_us


def test_a_pipe_is_no_trace_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "engine-0.jsonl")
    for open_it in (require_header, lambda path: Following(path, ALL)):
        with pytest.raises(InputError, match="not a regular file"):
            open_it(tmp_path / "engine-0.jsonl")


def test_a_line_without_end_is_dropped_as_it_comes(growing, monkeypatch):
    monkeypatch.setattr(growing_module, "LONGEST_LINE", 5000)
    monkeypatch.setattr(growing_module, "BLOCK", 1000)
    follower = followed(growing)
    growing.append(tail=b'{"type":"step",' + b"x" * 20_000)
    follower.read()
    assert follower.garbled_us is not None
    growing.append(tail=b"\n")
    growing.grow(2)
    assert [number for chunk in follower.read() for number in chunk.steps["step"]] == [0, 1]
