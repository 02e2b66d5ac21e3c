"""Parts of a trace, joined; what is missing between them is said."""

import json
import shutil
from pathlib import Path
from random import Random

import pytest
from zstandard import ZstdCompressor, ZstdDecompressor

from schedtrace.errors import InputError
from schedtrace.model.manifest import part_number
from schedtrace.model.trace import Arrival, End, Events, Notice, Present
from schedtrace.read import part_files
from schedtrace.read.follow import Following
from schedtrace.read.lines import ReadOptions, WholeLines
from schedtrace.read.part_files import files_for
from schedtrace.read.run import find_runs, read_run
from tests.makers import encoded, header, step
from tests.unit.read.same import assert_same

compressed = ZstdCompressor(1, write_checksum=True).compress
STEPS = 4
"""Of each part, a frame each."""


def text(lines):
    return b"".join(encoded(line) + b"\n" for line in lines)


def one(number):
    return step(number, got={"a": 1}, arrived=[Arrival("a", 0, 0, 5)] if number == 0 else [])


def head(number, *notices):
    first = number * STEPS
    there = [Present("a", "running", 0, 5, 0), *([Present("b", "waiting", 0, 5, 0)] if number == 3 else [])]
    return (
        text([header(first_step=first, notices=list(notices)), Events(at_us=10_000 * first, present=there)])
        if number
        else text([header()])
    )


def part(folder, number):
    path = folder / f"engine-0.{number:06}.jsonl.zst"
    frames = [head(number), *(text([one(number * STEPS + at)]) for at in range(STEPS))]
    path.write_bytes(b"".join(map(compressed, frames)))
    return path


@pytest.fixture
def folder(tmp_path):
    """Of four parts, the last one closed."""
    made = tmp_path / "run"
    made.mkdir()
    *_, last = [part(made, number) for number in range(4)]
    with last.open("ab") as file:
        file.write(compressed(text([End(at_us=99_000, steps=4 * STEPS)])))
    return made


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / "plain" / "engine-0.jsonl"
    path.parent.mkdir()
    steps = [one(number) for number in range(4 * STEPS)]
    path.write_bytes(text([header(), *steps, End(at_us=99_000, steps=4 * STEPS)]))
    return read_run(path.parent).traces[0]


def trace_of(folder):
    [trace] = read_run(folder).traces
    return trace


def said(trace):
    return [text.removeprefix(f"{trace.path}: ") for text in trace.problems.sentences(trace.path)]


def numbers(trace):
    return trace.steps["step"].to_list()


def test_joined_they_are_the_plain_trace(folder, plain):
    assert_same(trace_of(folder), plain)
    every = [line for _, chunk in WholeLines(plain.path) for line in chunk]
    for chunk_bytes in (1, 300):
        joined = WholeLines(trace_of(folder).path, ReadOptions(chunk_bytes=chunk_bytes))
        assert [line for _, chunk in joined for line in chunk if line] == every


def test_a_cache_is_of_the_parts_that_are_there(folder, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = ReadOptions(memory_bytes=0)
    for _ in range(2):
        assert_same(read_run(folder, options).traces[0], plain)
    (folder / "engine-0.000000.jsonl.zst").unlink()
    assert numbers(read_run(folder, options).traces[0]) == list(range(STEPS, 4 * STEPS))


def test_names_that_stand_for_all_parts(folder):
    every = folder / "engine-0.*.jsonl.zst"
    parts = sorted(folder.iterdir())
    assert find_runs([folder]) == [folder]
    assert find_runs([every]) == find_runs(parts) == [every]
    assert find_runs(parts[:1]) == parts[:1]
    assert numbers(trace_of(every)) == list(range(4 * STEPS))
    assert numbers(trace_of(parts[2])) == list(range(2 * STEPS, 3 * STEPS))
    with pytest.raises(InputError, match="no such file"):
        find_runs([folder / "engine-1.*.jsonl.zst"])


@pytest.mark.parametrize(("last_us", "first"), [(0, 12), (1, 8), (40_000, 8), (40_001, 4), (10**9, 0)])
def test_for_its_end_only_the_last_parts_are_read(last_us, first, folder):
    [trace] = read_run(folder, ReadOptions(last_us=last_us)).traces
    assert (numbers(trace), said(trace)) == (list(range(first, 16)), [])


def test_a_part_says_when_it_begins_behind_any_number_of_requests(folder):
    drawn = Random(0)  # noqa: S311  # ids of vLLM's front end, which cannot be compressed
    there = [Present(f"chatcmpl-{drawn.randbytes(16).hex()}", "waiting", 0, 5, 0) for _ in range(1500)]
    for number in range(1, 4):
        lines = text([header(first_step=4 * number), Events(at_us=40_000 * number, present=there)])
        (folder / f"engine-0.{number:06}.jsonl.zst").write_bytes(compressed(lines))
    assert [part_number(path) for path in files_for(folder / "engine-0.*.jsonl.zst", 1)] == [2, 3]


@pytest.mark.parametrize(
    ("unknown", "needed"), [([3], [1, 2, 3]), ([2], [1, 2, 3]), ([1, 2, 3], [0, 1, 2, 3])]
)
def test_a_part_without_a_head_does_not_make_all_needed(unknown, needed, folder):
    for number in unknown:
        (folder / f"engine-0.{number:06}.jsonl.zst").write_bytes(b"")  # it is being begun
    assert [part_number(path) for path in files_for(folder / "engine-0.*.jsonl.zst", 10_000)] == needed


BEGINS = "begins at step {} (2023-11-14 22:13:20 UTC); requests that ended before are not in it"


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def empty(path):
    path.write_bytes(b"")


def flip(path):
    data = bytearray(path.read_bytes())
    at = data.rindex(b"\x28\xb5\x2f\xfd") + 12
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))


