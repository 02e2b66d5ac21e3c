"""What a look shows, exactly; and what happens to a trace under it."""

import os
import shutil
from types import SimpleNamespace

import pytest
from zstandard import ZstdCompressor

from schedtrace.engine.running_engines import Listening
from schedtrace.errors import EngineError, InputError
from schedtrace.model.live import QueueNow
from schedtrace.model.manifest import part_name
from schedtrace.model.message import NOTHING
from schedtrace.model.trace import End, Events
from schedtrace.read.run import read_run
from schedtrace.watch.find import Target
from schedtrace.watch.judge import LINES_LOST, Picture
from schedtrace.watch.plain_lines import SCREENFUL, age, status_line, status_page
from schedtrace.watch.seen import Verdict
from schedtrace.watch.session import WatchSession
from tests.makers import arrival, finish, step
from tests.unit.present.test_pages import entry, queue
from tests.unit.watch.growing import ANCHOR_S, LATER_S, STEP_US, Growing, session_of


def notes(seen):
    return [note.text for note in seen.notes]


def make_costly(session):
    """Each verdict takes three seconds of a core."""
    for judge in session.judges:
        judge.spent = iter(range(0, 1000, 3)).__next__


def test_a_look_has_the_figures_of_the_last_steps(growing, unjudged):
    growing.grow(100)
    unjudged.observe_engines()
    growing.grow(100)
    seen = unjudged.observe_engines()
    (engine,) = seen.engines
    assert (engine.rank, engine.state, engine.running, engine.seats, engine.waiting) == (0, "", 2, 2, 1)
    assert engine.waiting_for == {"max_num_seqs": 1}
    assert engine.kv_frac == 0.4
    assert engine.budget_frac == 0.002  # 2 of 1,000 tokens
    assert (engine.steps_per_s, engine.preempted_per_s) == (10.0, 0.0)
    assert [(slow.request_id, slow.waits_us, slow.cause) for slow in seen.slowest] == [
        ("c", 19_999_400, "max_num_seqs"),
        ("a", None, None),
        ("b", None, None),
    ]
    assert [cell.waiting for cell in seen.cells[None][-20:]] == [{"max_num_seqs": 1.0}] * 20
    assert seen.cells[None][-21].steps == 0


def test_rates_are_of_ten_seconds_and_the_budget_of_steps_that_scheduled_anything(growing, unjudged):
    growing.grow(205)
    idle = [step(number, start=number * 100_000, running=2, waiting=1) for number in range(205, 255)]
    growing.append(*idle)
    growing.at = 255
    (engine,) = unjudged.observe_engines().engines
    assert (engine.steps_per_s, engine.budget_frac) == (10.0, 0.002)


def test_throughput_is_over_the_time_with_requests_of_all_engines(folder):
    """Rank 0 has requests for 4 s of the last 10, rank 1 for 2 of these; each gives 20 tokens a second."""
    of_rank = [Growing(folder, rank, waiting=(), clock="virtual") for rank in (0, 1)]
    for growing, steps in zip(of_rank, (40, 20), strict=True):
        growing.grow(steps)
        at_us = steps * STEP_US
        done = [finish(name, finished_us=at_us) for name in "ab"]
        growing.append(step(steps, start=at_us, back=0, output_tokens=0, finished=done))
        growing.append(step(steps + 1, start=9_000_000, back=0, output_tokens=0))
        growing.at = 100
    seen = session_of(folder, growing, judged=False).observe_engines()
    assert [engine.output_tokens for engine in seen.engines] == [80, 40]
    # the requests came 0.4 ms before the first step
    assert [engine.output_per_s for engine in seen.engines] == pytest.approx([80 / 4.0004, 40 / 4.0004])
    assert seen.total().output_per_s == pytest.approx(120 / 4.0004)


def test_the_verdicts_are_those_of_analyze(folder, cli, growing, session):
    import json

    growing.grow(200)
    short, long = session.observe_engines().verdicts
    assert (short.span_s, long.span_s) == (10, 60)
    code, out, _ = cli("analyze", folder, "--last", "60s", "--format", "json")
    assert code == 0
    (run,) = json.loads(out)["runs"]
    advice = run["findings"][0]["advice"][0]["message"]["text"]
    sentences = [*(sentence["text"] for sentence in run["verdict"]), f"Try: {advice}."]
    assert f"last 1 min (now): {' '.join(sentences)}" in status_page(session.observe_engines()).splitlines()


