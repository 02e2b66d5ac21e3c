"""The writer's file, line by line; its thread is asked only where time is the matter."""

import contextlib
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from schedtrace.model.manifest import FILE_NAME
from schedtrace.model.trace import Arrival, Finish, Preemption
from schedtrace.model.trace_bounds import Bounds
from schedtrace.model.trace_facts import Control, KvSend
from schedtrace.record import assemble, clocks, trace_files, writer
from schedtrace.record import capture as capture_module
from schedtrace.record.capture import ALL, NOBODY, DummyPass, Result, Rows, SideEvents, Synced
from schedtrace.record.clocks import RecordingClock
from schedtrace.record.settings import Settings
from schedtrace.record.writer import Writer
from tests.makers import header
from tests.toys import capture_of

HEADER = header(wall_anchor_us=2_000_000)


DUMMY, LATER_DUMMY = DummyPass(1_000, 2_500, 0, 5), DummyPass(4_000, 5_499, 0, 6)
PAUSE = Control("pause_state", 5, detail="PAUSED_ALL")
SEND = KvSend("a", "begun", 6, [2])
SYNC, LATER_SYNC = Synced(5_500, 7_999, 0, 6, True), Synced(9_000, 9_500, 0, 7, False)


@pytest.fixture
def writer_of(monkeypatch, tmp_path):
    """Writers whose thread sleeps, so that only the test writes; without lines of CPU times."""
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 1e6)
    monkeypatch.setattr(writer.CpuTimes, "line", lambda *_: [])
    monkeypatch.setattr(assemble, "reports_invalid_drafts", lambda: False)
    made = []

    def make(anchor_ns=None, **settings):
        anchor_ns = time.monotonic_ns() if anchor_ns is None else anchor_ns
        settings = {"trial_ids": False, "hash_ids": False, **settings}
        clock = RecordingClock(anchor_ns, HEADER.wall_anchor_us)
        made.append(Writer(Settings(tmp_path / "run", **settings), HEADER, clock))
        return made[-1]

    yield make
    for one in made:
        one.close()


def decoded(made):
    return [msgspec.json.decode(line) for line in made.path.read_bytes().splitlines()]


def lines(made):
    """Type and step, if it has one, of every line after the header."""
    return [(line["type"], line["step"]) if "step" in line else line["type"] for line in decoded(made)[1:]]


def last(made):
    return decoded(made)[-1]


def work(made, *captures):
    """A round of the writer's thread after it was given these; whether each was taken."""
    taken = [made.put_step(one) for one in captures]
    made._work(last=False)
    return taken


def capture(number, *, ids=(), full=True, ended_ns=None, side_events=NOBODY):
    ended_ns = time.monotonic_ns() if ended_ns is None else ended_ns
    rows = Rows(list(ids), [0] * len(ids), dict.fromkeys(ids, 1), (), [], {})
    return capture_of(
        step=number, start_ns=ended_ns - 1000, end_ns=ended_ns, token_budget=1000, max_num_running_reqs=8,
        num_running_before=0, num_running_after=0, num_waiting_before=0, num_waiting_after=0,
        num_not_ready_after=0, kv_blocks_total=50, kv_blocks_free_before=40, kv_blocks_free_after=40,
        rows=rows, full=full, events=[], side_events=side_events,
    )  # fmt: skip


def done(taken, got=ALL):
    taken.result = Result(taken.end_ns, taken.end_ns + 1000, got)
    return taken


def test_a_new_trace_has_its_header_and_a_manifest_of_an_attached_engine(writer_of, tmp_path):
    made = writer_of()
    assert made.path == tmp_path / "run" / "engine-0.jsonl"
    assert msgspec.json.decode(made.path.read_bytes(), type=type(HEADER)) == HEADER
    assert msgspec.json.decode((tmp_path / "run" / FILE_NAME).read_bytes())["status"] == "attached"


def test_a_manifest_that_is_there_stays(writer_of, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE_NAME).write_text("{}")
    writer_of()
    assert (tmp_path / "run" / FILE_NAME).read_text() == "{}"


def test_steps_are_written_in_order_as_far_as_their_outputs_are_back(writer_of):
    made = writer_of()
    first, second, third = done(capture(0)), capture(1), done(capture(2))
    assert work(made, first, second, third) == [True] * 3
    assert lines(made) == [("step", 0)]
    done(second)
    work(made)
    assert lines(made) == [("step", 0), ("step", 1), ("step", 2)]


