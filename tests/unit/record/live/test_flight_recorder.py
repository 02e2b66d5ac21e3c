"""What stays in memory is written when it is asked for, or when something happened."""

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from schedtrace.model import safe_files
from schedtrace.model.manifest import part_name
from schedtrace.model.trace import Arrival, Finish, Preemption
from schedtrace.model.trace_bounds import Bounds
from schedtrace.model.trace_facts import Stalled
from schedtrace.read.run import read_run
from schedtrace.record import writer
from schedtrace.record.capture import NOBODY, SideEvents
from schedtrace.record.live import flight_recorder
from schedtrace.record.settings import Rules
from tests.unit.record.test_writer import capture, done, work, writer_of  # noqa: F401  # a fixture

KEPT = {"bounds": Bounds(2**26, 120, 8), "in_memory": True}


@pytest.fixture
def made(writer_of):  # noqa: F811  # it is asked for here
    return writer_of(**KEPT, snapshot_on=Rules(ttft_s=5, e2e_s=60, preemptions=(2, 10)))


def asked(made, folder):
    future = made.flight.request_snapshot(folder)
    made.flight.write_snapshots(made._end)
    return future


def steps(folder):
    [trace] = read_run(folder).traces
    assert trace.problems.missing_steps == 0 and not trace.problems.unclosed  # noqa: PT018  # one fact
    return trace.steps["step"].to_list()


def test_nothing_is_on_disk_until_it_is_asked_for_and_then_a_run_is(made, tmp_path):
    work(made, done(capture(0)), done(capture(1)))
    assert list(tmp_path.iterdir()) == []
    for number in range(2):
        path = asked(made, tmp_path / str(number)).result()
        assert path == tmp_path / str(number) / "engine-0.*.jsonl.zst"
        assert steps(tmp_path / str(number)) == list(range(2 + number))
        work(made, done(capture(2 + number)))
    assert made.flight.keeps == "the last 120 s, 0.0 of at most 64 MiB"


def test_only_the_last_parts_are_kept(writer_of, tmp_path, monkeypatch):  # noqa: F811  # a fixture
    made = writer_of(bounds=Bounds(2**26, 8, 8), in_memory=True)
    clock = time.monotonic
    for number in range(20):
        monkeypatch.setattr(time, "monotonic", lambda at=number: clock() + at)
        work(made, done(capture(number)))
    asked(made, tmp_path / "here").result()
    kept = steps(tmp_path / "here")
    assert (kept[-1], 8 <= len(kept) <= 10) == (19, True)


@pytest.mark.parametrize(
    ("came_us", "first_us", "finished_us", "preempted", "reason"),
    [
        (0, 5_000_000, 60_000_000, 2, None),
        (0, 5_000_001, 5_000_002, 0, "ttft-5s"),
        (0, 1, 60_000_001, 0, "e2e-60s"),
        (0, 1, 2, 3, "preemptions-2-10s"),
    ],
)
def test_what_is_worth_a_snapshot(came_us, first_us, finished_us, preempted, reason, made, tmp_path):
    taken = done(capture(0, ids="a", side_events=SideEvents([Arrival("a", came_us, 0, 5)])))
    taken.preempted = [(Preemption("a", 1), 5)] * preempted
    work(made, taken)
    life = made._assembler._lives.life_by_id("a")
    life.first_token_us = first_us
    work(made, done(capture(1, side_events=SideEvents([], [Finish("a", "STOPPED", finished_us, 5, 1)]))))
    made.flight.write_snapshots(made._end)
    names = [path.name for path in tmp_path.iterdir()]
    assert (len(names), reason is None) in {(0, True), (1, False)}
    assert all(name.startswith("run-") and name.endswith(reason) for name in names)


@pytest.mark.parametrize(("later_us", "reason"), [(10_000_000, "preemptions>2/10s"), (10_000_001, None)])
def test_preemptions_of_the_last_seconds_count(later_us, reason, made):
    assert made.flight._happened({"start_us": 5, "preempted": ["a", "b"]}) is None
    assert made.flight._happened({"start_us": 5 + later_us, "preempted": ["c"]}) == reason


def test_snapshots_that_nobody_asked_for_are_few(made, monkeypatch):
    over = threading.Event()
    rounds = iter(lambda: over.wait(0.001), True)
    answering = threading.Thread(target=lambda: [made.flight.write_snapshots(made._end) for _ in rounds])
    answering.start()
    monkeypatch.setattr(flight_recorder.time, "strftime", lambda *_: next(hours))
    hours = map(str, range(100))
    assert made.flight.snapshot_event("first").startswith("what happened before: ")
    assert made.flight.snapshot_event("too soon") == (
        "no snapshot: the latest was written 0 s ago, and at most one in 5 minutes is; schedtrace snapshot "
        "writes one"
    )
    assert made.flight.snapshot_event("the end", always=True).startswith("what happened before: ")
    monkeypatch.setattr(flight_recorder, "EVERY_S", 0)
    written = [made.flight.snapshot_event("again") for _ in range(20)]
    over.set()
    assert sum("before" in line for line in written) == flight_recorder.MOST - 2
    assert written[-1] == "no snapshot: 10 have been written by themselves; schedtrace snapshot writes one"