LOST = "a part is missing, nothing is known from {} s into the recording: {}"
ALSO = "{} missing, and so is any request that arrived or ended in {}"

LOST_PART = [LOST.format("0.07 to 0.12", "4 steps (8-11)"), ALSO.format("4 steps are", "them")]


@pytest.mark.parametrize(
    ("accident", "place", "missing", "sentences"),
    [
        (Path.unlink, 0, range(4), [BEGINS.format(4)]),
        (Path.unlink, 2, range(8, 12), LOST_PART),
        (empty, 2, range(8, 12), LOST_PART),
        (cut, 1, range(7, 8), [LOST.format("0.06 to 0.08", "1 step (7)"), ALSO.format("1 step is", "it")]),
    ],
)
def test_what_is_missing_is_said(accident, place, missing, sentences, folder):
    path = folder / f"engine-0.{place:06}.jsonl.zst"
    accident(path)
    trace = trace_of(folder)
    assert numbers(trace) == [number for number in range(4 * STEPS) if number not in missing]
    assert said(trace) == sentences
    assert trace.present["request_id"].to_list() == (["a"] if place == 0 else ["b"] if place == 2 else [])


def test_of_a_cut_frame_whole_lines_are_used(folder):
    last = folder / "engine-0.000003.jsonl.zst"
    last.write_bytes(compressed(head(3) + text([one(12), one(13)]))[:-6])
    trace = trace_of(folder)
    assert trace.problems.truncated
    assert numbers(trace)[:12] == list(range(12))


def test_a_broken_frame_costs_what_stands_in_it(folder):
    flip(folder / "engine-0.000002.jsonl.zst")
    trace = trace_of(folder)
    assert trace.problems.broken_frames == 1
    assert set(range(16)) - set(numbers(trace)) == {11}
    assert trace.present["request_id"].to_list() == ["b"]  # who may have come in it


def test_a_part_that_was_cut_behind_a_frame_is_noted_in_the_next(folder):
    noted = [Notice(at_us=1, message="it is slow")]
    (folder / "engine-0.000001.jsonl.zst").write_bytes(
        b"".join(
            compressed(lines) for lines in (head(1), *(text([one(4 + at)]) for at in range(4)), text(noted))
        )
    )
    frames = [head(2, "it is slow"), *(text([one(8 + at)]) for at in range(STEPS - 1))]
    (folder / "engine-0.000002.jsonl.zst").write_bytes(b"".join(map(compressed, frames)))
    frames = [head(3, "it is slow", "the file was truncated"), text([one(12)])]
    (folder / "engine-0.000003.jsonl.zst").write_bytes(b"".join(map(compressed, frames)))
    trace = trace_of(folder)
    assert trace.notices == ["it is slow", "the file was truncated"]
    assert trace.problems.gaps == [(11, 11, 101_000, 120_000)]  # and none where the first notice is repeated
    assert trace.present["request_id"].to_list() == ["b"]


def test_parts_that_go_while_they_are_read(folder, monkeypatch):
    listed = part_files.files_of
    monkeypatch.setattr(
        part_files, "files_of", lambda path: [folder / "engine-0.000000.jsonl.zst.gone", *listed(path)]
    )
    assert numbers(trace_of(folder)) == list(range(16))
    shutil.rmtree(folder)
    with pytest.raises(InputError):
        trace_of(folder)


def test_parts_are_followed_one_after_the_other(tmp_path):
    part(tmp_path, 0)
    follower = Following(tmp_path / "engine-0.*.jsonl.zst", 10**12)
    found = [number for chunk in follower.read() for number in chunk.steps["step"]]
    part(tmp_path, 1)
    part(tmp_path, 2)
    found += [number for chunk in follower.read() for number in chunk.steps["step"]]
    (tmp_path / "engine-0.000002.jsonl.zst").unlink()
    assert (found, follower.gaps, follower.garbled_us) == (list(range(12)), False, None)
    part(tmp_path, 4)
    found = [number for chunk in follower.read() for number in chunk.steps["step"]]
    assert (found, follower.gaps, follower.garbled_us) == (list(range(16, 20)), True, None)
    assert [live.entry.request_id for live in follower.lives] == ["a"]
    follower.close()