def test_a_step_without_output_is_written_after_half_a_second_and_completed_later(writer_of):
    made = writer_of()
    late = capture(0, ended_ns=time.monotonic_ns() - writer.WRITE_LATEST_NS)
    work(made, late)
    assert lines(made) == [("step", 0)]
    work(made)
    done(late)
    work(made)
    work(made)
    assert lines(made) == [("step", 0), ("output", 0)]


def test_an_output_that_comes_back_within_a_round_is_written_in_the_next(writer_of):
    made = writer_of()
    first, second = (capture(number, ended_ns=time.monotonic_ns() - 10**9) for number in (0, 1))
    work(made, first, second)

    class Coming:
        """The second capture, whose output comes back right after it was looked for."""

        looks = 0
        __getattr__ = staticmethod(lambda name: getattr(second, name))

        @property
        def result(self):
            self.looks += 1
            return None if self.looks == 1 else done(second).result

    done(first)
    made._early[1] = Coming()
    work(made)
    work(made)
    assert lines(made) == [("step", 0), ("step", 1), ("output", 0), ("output", 1)]


def test_closing_writes_what_has_no_output_yet_and_the_end(writer_of):
    made = writer_of(anchor_ns=time.monotonic_ns() - 10**9)
    made.put_step(done(capture(0)))
    made.put_step(capture(1))
    made.close()
    assert lines(made) == [("step", 0), ("step", 1), "end"]
    end = last(made)
    assert (end["steps"], end.get("dropped_steps", 0)) == (2, 0)
    assert 1_000_000 <= end["at_us"] < 60_000_000
    assert made.working is False
    made.close()
    assert lines(made).count("end") == 1


def test_steps_beyond_what_is_held_are_dropped_and_counted(writer_of, monkeypatch):
    monkeypatch.setattr(writer, "MAX_PENDING", 2)
    made = writer_of()
    assert [made.put_step(done(capture(number))) for number in range(4)] == [True, True, False, False]
    made.close()
    assert lines(made) == [("step", 0), ("step", 1), "events", "end"]
    assert (last(made)["steps"], last(made)["dropped_steps"]) == (4, 2)


def steady(number):
    taken = done(capture(number, full=False))
    taken.rows = None
    return taken


def test_who_came_and_went_in_dropped_steps_is_written_before_the_next_step(writer_of, monkeypatch):
    monkeypatch.setattr(writer, "MAX_PENDING", 1)
    made = writer_of(anchor_ns=0)
    made._last_events_ns = time.monotonic_ns()
    arrivals = [
        SideEvents([Arrival(name, 5, 7, 40)], [Finish("g", "STOPPED", 9, 1, 1)] * at)
        for at, name in enumerate("abc")
    ]
    assert made.put_step(done(capture(0, ids="g")))
    assert [
        made.put_step(done(capture(1 + at, ended_ns=9_000_000 + at, side_events=one)))
        for at, one in enumerate(arrivals)
    ] == [False] * 3
    work(made)
    assert lines(made) == [("step", 0)]
    assert work(made, done(capture(4, ids="b"))) == [True]
    assert lines(made) == [("step", 0), "events", ("step", 4)]
    _, _, events, step = decoded(made)
    assert (events["dropped_steps"], events["at_us"]) == (3, 9_000)
    assert [(event["request_id"], event["queued_us"]) for event in events["arrived"]] == [
        ("a", 7),
        ("b", 7),
        ("c", 7),
    ]
    assert [(event["request_id"], event["finished_us"]) for event in events["finished"]] == [("g", 9)] * 3
    assert "dropped_arrivals" not in events
    assert step["requests"] == [{"request_id": "b", "computed_tokens": 0, "scheduled_tokens": 1}]
    assert "changes" not in step