def test_verdicts_keep_their_pace(growing, session):
    growing.grow(20)
    make_costly(session)
    first = session.observe_engines().verdicts
    growing.grow(51)
    second = session.observe_engines().verdicts
    assert second[0] is not first[0]  # the first one is not counted: it imports
    assert second[1] is first[1]
    growing.grow(100)
    assert session.observe_engines().verdicts[0] is second[0]
    growing.grow(2000)
    assert session.observe_engines().verdicts[0] is not second[0]


def test_a_verdict_is_renewed_when_what_is_seen_differs_in_kind(folder):
    growing = Growing(folder, waiting=())
    growing.grow(100)
    session = session_of(folder, growing)
    make_costly(session)
    session.observe_engines()
    growing.grow(150)
    calm = session.observe_engines().verdicts
    growing.waiting = ("c",)
    came = growing.one(growing.at, first=False)
    came.arrived = [arrival("c", growing.at * STEP_US - 500, growing.at * STEP_US - 400)]
    growing.append(growing.deltas.line_of(came))
    growing.at += 1
    growing.grow(30)
    short, long = session.observe_engines().verdicts
    assert (short.sentences, short.changed) == (calm[0].sentences, "requests waited")
    assert age(short, session.observe_engines().at_s) == "3 s ago, before requests waited"
    assert short.old(growing.now_s)
    assert not calm[0].old(growing.now_s)
    growing.grow(20)
    short, long = session.observe_engines().verdicts
    assert (short.at_s, short.changed) == (growing.now_s, "")
    assert (long.at_s, long.changed) == (calm[1].at_s, "requests waited")
    growing.grow(100)
    again = session.observe_engines().verdicts
    assert again[0] is short  # nothing changed since: the usual pace
    assert (again[1].at_s, again[1].changed) == (growing.now_s, "")


CALM = Picture(idle=False, waiting_for={}, kv_frac=0.5, preempting=False)
IDLE = Picture(idle=True, waiting_for={}, kv_frac=0.0, preempting=False)
FULL = Picture(idle=False, waiting_for={}, kv_frac=0.96, preempting=False)
NEARLY = Picture(idle=False, waiting_for={}, kv_frac=0.92, preempting=False)
PREEMPTING = Picture(idle=False, waiting_for={}, kv_frac=0.5, preempting=True)


def waits(**causes):
    return Picture(idle=False, waiting_for=causes, kv_frac=0.5, preempting=False)


@pytest.mark.parametrize(
    ("then", "now", "changed"),
    [
        (CALM, CALM, ""),
        (CALM, IDLE, "the engine ran empty"),
        (IDLE, CALM, "requests ran"),
        (CALM, waits(kv_blocks=1), "requests waited"),
        (waits(kv_blocks=1), CALM, "the queue emptied"),
        (waits(kv_blocks=4, max_num_seqs=3), waits(kv_blocks=3, max_num_seqs=4), ""),
        (waits(kv_blocks=4), waits(kv_blocks=2, max_num_seqs=4), "they waited for max_num_seqs"),
        (waits(kv_blocks=4), waits(max_num_seqs=1), "they waited for max_num_seqs"),
        (CALM, FULL, "95 % of the KV blocks were in use"),
        (FULL, NEARLY, ""),
        (FULL, CALM, "KV blocks became free"),
        (CALM, PREEMPTING, "preemptions began"),
        (PREEMPTING, CALM, ""),
    ],
)
def test_what_counts_as_a_change_in_kind(then, now, changed):
    assert now.changed(then) == changed


def test_a_verdict_is_old_after_its_span_or_20_s():
    short, long = (Verdict(span_s, 100.0, [], NOTHING) for span_s in (10, 60))
    assert [short.old(at_s) for at_s in (110.0, 110.5)] == [False, True]
    assert [long.old(at_s) for at_s in (120.0, 120.5)] == [False, True]


