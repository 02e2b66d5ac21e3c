"""Large traces by way of Parquet files: the same frames, and a cache that is never trusted blindly."""

import os
import re
import shutil
import tempfile
import time
from io import BytesIO
from stat import S_IMODE
from unittest.mock import Mock, call

import polars as pl
import pytest

from schedtrace.errors import InputError
from schedtrace.model.trace import ChunkCap, Cpu, Events, Exit, Notice, Output, Preemption
from schedtrace.model.trace_facts import DummyBatch, RankSync, ThreadTime
from schedtrace.read import cache, trace
from schedtrace.read.lines import ReadOptions
from schedtrace.read.tables import CannotWriteError
from schedtrace.read.trace import read_trace
from tests.makers import arrival, encoded, finish, header, step, write_trace
from tests.unit.read.same import assert_same

TINY = ReadOptions(memory_bytes=0, chunk_bytes=700)
"""A chunk is a line or two."""
PASSING = ReadOptions(memory_bytes=0, chunk_bytes=700, cache=False)


def lines():
    refused = Exit("waiting", "break", "kv_blocks", "c", 9, via="source", location="scheduler.py:7")
    for at in range(12):
        yield step(
            at,
            trial=at // 4,
            got={"a": 5 + at, "b": 1} if at else {},
            new="ab" if at % 4 == 1 else "",
            back=None if at == 6 else 1000,
            waiting=at % 3,
            ended=refused if at % 3 else None,
            arrived=[arrival(f"r{at}", at), arrival("a", at)] if at % 2 else [],
            finished=[finish(f"r{at - 1}")] if at and not at % 2 else [],
            preempted=[Preemption("b", 40 + at, "a")] if at in {5, 9} else [],
            caps=[ChunkCap("a", "token_budget", 9, 5)] if at == 5 else [],
        )
        if at == 7:
            yield Output(step=6, output_us=77, update_us=7, output_tokens=3)
            yield Notice(at_us=1, message="told")
            yield b"garbage"
    yield Events(at_us=9, trial=2, arrived=[arrival("late", 3)], finished=[finish("a", "ABORTED")])
    yield Cpu(at_us=10, threads=[ThreadTime("engine", 1, 1, 10, 2)])
    yield Events(at_us=12, dummies=[DummyBatch(10, 2, 0, 1)], syncs=[RankSync(11, 1, 0, 1)])


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """The user's cache."""
    folder = tmp_path_factory.mktemp("home") / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "schedtrace" / cache.FOLDER


@pytest.fixture
def path(tmp_path):
    return write_trace(tmp_path / "engine-0.jsonl", header(trial_ids=True), *lines())


@pytest.fixture
def cached(path, parses):
    """A trace that is in the cache."""
    read_trace(path, TINY)
    assert len(parses) == 1
    return path


@pytest.fixture
def settled(monkeypatch):
    """Files that were changed just now count as settled."""
    monkeypatch.setattr(cache, "SETTLED_NS", 0)


@pytest.fixture
def parses(monkeypatch):
    """One entry for every time that a large trace was parsed."""
    done = []
    original = trace.parse

    def parse(lines, tables):
        done.extend([1] if tables._folder else [])
        return original(lines, tables)

    monkeypatch.setattr(trace, "parse", parse)
    return done


def note_of(path):
    [folder] = cache.folders_of(path)
    return folder / cache.NOTE


def test_a_trace_is_the_same_in_memory_in_chunks_by_files_and_from_the_cache(path, parses):
    whole = read_trace(path)
    assert (whole.steps.height, whole.problems.garbled_lines) == (12, [12])
    assert whole.requests().collect().height == 22
    assert_same(read_trace(path, ReadOptions(chunk_bytes=1)), whole)
    assert_same(read_trace(path, PASSING), whole)
    assert_same(read_trace(path, TINY), whole)
    assert len(parses) == 2
    assert_same(read_trace(path, TINY), whole)
    assert len(parses) == 2


@pytest.mark.parametrize("chunk_bytes", [1, 10**6])
@pytest.mark.parametrize("order", [[2, 0, 1, 1, 3], [0, 1, 0, 2], [5, 4, 3, 5], [-3, -5]])
def test_steps_out_of_order_or_told_twice_are_sorted_with_their_entries(tmp_path, order, chunk_bytes):
    told = [step(n, got={f"{n}": at}, preempted=[Preemption(f"{n}", at)]) for at, n in enumerate(order)]
    path = write_trace(tmp_path / "engine-0.jsonl", header(), *told)
    first = sorted({number: order.index(number) for number in order}.items())
    for how in (ReadOptions(chunk_bytes=chunk_bytes), ReadOptions(memory_bytes=0, chunk_bytes=chunk_bytes)):
        trace = read_trace(path, how)
        assert trace.steps["step"].to_list() == [number for number, _ in first]
        assert trace.requests().select("step", "scheduled_tokens").collect().rows() == first
        assert trace.preemptions().select("step", "lost_tokens").collect().rows() == first