def test_of_dropped_steps_so_many_requests_are_kept_and_the_others_counted(writer_of, monkeypatch):
    monkeypatch.setattr(writer, "MAX_PENDING", 0)
    monkeypatch.setattr(capture_module, "MOST_KEPT", 2)
    made = writer_of()
    for at, name in enumerate("abcde"):
        made.prefixes.keep_prompt(SimpleNamespace(request_id=name, block_hashes=[b"x"]))
        gone = Finish(name, "ABORTED", 0, 1, 0)
        made.put_step(capture(at, side_events=SideEvents([Arrival(name, 0, 0, 1)], [gone], [DUMMY], [SYNC])))
    made.close()
    _, events, end = decoded(made)
    assert [event["request_id"] for event in events["arrived"]] == ["a", "b"]
    assert [event["request_id"] for event in events["finished"]] == ["a", "b"]
    assert (events["dropped_steps"], events["dropped_arrivals"], events["dropped_finishes"]) == (5, 3, 3)
    assert (len(events["dummies"]), len(events["syncs"]), end["dropped_steps"]) == (2, 2, 5)
    assert made.prefixes._blocks == {}


def test_what_dropped_steps_gave_is_unknown_and_what_is_known_stays(writer_of, monkeypatch):
    """``ran`` had its first token before, ``new`` began in a dropped step, ``waits`` begins after it."""
    monkeypatch.setattr(writer, "MAX_PENDING", 1)
    made = writer_of(anchor_ns=0)
    first = done(capture(0, ended_ns=2_000_000, side_events=SideEvents([Arrival("ran", 1, 1, 1)])))
    first.rows.new, first.rows.scheduled = [("ran", 0)], {"ran": 1}
    made.put_step(first)
    hidden = done(
        capture(
            1,
            ended_ns=4_001_000,
            side_events=SideEvents([Arrival("new", 3, 3, 9), Arrival("waits", 4, 4, 9)]),
        )
    )
    hidden.rows.new = [("new", 8)]
    hidden.preempted = [(Preemption("ran", lost_tokens=3), 4)]
    work(made, hidden)
    after = done(capture(2, ids=["ran", "new"], ended_ns=6_000_000))
    after.rows.new, after.rows.scheduled = [("waits", 0)], {"ran": 1, "new": 1, "waits": 9}
    work(made, after)
    made.put_step(
        capture(
            3,
            side_events=SideEvents(
                (), [Finish(name, "STOPPED", 9_000, 9, 2) for name in ("ran", "new", "waits")]
            ),
        )
    )
    made.close()
    line = decoded(made)[-2]
    wanted = ("arrived_us", "scheduled_us", "first_token_us", "last_token_us", "cached_tokens")
    assert {one["request_id"]: tuple(map(one.get, wanted)) for one in line["finished"]} == {
        "ran": (1, 1_999, 2_000, 6_000, None),
        "new": (3, 4_000, None, 6_000, 8),
        "waits": (4, 5_999, 6_000, 6_000, None),
    }
    step = decoded(made)[3]
    assert (step["step"], step["recomputed_tokens"], step["num_waiting_after"]) == (2, 1, 0)


def test_a_request_that_ended_in_dropped_steps_has_no_last_token(writer_of, monkeypatch):
    monkeypatch.setattr(writer, "MAX_PENDING", 1)
    made = writer_of(anchor_ns=0)
    first = done(capture(0, ended_ns=2_000_000, side_events=SideEvents([Arrival("a", 1, 1, 1)])))
    first.rows.new, first.rows.scheduled = [("a", 0)], {"a": 1}
    made.put_step(first)
    made.put_step(capture(1, side_events=SideEvents((), [Finish("a", "STOPPED", 3_000, 1, 2)])))
    made.close()
    [finish] = decoded(made)[-2]["finished"]
    assert (finish["first_token_us"], finish.get("last_token_us")) == (2_000, None)


def test_dropped_steps_are_written_where_no_step_follows(writer_of, monkeypatch):
    monkeypatch.setattr(writer, "MAX_PENDING", 1)
    made = writer_of()
    made.put_step(done(capture(0)))
    work(made, capture(1, side_events=SideEvents([Arrival("a", 0, 0, 1)])))
    assert lines(made) == [("step", 0)]
    made._last_events_ns -= writer.WRITE_LATEST_NS
    work(made)
    assert lines(made) == [("step", 0), "events"]
    assert [one["request_id"] for one in last(made)["arrived"]] == ["a"]
    made.close()
    assert lines(made) == [("step", 0), "events", "end"]