def test_who_waited_is_not_carried_into_the_seconds_after_the_last_request_ended(growing, unjudged):
    growing.grow(19)
    growing.waiting = ()
    last = growing.one(19, first=False)
    last.num_running_after = 0
    growing.append(growing.deltas.line_of(last))
    growing.at = 100
    cells = unjudged.observe_engines().cells[None]
    assert [cell.waiting for cell in cells[-9:-7]] == [{"max_num_seqs": 1.0}, {"max_num_seqs": 0.9}]
    assert [cell.waiting for cell in cells[-7:]] == [{}] * 7


def test_who_waits_during_a_long_step_is_carried(growing, unjudged):
    growing.grow(20)
    growing.at = 50
    assert [cell.waiting for cell in unjudged.observe_engines().cells[None][-3:]] == [
        {"max_num_seqs": 1.0}
    ] * 3


def test_what_had_no_step_is_judged_again_at_the_next_look(growing, session, recorded_words):
    recorded_words(session.observe_engines().verdicts[1].sentences[0])
    growing.grow(3)
    recorded_words(session.observe_engines().verdicts[1].sentences[0])


def test_a_verdict_says_that_lines_of_its_time_were_lost(growing, session):
    growing.grow(20)
    growing.append(b"no line")
    growing.grow(20)
    short, long = session.observe_engines().verdicts
    assert short.sentences[0] == LINES_LOST
    growing.grow(300)
    short, long = session.observe_engines().verdicts
    assert short.sentences[0] != LINES_LOST
    assert long.sentences[0] == LINES_LOST


def test_two_ranks_have_a_row_each_and_their_sum(folder):
    one, two = Growing(folder, 0), Growing(folder, 1, waiting=())
    session = session_of(folder, one)
    one.grow(30)
    two.grow(30)
    seen = session.observe_engines()
    total = seen.total()
    assert [engine.rank for engine in seen.engines] == [0, 1]
    assert (total.running, total.seats, total.waiting, total.kv_total) == (4, 4, 1, 200)
    assert total.waiting_for == {"max_num_seqs": 1}
    assert seen.cells[0][-1].waiting == {"max_num_seqs": 1.0}
    assert seen.cells[1][-1].waiting == {}


def test_of_several_engines_the_one_that_stands_still_is_named(folder, recorded_words):
    runs, stands = Growing(folder, 0), Growing(folder, 1)
    runs.grow(100)
    stands.grow(30)
    [first, *_] = session_of(folder, runs).observe_engines().verdicts[0].sentences
    recorded_words(first)


def test_a_rank_that_begins_later_is_found(folder):
    one = Growing(folder, 0)
    session = session_of(folder, one)
    one.grow(3)
    assert len(session.observe_engines().engines) == 1
    Growing(folder, 1).grow(3)
    assert len(session.observe_engines().engines) == 2


def test_an_engine_that_ends_is_over(growing, session):
    growing.grow(30)
    assert not session.observe_engines().over
    growing.append(End(at_us=3_000_000, steps=30))
    seen = session.observe_engines()
    assert seen.over
    assert seen.engines[0].state == "ended"
    assert notes(seen) == ["the engine ended"]
    assert seen.verdicts[0].at_s == seen.at_s


def test_idle_long_steps_and_silence_are_told_apart(folder, growing):
    growing.grow(30)
    later = [growing.now_s]
    session = WatchSession(Target(folder, only=True), lambda: later[0])
    session.judges.clear()

    def state(after_s, written_s):
        later[0] = growing.now_s + after_s
        os.utime(growing.path, (later[0] - written_s,) * 2)
        return session.observe_engines().engines[0].state

    assert state(2, 0) == ""
    assert state(21.5, 0) == "no step for 20 s"
    assert state(21.5, 15) == "silent for 15 s"
    assert notes(session.observe_engines())[-1].startswith("nothing is written any more")
    growing.waiting = ()
    last = growing.one(30, first=False)
    last.num_running_after = 0
    growing.append(last)
    assert state(21.6, 0) == "idle for 20 s"


def test_a_killed_engine_is_over(folder):
    import socket

    growing = Growing(folder, host=socket.gethostname(), pid=2**22 + 1)  # above what Linux hands out
    growing.grow(3)
    seen = session_of(folder, growing).observe_engines()
    assert seen.over
    assert seen.engines[0].state == "killed"
    assert notes(seen) == ["the engine's process is gone, and its trace has no end: killed?"]