def test_a_small_trace_leaves_nothing_behind(path, home):
    read_trace(path)
    assert not home.exists()


def test_a_large_one_leaves_nothing_beside_it(path, home):
    path.parent.chmod(0o500)
    read_trace(path, TINY)
    assert [child.name for child in path.parent.iterdir()] == ["engine-0.jsonl"]
    assert [child / cache.NOTE for child in home.iterdir()] == [note_of(path)]


@pytest.mark.usefixtures("settled")
def test_a_cache_in_a_received_folder_is_not_believed(cached, home, parses):
    [folder] = home.iterdir()
    for name in (folder.name, "engine-0.jsonl.abc"):  # also where older versions kept theirs
        shutil.copytree(folder, cached.parent / ".schedtrace-cache" / name)
    shutil.rmtree(home)
    read_trace(cached, TINY)
    assert len(parses) == 2


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777, None])
def test_a_cache_folder_that_others_own_or_may_enter_is_not_used(cached, home, parses, mode, monkeypatch):
    if mode is None:
        monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 1)
    else:
        home.chmod(mode)
    assert_same(read_trace(cached, TINY), read_trace(cached))
    assert len(parses) == 2
    assert len(list(home.iterdir())) == 1


def test_a_link_in_the_place_of_the_cache_folder_is_not_used(path, home, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    home.parent.mkdir(parents=True)
    home.symlink_to(elsewhere)
    assert_same(read_trace(path, TINY), read_trace(path))
    assert list(elsewhere.iterdir()) == []


@pytest.mark.usefixtures("settled")
def test_without_a_cache_nothing_is_left_behind_and_none_is_used(path, home, parses):
    read_trace(path, PASSING)
    assert not home.exists()
    read_trace(path, TINY)
    read_trace(path, PASSING)
    assert len(parses) == 3


@pytest.mark.usefixtures("settled")
def test_other_content_of_the_same_size_and_time_is_read_anew(cached, parses):
    before = cached.stat()
    cached.write_bytes(cached.read_bytes().replace(b'"scheduled_tokens":6', b'"scheduled_tokens":9'))
    os.utime(cached, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cached.stat().st_size == before.st_size
    assert read_trace(cached, TINY).requests().collect()["scheduled_tokens"][0] == 9
    assert len(parses) == 2


@pytest.mark.usefixtures("settled")
def test_a_change_between_the_samples_is_found_by_the_whole_content(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SAMPLE_BYTES", 1)
    path = write_trace(tmp_path / "engine-0.jsonl", header(), *(step(n, got={"a": 5}) for n in range(200)))
    read_trace(path, TINY)
    content = path.read_bytes()
    known = cache.sampled(BytesIO(content), len(content))
    changed = (
        content[: at.end() - 1] + b"7" + content[at.end() :]
        for at in re.finditer(b'"scheduled_tokens":5', content)
    )
    path.write_bytes(next(one for one in changed if cache.sampled(BytesIO(one), len(one)) == known))
    assert read_trace(path, TINY).requests().collect()["scheduled_tokens"].sum() == 1002


@pytest.mark.parametrize("by", [b"", b'{"type":"notice","at_us":1,"message":"more"}\n'])
@pytest.mark.usefixtures("settled")
def test_a_trace_cut_or_grown_is_read_anew(cached, parses, by):
    cached.write_bytes(cached.read_bytes() + by if by else cached.read_bytes()[:-30])
    trace = read_trace(cached, TINY)
    assert (trace.problems.truncated, trace.notices) == (not by, ["told", *(["more"] if by else [])])
    assert len(parses) == 2


@pytest.mark.usefixtures("settled")
def test_a_copy_of_the_folder_is_hashed_once_and_then_known(cached, parses, monkeypatch):
    os.utime(cached)
    read_trace(cached, TINY)
    hashed = Mock(wraps=cache.digest_of)
    monkeypatch.setattr(cache, "digest_of", hashed)
    read_trace(cached, TINY)
    assert call(cached) not in hashed.mock_calls
    assert len(parses) == 1


def test_a_file_changed_just_now_is_hashed_every_time(cached, parses):
    assert b'"stamp":null' in note_of(cached).read_bytes()
    read_trace(cached, TINY)
    assert len(parses) == 1


def test_a_cache_of_another_version_is_not_used(cached, parses, monkeypatch):
    monkeypatch.setattr(cache, "__version__", "99.0")
    read_trace(cached, TINY)
    assert len(parses) == 2


def damage_bit(folder):
    file = min(folder.glob("stretches-*.parquet"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "a bit of a table": damage_bit,
    "a table lost": lambda folder: min(folder.glob("stretches-*.parquet")).unlink(),
    "a table too many": lambda folder: (folder / "stretches-999999.parquet").write_bytes(b""),
    "a table empty": lambda folder: (folder / "steps.parquet").write_bytes(b""),
    "no note": lambda folder: (folder / cache.NOTE).unlink(),
    "half a note": lambda folder: (folder / cache.NOTE).write_bytes(b'{"made_by":'),
    "a note in a broken encoding": lambda folder: (folder / cache.NOTE).write_bytes(b'{"made_by":"\xff"}'),
    "a note of something else": lambda folder: (folder / cache.NOTE).write_bytes(b"[]"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.usefixtures("settled")
def test_a_damaged_cache_is_not_used_and_made_again(path, parses, damage):
    whole = read_trace(path)
    read_trace(path, TINY)
    damage(note_of(path).parent)
    assert_same(read_trace(path, TINY), whole)
    assert_same(read_trace(path, TINY), whole)
    assert len(parses) == 2


def test_a_table_that_polars_does_not_take_is_not_used_even_if_the_note_says_so(cached, parses):
    folder = note_of(cached).parent
    (folder / "steps.parquet").write_bytes(b"no table")
    note = cache.msgspec.json.decode(note_of(cached).read_bytes(), type=cache.CacheNote)
    note.files = cache.digests(folder)
    note_of(cached).write_bytes(cache.msgspec.json.encode(note))
    assert read_trace(cached, TINY).steps.height == 12
    assert len(parses) == 2


def test_where_the_cache_cannot_be_written_to_a_temporary_folder_serves(path, home, monkeypatch):
    monkeypatch.setattr(tempfile, "mkdtemp", _refusing_in(home))
    assert_same(read_trace(path, TINY), read_trace(path))
    assert cache.folders_of(path) == []


def _refusing_in(folder):
    original = tempfile.mkdtemp

    def make(suffix=None, prefix=None, dir=None):  # noqa: A002  # as the original
        if dir == folder:
            raise PermissionError(13, "Permission denied")
        return original(suffix, prefix, dir)

    return make


def test_a_file_in_the_place_of_the_cache_folder_is_left_alone(path, home):
    home.parent.mkdir(parents=True)
    home.write_text("mine")
    assert_same(read_trace(path, TINY), read_trace(path))
    assert home.read_text() == "mine"


def test_a_disk_that_is_full_everywhere_is_told_with_what_to_do(path, monkeypatch):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    with pytest.raises(InputError, match=r"No space left on device.*too large for memory.*TMPDIR"):
        read_trace(path, TINY)
    assert cache.folders_of(path) == []


def test_a_build_that_ends_early_leaves_no_folder(path):
    with pytest.raises(KeyboardInterrupt), cache.building(path):
        raise KeyboardInterrupt
    with pytest.raises(CannotWriteError, match="full"), cache.building(path):
        raise OSError(28, "full")
    assert cache.folders_of(path) == []


@pytest.mark.usefixtures("settled")
def test_old_caches_are_removed_when_a_new_one_is_made_and_those_in_use_stay(cached):
    [old] = cache.folders_of(cached)
    for _ in range(2):
        cached.write_bytes(cached.read_bytes() + b"x\n")
        read_trace(cached, TINY)
    assert len(cache.folders_of(cached)) == 3
    os.utime(old, (0, 0))
    cached.write_bytes(cached.read_bytes() + b"x\n")
    read_trace(cached, TINY)
    assert len(cache.folders_of(cached)) == 3
    assert not old.exists()


def test_a_broken_trace_is_refused_the_same_way_and_leaves_no_cache(tmp_path):
    path = tmp_path / "engine-0.jsonl"
    path.write_bytes(encoded(step(0)) + b"\n")
    with pytest.raises(InputError, match=":1: not a schedtrace trace"):
        read_trace(path, TINY)
    assert cache.folders_of(path) == []


def test_progress_is_told_in_bytes_up_to_the_whole(path):
    told = []
    read_trace(path, ReadOptions(chunk_bytes=2000, progress=lambda done, total: told.append((done, total))))
    size = path.stat().st_size
    assert told == [(min(at, size), size) for at in range(2000, size + 2000, 2000)]


@pytest.mark.usefixtures("settled")
def test_caches_that_nobody_used_lately_make_room(path, home, monkeypatch):
    day = 24 * 3600
    for name, age_s in (("old", 31 * day), ("large", 20 * day), ("small", 10 * day), ("new", 60)):
        (home / name).mkdir(parents=True, mode=0o700)
        (home / name / "steps.parquet").write_bytes(b"x" * (900_000 if name in {"large", "new"} else 10))
        os.utime(home / name, (0, time.time() - age_s))
    home.chmod(0o700)
    monkeypatch.setattr(cache, "KEPT_BYTES", 1_000_000)
    read_trace(path, TINY)
    assert {"old", "large", "small", "new"} & {one.name for one in home.iterdir()} == {"small", "new"}


def test_only_the_owner_may_read_a_cache(path, home):
    before = os.umask(0)
    try:
        read_trace(path, TINY)
    finally:
        os.umask(before)
    made = [home.parent, home, *home.rglob("*")]
    assert len(made) > 5
    assert {S_IMODE(one.stat().st_mode) for one in made if one.is_dir()} == {0o700}
    assert {S_IMODE(one.stat().st_mode) for one in made if one.is_file()} == {0o600}