def test_many_rows_are_written_in_several_goes_and_none_is_lost(writer_of, monkeypatch):
    monkeypatch.setattr(writer, "WRITE_AFTER_ROWS", 3)
    made = writer_of()
    goes = []
    monkeypatch.setattr(made, "_write", lambda lines: goes.append(len(lines)))
    work(made, *(done(capture(number, ids="ab")) for number in range(5)))
    assert goes == [2, 2, 1]


def test_a_steady_step_is_a_line_of_its_own(writer_of):
    made = writer_of()
    work(made, done(capture(0, ids="a")), steady(1))
    assert lines(made) == [("step", 0), ("delta", 1)]


def test_the_engine_gets_the_interpreter_after_each_full_line_and_16_deltas(writer_of, monkeypatch):
    made = writer_of()
    slept = []
    monkeypatch.setattr(writer.time, "sleep", slept.append)
    work(made, done(capture(0, ids="a")), *map(steady, range(1, 1 + 2 * writer.SHARE_AFTER)))
    assert slept == [0, 0, 0]


def test_events_are_taken_once_and_can_be_given_back_in_front(writer_of):
    made = writer_of()
    assert made.take_events() is NOBODY
    first, second = Arrival("a", 0, 0, 1), Arrival("b", 0, 0, 1)
    gone, later = Finish("a", "ABORTED", 0, 1, 0), Finish("b", "ABORTED", 0, 1, 0)
    made.arrived.extend([first, second])
    made.finished.append(gone)
    for one in (DUMMY, SYNC, PAUSE, SEND):
        made.put_beside(one)
    came = made.take_events()
    assert came == ([first, second], [gone], [DUMMY], [SYNC], [PAUSE], [SEND])
    assert made.take_events() is NOBODY
    made.arrived.append(first)
    made.finished.append(later)
    made.put_beside(LATER_DUMMY)
    made.put_beside(LATER_SYNC)
    made.give_back(came)
    taken = made.take_events()
    beside = ([DUMMY, LATER_DUMMY], [SYNC, LATER_SYNC], [PAUSE], [SEND])
    assert taken == ([first, second, first], [gone, later], *beside)


@pytest.mark.parametrize(("alone", "place"), [(DUMMY, 2), (SYNC, 3), (PAUSE, 4), (SEND, 5)])
def test_what_happened_beside_the_steps_alone_is_an_event(writer_of, alone, place):
    made = writer_of()
    made.put_beside(alone)
    assert made.take_events() == tuple([alone] if at == place else [] for at in range(6))


def test_passes_do_not_fill_the_memory_where_the_disk_stands_still(writer_of, monkeypatch):
    monkeypatch.setattr(writer, "MAX_PENDING", 2)
    made = writer_of()
    for _ in range(4):
        made.put_beside(DUMMY)
    assert list(made._notices) == [
        "the disk is too slow: dummy batches, all-reduces of the ranks, pauses or sent KV blocks are missing"
    ]
    assert made.take_events().dummies == [DUMMY] * 2


def test_what_no_step_takes_along_is_written_after_half_a_second(writer_of):
    made = writer_of()
    work(made)
    made.arrived.append(Arrival("a", 0, 0, 1))
    made.put_beside(DUMMY)
    made.put_beside(LATER_DUMMY)
    made.put_beside(SYNC)
    work(made)
    assert lines(made) == []
    made._last_events_ns -= writer.WRITE_LATEST_NS
    work(made)
    assert lines(made) == ["events"]
    assert [one["request_id"] for one in last(made)["arrived"]] == ["a"]
    assert (last(made)["dummy_batches"], last(made)["dummy_us"]) == (2, 2)
    assert last(made)["dummies"] == [
        {"began_us": made.clock.since_anchor(1_000), "took_us": 1, "wave": 0, "step_counter": 5},
        {"began_us": made.clock.since_anchor(4_000), "took_us": 1, "wave": 0, "step_counter": 6},
    ]
    assert [one["step_counter"] for one in last(made)["syncs"]] == [6]
    assert made.take_events() is NOBODY


def test_events_wait_for_steps_that_are_not_written_yet(writer_of):
    made = writer_of()
    made.arrived.append(Arrival("a", 0, 0, 1))
    made.put_step(capture(0))
    made._last_events_ns -= 10 * writer.WRITE_LATEST_NS
    work(made)
    assert lines(made) == []