def test_a_removed_trace_is_noted_and_over(folder, growing, session):
    growing.grow(3)
    session.observe_engines()
    shutil.rmtree(folder)
    seen = session.observe_engines()
    assert notes(seen) == [f"{growing.path}: removed while it was followed"]
    assert seen.over
    assert status_line(seen).endswith(f"waiting for {folder} to appear: no such file or folder yet")


def test_a_replaced_trace_is_noted_and_read_from_its_begin(folder, growing, session):
    growing.grow(30)
    session.observe_engines()
    growing.path.rename(growing.path.with_suffix(".1"))
    Growing(folder).grow(5)
    assert notes(session.observe_engines()) == [
        f"{growing.path}: replaced by another file while it was followed"
    ]
    seen = session.observe_engines()
    assert not seen.over
    assert [slow.request_id for slow in seen.slowest] == ["c", "a", "b"]


def test_a_cut_trace_is_noted_and_read_from_its_begin(folder, growing, session):
    growing.grow(30)
    session.observe_engines()
    Growing(folder)  # truncates
    assert notes(session.observe_engines()) == [f"{growing.path}: cut while it was followed"]
    assert len(session.observe_engines().engines) == 1


def test_what_is_no_trace_is_noted_once(folder):
    folder.mkdir()
    (folder / "engine-0.jsonl").write_bytes(b"hello\n")
    session = WatchSession(Target(folder, only=True))
    session.observe_engines()
    assert notes(session.observe_engines()) == [
        f"{folder}/engine-0.jsonl:1: not a schedtrace trace, the first line is no header"
    ]


def test_a_newer_run_is_shown_once_the_one_before_is_over(tmp_path):
    first = Growing(tmp_path / "first")
    first.grow(3)
    later = [first.now_s]
    session = WatchSession(Target(tmp_path, only=False), lambda: later[0])
    os.utime(first.path, (later[0], later[0]))
    assert session.observe_engines().name == "first"
    second = Growing(tmp_path / "second")
    second.grow(5)
    os.utime(second.path, (LATER_S, LATER_S))  # by the real clock, however slow this machine: it grows
    seen = session.observe_engines()
    assert (seen.name, notes(seen)) == ("first", ["a newer run began, second; the one shown still runs"])
    first.append(End(at_us=400_000, steps=3))
    session.observe_engines()
    os.utime(first.path, (ANCHOR_S, ANCHOR_S))
    seen = session.observe_engines()
    assert (seen.name, notes(seen)) == ("second", ["a newer run began: second"])
    assert not seen.over
    second.append(End(at_us=600_000, steps=5))
    os.utime(second.path, (LATER_S, LATER_S))
    assert notes(session.observe_engines()) == ["a newer run began: second", "the engine ended"]