@pytest.mark.parametrize("accident", [flip, cut])
def test_behind_lost_lines_it_is_read_anew_who_is_there(accident, tmp_path):
    for number in range(3):
        part(tmp_path, number)
    last = tmp_path / "engine-0.000002.jsonl.zst"
    hidden = last.rename(tmp_path / "hidden") if accident is flip else last
    follower = Following(tmp_path / "engine-0.*.jsonl.zst", 10**12)
    list(follower.read())
    accident(hidden)
    hidden.rename(last)
    part(tmp_path, 3)
    list(follower.read())
    assert (follower.gaps, [live.entry.request_id for live in follower.lives]) == (True, ["a", "b"])
    follower.close()


@pytest.mark.parametrize(
    "bomb",
    [b"\n", b"x\n", b"\0", b'{"type":"step"}\n', b"["],
    ids=["lines", "broken", "line", "json", "depth"],
)
def test_a_bomb_is_dropped_and_named(bomb, folder):
    second = folder / "engine-0.000001.jsonl.zst"
    with second.open("ab") as file:
        file.write(compressed(bomb * (10**7 // len(bomb))))
    trace = trace_of(folder)
    assert numbers(trace) == list(range(16))
    assert said(trace)[0] == (
        f"{second.name}: a frame expands to more than 256 times its size, which no recorder writes; it and "
        "what follows it in its part was dropped"
    )
    follower = Following(trace.path, 10**12)
    assert [number for chunk in follower.read() for number in chunk.steps["step"]] == list(range(16))
    assert f"{trace.path}: {follower.left_out[0]}" == trace.problems.sentences(trace.path)[0]
    follower.close()


def test_without_its_first_frame_a_part_has_the_header_of_the_others(folder):
    first = folder / "engine-0.000000.jsonl.zst"
    broken = bytearray(first.read_bytes())
    broken[12] ^= 0xFF
    first.write_bytes(bytes(broken))
    trace = trace_of(folder)
    assert (numbers(trace), trace.header.first_step) == (list(range(16)), 0)
    assert "1 frame cannot be decompressed: each had up to a second" in said(trace)


@pytest.mark.parametrize("other", [{"pid": 7}, {"host": "b"}, {"engine_rank": 1}, {"wall_anchor_us": 1}])
def test_a_part_of_another_engine_is_left_out_and_named(other, folder):
    stranger = folder / "engine-0.000002.jsonl.zst"
    lines = text([header(first_step=8, **other), Events(at_us=80_000), one(8)])
    stranger.write_bytes(compressed(lines))
    trace = trace_of(folder)
    assert numbers(trace) == [*range(8), *range(12, 16)]
    [left_out, *_] = said(trace)
    assert left_out.startswith(
        f"{stranger.name}: written by another engine (rank {other.get('engine_rank', 0)}"
    )
    assert trace.problems.gaps == [(8, 11, 71_000, 120_000)]


def test_renamed_and_copied_parts_stand_where_their_headers_say(folder, plain):
    parts = sorted(folder.iterdir())
    (folder / "engine-0.000009.jsonl.zst").write_bytes(parts[1].read_bytes())
    parts[1].rename(folder / "x")
    parts[2].rename(parts[1])
    (folder / "x").rename(parts[2])
    trace = trace_of(folder)
    assert said(trace) == ["engine-0.000009.jsonl.zst: a copy of another part, left out"]
    trace.problems.dropped.clear()
    assert_same(trace, plain)


def test_json_with_blanks_is_the_same(folder, plain):
    for path in folder.iterdir():
        content = ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True).read()
        spaced = [json.dumps(json.loads(line)) + "\n" for line in content.splitlines()]
        path.write_bytes(compressed("".join(spaced).encode()))
    assert_same(trace_of(folder), plain)
    assert said(trace_of(folder)) == []


def test_small_parts_are_read_together(folder):
    assert len(list(WholeLines(folder / "engine-0.*.jsonl.zst"))) == 1


def test_a_part_that_cannot_be_opened_is_named_and_tried_again(tmp_path):
    part(tmp_path, 0)
    follower = Following(tmp_path / "engine-0.*.jsonl.zst", 10**12)
    list(follower.read())
    second = tmp_path / "engine-0.000001.jsonl.zst"
    second.mkdir()
    for _ in range(2):
        with pytest.raises(InputError, match="cannot be read"):
            follower.read()
    second.rmdir()
    part(tmp_path, 1)
    assert [number for chunk in follower.read() for number in chunk.steps["step"]] == [4, 5, 6, 7]
    follower.close()