def test_a_notice(writer_of):
    made = writer_of(anchor_ns=time.monotonic_ns() - 10**9)
    made.notice("no")
    work(made)
    assert (last(made)["type"], last(made)["message"]) == ("notice", "no")
    assert last(made)["at_us"] >= 1_000_000
    work(made)
    assert lines(made) == ["notice"]


def test_clocks(writer_of):
    made = writer_of(anchor_ns=5_000)
    assert (made.clock.since_anchor(9_999), made.clock.since_anchor(5_000)) == (4, 0)


@pytest.mark.parametrize(
    ("came_s", "wall_s"),
    [
        pytest.param(3.5, 9.0, id="as it stood at 2 s when the trace began"),
        pytest.param(3603.5, 3609.0, id="set to an hour later since"),
        pytest.param(1.5, 7.0, id="set back since"),
        pytest.param(3.5, 3.0, id="set back since the request came"),
    ],
)
def test_a_wall_clock_that_is_set_changes_no_age(writer_of, monkeypatch, came_s, wall_s):
    made = writer_of()
    monkeypatch.setattr(clocks.time, "time_ns", lambda: int(wall_s * 1e9))
    assert made.clock.from_wall_clock(came_s, now_us=7_000_000) == 1_500_000


@pytest.mark.parametrize(("hash_ids", "text"), [(False, "ValueError('client-7')"), (True, "ValueError")])
def test_an_error_says_nothing_of_ids_that_are_hashed(writer_of, hash_ids, text):
    assert writer_of(hash_ids=hash_ids).describe(ValueError("client-7")) == text


def test_a_line_that_cannot_be_written_whole_is_taken_back(writer_of, monkeypatch):
    made = writer_of()
    before = made.path.read_bytes()
    write = os.write
    full = [False]

    def writes_a_little(file, data):
        if full[0]:
            raise OSError(28, "full")
        full[0] = True
        return write(file, data[:10])

    monkeypatch.setattr(writer.os, "write", writes_a_little)
    with pytest.raises(OSError, match="full"):
        made._write([HEADER])
    assert made.path.read_bytes() == before


def test_what_is_written_in_parts_is_whole(writer_of, monkeypatch):
    made = writer_of()
    write = os.write
    monkeypatch.setattr(writer.os, "write", lambda file, data: write(file, data[:7]))
    made._write([HEADER])
    first, second = made.path.read_bytes().splitlines()
    assert first == second


def truncate(path):
    os.truncate(path, 0)


def cut(path):
    os.truncate(path, path.stat().st_size - 5)


def rotate(path):
    path.rename(path.with_name("old"))
    path.touch()


def unlink_and_touch(path):
    path.unlink()
    path.touch()


@pytest.mark.parametrize(
    ("accident", "what"),
    [
        (truncate, "truncated"),
        (cut, "truncated"),
        (Path.unlink, "removed"),
        (rotate, "replaced"),
        (unlink_and_touch, "replaced"),
    ],
)
def test_a_file_that_is_lost_is_begun_anew_as_a_whole(accident, what, writer_of, warnings):
    made = writer_of()
    made.notice("earlier")
    first = done(capture(0, ids="a", side_events=SideEvents([Arrival("a", 0, 0, 1), Arrival("b", 0, 0, 1)])))
    work(made, first, steady(1))
    accident(made.path)
    made.put_step(steady(2))
    made.put_step(steady(3))
    made.close()
    found = decoded(made)
    kinds = ["header", "events", "step", "delta", "end"]
    assert [line["type"] for line in found] == kinds
    said = f"the file was {what} while it was recorded: it begins at step 2"
    assert (found[0]["first_step"], found[0]["notices"]) == (2, ["earlier", said])
    assert [(one["request_id"], one["state"]) for one in found[1]["present"]] == [
        ("a", "waiting"),
        ("b", "waiting"),
    ]
    assert [(one["request_id"], one["computed_tokens"]) for one in found[2]["requests"]] == [("a", 2)]
    assert warnings == [f"schedtrace: {made.path}: {said}"]
    assert made.path.stat().st_mode & 0o077 == 0 or what == "replaced"


def test_a_file_that_is_lost_again_is_begun_anew_again_and_the_log_says_so_once(writer_of, warnings):
    made = writer_of()
    for number in range(3):
        work(made, done(capture(number)))
        truncate(made.path)
        work(made)
    *_, notice = decoded(made)[0]["notices"]
    assert (notice.endswith("it begins at step 3"), len(warnings)) == (True, 1)