def test_a_saved_window_is_a_run(tmp_path, growing, unjudged):
    growing.grow(30)
    unjudged.observe_engines()
    saved = unjudged.save_last_minute(tmp_path / "saved")
    (trace,) = read_run(saved).traces
    assert trace.steps.height == 30
    assert saved.stat().st_mode & 0o777 == 0o700
    assert (saved / "engine-0.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_saved_window_is_no_newer_run(tmp_path):
    growing = Growing(tmp_path / "first")
    growing.grow(3)
    session = session_of(tmp_path, growing, only=False, judged=False)
    session.observe_engines()
    growing.append(End(at_us=300_000, steps=3))
    session.observe_engines()
    session.save_last_minute(tmp_path / "watch-1")
    seen = session.observe_engines()
    assert seen.name == "first"
    assert notes(seen) == ["the engine ended"]


def test_hostile_ids_are_text(folder):
    hostile = "\x1b[31m[bold]<script>\u202e" + "x" * 5000
    growing = Growing(folder, waiting=(hostile,))
    growing.grow(5)
    session = session_of(folder, growing)
    text = status_page(session.observe_engines())
    assert r"\x1b[31m[bold]<script>\u202e" in text
    assert text.isascii()
    assert "\x1b" not in session.life(session.observe_engines().slowest[0], 80)


def test_a_page_for_one_screen_counts_the_requests_that_it_leaves_out(folder):
    growing = Growing(folder, waiting=tuple(f"w{number}" for number in range(15)))
    growing.grow(5)
    seen = session_of(folder, growing).observe_engines()
    rows = status_page(seen, SCREENFUL).splitlines()
    begin = rows.index("requests (age, state): the longest waits, then the oldest")
    more = len(seen.slowest) - SCREENFUL
    assert rows[begin + 1 + SCREENFUL] == f"and {more} more, as schedtrace watch without --once shows"
    assert sum(" w" in row or "waiting" in row for row in status_page(seen).splitlines()[begin:]) >= 15


def test_of_two_traces_of_one_rank_the_first_is_shown_and_the_other_named(tmp_path):
    growing = Growing(tmp_path)
    growing.grow(3)
    twin = tmp_path / "engine-1.jsonl"
    twin.write_bytes(growing.path.read_bytes())
    session = session_of(tmp_path, growing, judged=False)
    for _ in range(2):
        seen = session.observe_engines()
        assert [figures.rank for figures in seen.engines] == [0]
        assert [note.text for note in seen.notes] == [
            f"{twin} is of rank 0, as is {growing.path}, which alone is shown"
        ]


def test_a_pipe_in_the_place_of_a_trace_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "engine-0.jsonl")
    seen = WatchSession(Target(tmp_path, only=True)).observe_engines()
    assert seen.engines == []
    [note] = seen.notes
    assert note.text == f"{tmp_path / 'engine-0.jsonl'}: cannot be read (not a regular file)"


def test_missing_steps_are_noted_once_with_their_reason(growing, session):
    growing.grow(3)
    assert notes(session.observe_engines()) == []
    growing.append(Events(at_us=0, dropped_steps=4), growing.one(7, first=False), growing.one(8, first=False))
    slow = "steps are missing: the disk was too slow"
    assert [notes(session.observe_engines()) for _ in range(2)] == [[slow]] * 2
    growing.append(growing.one(10, first=False))
    assert notes(session.observe_engines()) == [
        slow,
        "steps are missing, and so is any request that arrived or ended in them",
    ]


def test_a_request_of_a_trace_in_parts_has_its_life(growing, folder):
    growing.grow(5)
    (folder / part_name(0, 0)).write_bytes(ZstdCompressor().compress(growing.path.read_bytes()))
    growing.path.unlink()
    session = session_of(folder, growing, judged=False)
    assert "Request c " in session.life(session.observe_engines().slowest[0], 80)


def test_a_request_whose_trace_is_gone_is_told(growing, unjudged):
    growing.grow(5)
    slow = unjudged.observe_engines().slowest[0]
    unjudged.engines.clear()
    with pytest.raises(InputError, match="no longer there"):
        unjudged.life(slow, 80)


def test_the_queue_is_that_of_the_runs_engines_that_listen_here(growing, unjudged, monkeypatch):
    growing.grow(5)
    unjudged.observe_engines()
    (engine,) = unjudged.engines.values()

    class Engine:
        def __init__(self, pid):
            self.status = SimpleNamespace(pid=pid)

        def answer_to(self, *_):
            return QueueNow(queue=queue(pid=self.status.pid, waiting=[entry("w1", refused_for="kv_blocks")]))

    def found(*engines, silent=()):
        monkeypatch.setattr(
            "schedtrace.watch.session.listening_engines",
            lambda: Listening(
                list(engines), {pid: f"engine process {pid} has not answered for 2 s" for pid in silent}
            ),
        )

    found(Engine(2), Engine(1), silent=[3])
    assert engine.trace_header.pid == 1
    shown = unjudged.queue_text(80)
    assert "Engine 0 (pid 1): tiny" in shown
    assert "waiting for kv_blocks (1)" in shown
    assert "pid 2" not in shown
    found(silent=[1])
    with pytest.raises(EngineError, match="engine process 1 has not answered for 2 s"):
        unjudged.queue_text(80)
    found()
    with pytest.raises(InputError, match="no engine of this run listens on this machine"):
        unjudged.queue_text(80)
