"""Frames, parts and their bounds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from zstandard import ZstdDecompressor

from schedtrace.model.trace_bounds import Bounds
from schedtrace.record import trace_files
from schedtrace.record.trace_files import PartedTrace, PartFiles


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(trace_files, "time", made)
    monkeypatch.setattr(trace_files, "SMALL", 0)
    return made


@pytest.fixture
def made_of(tmp_path):
    return lambda **bounds: PartedTrace(PartFiles(tmp_path / "run", 0), Bounds(**bounds))


def content(folder):
    """Number of each part to its frames, decompressed."""
    found = {}
    for part in sorted(folder.glob("run/*.zst")):
        frames, data = [], part.read_bytes()
        while data:
            frame = ZstdDecompressor().decompressobj()
            frames.append(frame.decompress(data))
            data = frame.unused_data
        found[int(part.name.split(".")[1])] = frames
    return found


def test_a_head_is_a_frame_and_then_every_second_is_one(clock, made_of, tmp_path):
    made = made_of()
    made.write(b"head\n")
    for quarter in range(6):
        clock.now = quarter / 4
        assert made.new_file_reason() is None
        made.write(b"%d\n" % quarter)
    made.close()
    assert content(tmp_path) == {0: [b"head\n", b"0\n1\n2\n3\n", b"4\n5\n"]}


@pytest.mark.usefixtures("clock")
def test_a_frame_that_is_full_ends_before_its_time(made_of, tmp_path, monkeypatch):
    monkeypatch.setattr(trace_files, "FRAME_BYTES", 10)
    made = made_of()
    made.write(b"head of a part\n")
    for line in (b"four\n", b"more\n", b"last\n"):
        made.write(line)
    assert content(tmp_path) == {0: [b"head of a part\n", b"four\nmore\n"]}
    made.close()
    assert content(tmp_path) == {0: [b"head of a part\n", b"four\nmore\n", b"last\n"]}


@pytest.mark.parametrize("end", ["close", "discard"])
def test_the_files_are_closed_and_a_trace_of_no_value_is_removed(end, made_of, tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    made = made_of()
    made.write(b"head\n")
    getattr(made, end)()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert list(content(tmp_path)) == ([] if end == "discard" else [0])


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"max_s": 4000.0}, [0, 1, 2, 3]),
        ({"max_s": 1500.0}, [1, 2, 3]),
        ({"max_bytes": 2**20}, [0, 1, 2, 3]),
        ({"max_bytes": 240}, [2, 3]),
    ],
)
def test_the_oldest_parts_go(bounds, kept, clock, made_of, tmp_path):
    made = made_of(**bounds)
    for number in range(4):
        clock.now = number * 1000.0
        assert made.new_file_reason() == ("due" if number else None)
        made.write(bytes(range(40)))
        made.write(bytes(range(40)))
    made.close()
    assert list(content(tmp_path)) == kept


def test_a_small_part_goes_on_where_no_age_is_asked_for(clock, made_of, monkeypatch):
    monkeypatch.setattr(trace_files, "SMALL", 2**18)
    made = made_of(max_bytes=2**30)
    made.write(b"head\n")
    made.write(b"work\n")
    clock.now = 6000.0
    assert made.new_file_reason() is None
    made.write(os.urandom(2**18))
    clock.now = 6001.0
    assert made.new_file_reason() == "due"


def test_a_part_is_not_mostly_its_head(clock, made_of):
    made = made_of(max_bytes=2**20)  # in parts of 64 KiB
    made.write(os.urandom(2**17))
    found = []
    for clock.now in range(1, 5):
        made.write(os.urandom(2**15))
        made.end_frame()
        found.append(made.new_file_reason())
    assert found == [None, None, None, "due"]


def test_a_part_ends_with_the_byte_that_fills_it(clock, made_of, tmp_path, monkeypatch):
    head = os.urandom(2**17)
    made = made_of(max_bytes=2**20)  # in parts of 64 KiB, so twice the head is what fills this one
    made.write(head)
    made.write(head)
    made.end_frame()
    assert made.new_file_reason() == "due"
    made.write(b"head\n")
    made.write(b"work\n")
    made.end_frame()
    size = (tmp_path / "run/engine-0.000001.jsonl.zst").stat().st_size
    clock.now = 6000.0
    monkeypatch.setattr(trace_files, "SMALL", size + 1)
    assert made.new_file_reason() is None
    monkeypatch.setattr(trace_files, "SMALL", size)
    assert made.new_file_reason() == "due"


def two_parts(clock, made):
    """Write two parts, the second begun at 1000 s, of which only the head is there."""
    made.write(b"head\n")
    made.write(b"work\n")
    clock.now = 1000.0
    assert made.new_file_reason() == "due"
    made.write(b"head\n")


def test_parts_may_take_all_the_bytes_of_their_bound(clock, made_of, tmp_path):
    made = made_of()
    two_parts(clock, made)
    size = sum(part.stat().st_size for part in tmp_path.glob("run/*.zst"))
    for most, numbers in ((size, [0, 1]), (size - 1, [1])):
        made.bounds = Bounds(max_bytes=most)
        assert made.new_file_reason() is None
        assert list(content(tmp_path)) == numbers


def test_a_part_goes_when_the_next_one_covers_the_time_to_keep(clock, made_of, tmp_path):
    made = made_of(max_s=16 * 600.0)
    two_parts(clock, made)
    for clock.now, numbers in ((10_600.0, [0, 1]), (10_601.0, [1])):
        assert made.new_file_reason() is None
        assert list(content(tmp_path)) == numbers


def test_nobody_begins_a_part_while_nothing_happens_and_the_old_ones_go_nevertheless(
    clock, made_of, tmp_path
):
    made = made_of(max_s=1500.0)
    made.write(b"head\n")
    made.write(b"work\n")
    found = []
    for clock.now in (1000.0, 2000.0, 3000.0, 4000.0):
        if made.new_file_reason() == "due":
            made.write(b"head\n")
        found.append(sorted(content(tmp_path)))
    made.write(b"work\n")
    clock.now = 4001.0
    assert (found, made.new_file_reason()) == ([[0, 1], [0, 1], [1], [1]], "due")


def truncate(path):
    os.truncate(path, 0)


@pytest.mark.parametrize(("accident", "said"), [(Path.unlink, "removed"), (truncate, "truncated")])
def test_a_part_that_is_lost_is_followed_by_another(accident, said, made_of, tmp_path):
    made = made_of()
    made.write(b"head\n")
    made.write(b"lost with it\n")
    accident(tmp_path / "run" / "engine-0.000000.jsonl.zst")
    assert made.new_file_reason() == said
    made.write(b"again\n")
    made.close()
    assert content(tmp_path)[1] == [b"again\n"]


def test_a_folder_that_is_moved_gets_the_next_parts(clock, made_of, tmp_path):
    made = made_of()
    made.write(b"head\n")
    made.write(b"work\n")
    (tmp_path / "run").rename(tmp_path / "moved")
    clock.now = 600.0
    assert made.new_file_reason() == "due"
    made.write(b"next\n")
    made.close()
    names = sorted(path.name for path in (tmp_path / "moved").iterdir())
    assert names == ["engine-0.000000.jsonl.zst", "engine-0.000001.jsonl.zst"]


def test_a_folder_that_is_gone_is_an_error(made_of, tmp_path):
    made = made_of()
    made.write(b"head\n")
    (tmp_path / "run" / "engine-0.000000.jsonl.zst").unlink()
    (tmp_path / "run").rmdir()
    with pytest.raises(FileNotFoundError):
        made.new_file_reason()


KILLED = """
import os, signal, sys
from pathlib import Path
from schedtrace.model.trace_bounds import Bounds
from schedtrace.record import trace_files
trace_files.FRAME_S = 0
made = trace_files.PartedTrace(trace_files.PartFiles(Path(sys.argv[1]), 0), Bounds())
made.write(b"head\\n")
made.write(bytes(range(40)))
Bounds.part_bytes = 1
begin = made._store.begin

def killed(number):
    if sys.argv[2] == "after":
        begin(number)
    os.kill(os.getpid(), signal.SIGKILL)

made._store.begin = killed
made.new_file_reason()
"""


@pytest.mark.parametrize(("when", "left"), [("before", {}), ("after", {1: []})])
def test_one_killed_between_two_parts_leaves_whole_ones(when, left, tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / "run", when], check=False)
    assert content(tmp_path) == {0: [b"head\n", bytes(range(40))], **left}