def test_a_snapshot_that_is_one_too_many_is_said_once(made, warnings):
    for _ in range(3):
        made.flight._reason = "ttft>5s"
        made.flight.write_snapshots(made._end)
    written, refused = warnings
    assert "snapshot of the last seconds in" in written
    assert refused.startswith("schedtrace: ttft>5s: no snapshot: the latest was written 0 s ago")


def test_a_stall_that_was_noticed_right_before_a_snapshot_is_in_it(made, tmp_path):
    seen = Stalled(
        kind="engine", since_us=made.clock.anchor_ns // 1000 + 5, sentence="it stands", stacks=["a", "b"]
    )
    made.put_stall(seen)
    asked(made, tmp_path / "hung").result()
    [trace] = read_run(tmp_path / "hung").traces
    assert trace.stalls.select("kind", "since_us", "until_us", "sentence", "stacks").rows() == [
        ("engine", 5, None, "it stands", ["a", "b"])
    ]
    assert trace.notices == []


@pytest.mark.parametrize(
    "where", [(safe_files, "create_new"), (flight_recorder, "write_manifest_if_missing")]
)
def test_a_full_disk_is_said_once_and_what_is_kept_stays(where, made, tmp_path, warnings, monkeypatch):
    work(made, done(capture(0)))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*where, full)
        with pytest.raises(OSError, match="No space"):
            asked(made, tmp_path / "full").result()
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    assert list(tmp_path.iterdir()) == []
    asked(made, tmp_path / "again").result()
    assert steps(tmp_path / "again") == [0]


@pytest.mark.parametrize(("part_of_last", "steps_lost"), [(0, 2), (0.1, 2), (0.9, 1)])
def test_a_process_killed_within_a_snapshot_leaves_a_run_whose_last_part_is_cut(
    part_of_last,
    steps_lost,
    writer_of,  # noqa: F811  # a fixture
    tmp_path,
    monkeypatch,
    cli,
):
    made = writer_of(bounds=Bounds(2**26, 8, 8), in_memory=True)
    clock = time.monotonic
    for number in range(8):  # two in each part
        monkeypatch.setattr(time, "monotonic", lambda at=number: clock() + at * 0.81)
        work(
            made,
            done(
                capture(
                    number, ids="a", side_events=SideEvents([Arrival("a", 0, 0, 5)]) if not number else NOBODY
                )
            ),
        )
    monkeypatch.setattr(time, "monotonic", clock)
    folder = tmp_path / "cut"
    child = os.fork()
    if child == 0:

        def killed(path, content):
            last = path.name == part_name(0, max(made.flight._ring._parts))
            path.write_bytes(content[: int(len(content) * part_of_last)] if last else content)
            if last:
                os.kill(os.getpid(), signal.SIGKILL)

        safe_files.create_new = killed
        asked(made, folder)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    [trace] = read_run(folder).traces
    assert trace.problems.unclosed
    assert trace.steps["step"].to_list() == list(range(8 - steps_lost))
    monkeypatch.chdir(tmp_path)
    for command, *more in (
        ("analyze",),
        ("step", 0),
        ("request", "a"),
        ("export",),
        ("report",),
        ("watch", "--once"),
    ):
        assert cli(command, folder, *more)[0] == 0, command


def test_two_snapshots_of_one_second_are_two_folders(made, tmp_path):
    paths = [asked(made, tmp_path / "same").result() for _ in range(3)]
    assert [path.parent.name for path in paths] == ["same", "same-2", "same-3"]


def test_a_disk_that_is_slow_is_no_disk_that_refuses(made, tmp_path):
    late = made.flight.request_snapshot(tmp_path / "late")
    with pytest.raises(RuntimeError, match="not written within 0 s: the disk is slow"):
        late.result(0)
    made.flight.write_snapshots(made._end)
    assert late.result(0).parent.name == "late"


def test_the_writers_thread_answers(writer_of, monkeypatch):  # noqa: F811  # a fixture
    monkeypatch.setattr(writer, "DRAIN_EVERY_S", 0.01)
    made = writer_of(**KEPT)
    made.put_step(done(capture(0)))
    line = made.flight.snapshot_event("a stall of 10 s: no step")
    assert line.startswith("what happened before: ")
    assert Path(line).parent.name.endswith("-a-stall-of-10-s-no-step")


def test_who_asks_a_recording_that_has_ended_does_not_wait(writer_of, tmp_path, monkeypatch):  # noqa: F811  # a fixture
    monkeypatch.setattr(flight_recorder, "WAIT_S", 1e6)
    made = writer_of(**KEPT)
    made.close()
    assert made.flight.snapshot_event("engine ended", always=True) == "no snapshot: the recording has ended"
    with pytest.raises(RuntimeError, match="the recording has ended"):
        made.flight.request_snapshot(tmp_path / "late").result()