def test_a_file_that_is_truncated_while_it_is_written_is_whole_at_the_next_flush(writer_of, monkeypatch):
    made = writer_of()
    keep = made._begin_if_needed
    made.put_step(done(capture(0)))
    monkeypatch.setattr(made, "_begin_if_needed", lambda: (keep(), truncate(made.path)))
    work(made)
    monkeypatch.setattr(made, "_begin_if_needed", keep)
    assert lines(made) == []  # a step where the header should be
    work(made, done(capture(1)))
    assert lines(made) == ["events", ("step", 1)]


def move(path):
    path.rename(path.with_name("old"))


def move_and_use(path):
    move(path)
    path.write_bytes(b"somebody else's\n")


def move_folder(path):
    path.parent.rename(path.parent.with_name("moved"))


@pytest.mark.parametrize(
    ("accident", "now"), [(move, "run/old"), (move_and_use, "run/old"), (move_folder, "moved/engine-0.jsonl")]
)
def test_a_file_that_was_moved_is_written_on_where_it_is(accident, now, writer_of, tmp_path, warnings):
    made = writer_of()
    accident(made.path)
    made.put_step(done(capture(0)))
    made.close()
    found = [msgspec.json.decode(line)["type"] for line in (tmp_path / now).read_bytes().splitlines()]
    assert (found, warnings) == (["header", "step", "end"], [])


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("accident", [replace_by_pipe, lambda path: shutil.rmtree(path.parent)])
def test_no_line_goes_into_what_stands_in_the_place_of_a_removed_file(accident, writer_of, warnings):
    made = writer_of()
    accident(made.path)
    there = made.path.exists()
    made.put_step(done(capture(0)))
    made.close()
    [warning] = warnings
    assert "stopped: FileNotFoundError(2, 'the file was removed while it was written')" in warning
    assert made.path.exists() is there


def test_a_forked_child_writes_nothing_into_its_parents_trace(writer_of):
    made = writer_of()
    made.arrived.append(Arrival("a", 0, 0, 1))
    made.put_step(done(capture(0)))
    if not (child := os.fork()):
        status = 1
        with contextlib.suppress(BaseException):
            made.put_step(done(capture(1)))
            made.close()
            status = int(made.working)
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert lines(made) == []
    made.close()
    assert lines(made) == [("step", 0), "events", "end"]
    assert last(made)["steps"] == 1


def test_giving_up_is_told_in_the_trace_and_nothing_is_held_any_more(writer_of):
    made = writer_of()
    made.put_step(capture(0))
    made._give_up(OSError(5, "broken"))
    assert (made.working, len(made._pending)) == (False, 0)
    assert last(made)["message"] == "recording stopped: OSError(5, 'broken')"
    made.close()
    assert lines(made) == ["notice"]


def open_files():
    return sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208  # numbers


@pytest.mark.parametrize("bounds", [None, Bounds()])
@pytest.mark.parametrize("fails", ["writer.write_manifest_if_missing", "trace_files.AppendedFile.append"])
def test_a_trace_that_cannot_begin_leaves_no_file_open_and_none_in_the_folder(
    bounds, fails, writer_of, tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"schedtrace.record.{fails}", full)
    before = open_files()
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            writer_of(bounds=bounds)
    assert (open_files(), list(tmp_path.iterdir())) == (before, [])


@pytest.mark.parametrize("bounds", [None, Bounds()])
def test_giving_up_closes_the_file_though_nothing_more_can_be_written(bounds, writer_of, monkeypatch):
    before = open_files()
    made = writer_of(bounds=bounds)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(trace_files.AppendedFile, "append", full)
        for _ in range(2):
            made._give_up(full)
    assert open_files() == before


def test_the_thread_writes_without_being_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 0.01)
    monkeypatch.setattr(assemble, "reports_invalid_drafts", lambda: False)
    clock = RecordingClock(time.monotonic_ns())
    made = Writer(Settings(tmp_path / "run", trial_ids=False, hash_ids=False), HEADER, clock)
    made.put_step(done(capture(0)))
    until = time.monotonic() + 20
    while ("step", 0) not in lines(made):
        assert time.monotonic() < until
        time.sleep(0.01)
    made.close()
    assert lines(made)[-1] == "end"
