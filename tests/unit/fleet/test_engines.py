"""Engines read into summaries: the cache, copies, what cannot be read, and stores other than folders."""

import json
import shutil
import sys
from functools import partial

import fsspec
import msgspec
import polars as pl
import pytest

from schedtrace.errors import InputError, MissingExtraError
from schedtrace.fleet import engines
from schedtrace.fleet.inputs import find_fleet
from schedtrace.fleet.reduce import fleet_report
from schedtrace.fleet.stores import needed_parts
from schedtrace.fleet.summary import message_from, message_json
from schedtrace.fleet.summary_cache import SummaryCache, summaries_in, write_summaries
from schedtrace.fleet.workers import HereOnly
from schedtrace.model.say import say
from schedtrace.read.lines import ReadOptions
from schedtrace.timeline.window import Window
from tests import makers
from tests.unit.fleet.conftest import engine_lines


@pytest.fixture
def three(engine_at, tmp_path):
    for number in range(3):
        engine_at(f"host={number}/engine-0", requests=3 + number)
    return tmp_path / "fleet"


@pytest.fixture
def cache(tmp_path):
    def opened():
        folder = tmp_path / "summaries"
        folder.mkdir(exist_ok=True)
        return SummaryCache(folder)

    return opened


def cached(fleet):
    return {engine.engine: engine.cached for engine in fleet.read.engines}


def test_a_summary_has_what_the_engine_s_own_report_says(three, read_here):
    fleet = read_here(three)
    assert list(fleet.by_name) == ["host=0/engine-0", "host=1/engine-0", "host=2/engine-0"]
    summary = fleet.by_name["host=2/engine-0"]
    assert (summary.host, summary.requests, summary.finished, summary.steps) == ("host=2", 5, 5, 15)
    assert (summary.arrivals_us, summary.quiet_us, summary.quiet_begin_us) == (400_000, 100_000, 0)
    assert sum(summary.arrivals) == 5
    assert sum(time.us for time in summary.times) == summary.requests_us
    [ttft] = [sketch for sketch in summary.sketches if sketch.metric == "ttft"]
    assert (sum(ttft.counts), ttft.max_ms) == (5, 5.0)


def test_a_second_call_reads_only_what_is_new(three, read_here, cache, engine_at, monkeypatch):
    assert set(cached(read_here(three, cache=cache())).values()) == {False}
    monkeypatch.setattr("schedtrace.read.cache.SETTLED_NS", 0)  # the files were written just now
    read_here(three, cache=cache())
    engine_at("host=3/engine-0")
    read = []
    monkeypatch.setattr(engines, "summarize_run", _noting(engines.summarize_run, read))
    again = read_here(three, cache=cache())
    assert cached(again) == {
        "host=0/engine-0": True,
        "host=1/engine-0": True,
        "host=2/engine-0": True,
        "host=3/engine-0": False,
    }
    assert len(read) == 1


def _noting(function, calls):
    def noted(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return noted


def test_unchanged_files_are_not_even_opened(three, read_here, cache, monkeypatch):
    monkeypatch.setattr("schedtrace.read.cache.SETTLED_NS", 0)
    first = read_here(three, cache=cache())
    monkeypatch.setattr(engines, "read_engine", lambda _: pytest.fail("read"))
    again = read_here(three, cache=cache())
    assert again.by_name == first.by_name


def test_a_copy_elsewhere_and_another_window_are_told_apart_by_content(three, read_here, cache, tmp_path):
    read_here(three, cache=cache())
    shutil.copytree(three, tmp_path / "copy")
    assert set(cached(read_here(tmp_path / "copy", cache=cache())).values()) == {True}
    windowed = read_here(three, cache=cache(), window=Window(end_us=150_000))
    assert set(cached(windowed).values()) == {False}
    assert [summary.requests for summary in windowed.by_name.values()] == [2, 2, 2]


def test_a_changed_trace_is_read_again(three, read_here, cache, engine_at):
    read_here(three, cache=cache())
    engine_at("host=1/engine-0", requests=7)
    again = read_here(three, cache=cache())
    assert cached(again) == {"host=0/engine-0": True, "host=1/engine-0": False, "host=2/engine-0": True}
    assert again.by_name["host=1/engine-0"].requests == 7


def test_a_broken_summary_in_the_cache_is_read_again(three, read_here, cache):
    first = read_here(three, cache=cache())
    for path in cache().folder.glob("*.parquet"):
        path.write_bytes(b"PAR1")
    again = read_here(three, cache=cache())
    assert set(cached(again).values()) == {False}
    assert again.by_name == first.by_name


def test_an_engine_is_counted_once_however_often_it_is_there(three, read_here):
    shutil.copytree(three / "host=1", three / "host=copy")
    fleet = read_here(three)
    assert list(fleet.by_name) == ["host=0/engine-0", "host=1/engine-0", "host=2/engine-0"]
    [left_out] = fleet.read.left_out
    assert left_out.path == str(three / "host=copy" / "engine-0" / "engine-0.jsonl")
    assert left_out.why == "the same recording as host=1/engine-0, which is counted"


def test_what_cannot_be_read_is_named_and_the_rest_is_analyzed(three, read_here):
    trace = three / "host=0" / "engine-0" / "engine-0.jsonl"
    trace.write_bytes(trace.read_bytes()[:-300])
    header = json.loads((three / "host=1/engine-0/engine-0.jsonl").read_bytes().splitlines()[0])
    newer = json.dumps(header | {"schema_version": 99}).encode()
    (three / "host=1/engine-0/engine-0.jsonl").write_bytes(newer + b"\n")
    fleet = read_here(three)
    assert list(fleet.by_name) == ["host=0/engine-0", "host=2/engine-0"]
    [left_out] = fleet.read.left_out
    assert left_out.path == str(three / "host=1/engine-0/engine-0.jsonl")
    assert "schema version 99" in left_out.why
    problems = {engine.engine: bool(engine.problems) for engine in fleet.read.engines}
    assert problems == {"host=0/engine-0": True, "host=2/engine-0": False}


def test_a_trace_that_vanishes_after_the_listing_is_left_out(three):
    inputs = find_fleet([str(three)])
    shutil.rmtree(three / "host=2")
    fleet = engines.read_fleet(inputs, lambda _: HereOnly())
    assert len(fleet.by_name) == 2
    assert [entry.why for entry in fleet.read.left_out] == ["it vanished before it was read"]


def test_no_engine_that_can_be_read_is_an_error(tmp_path, read_here):
    (tmp_path / "engine-0.jsonl").write_text("nonsense\n")
    with pytest.raises(InputError, match=r"engine-0\.jsonl"):
        read_here(tmp_path)


def test_hostile_folder_names_are_names(tmp_path, read_here, engine_at):
    hosts = ["\x1b[31mred", "line\nbreak", "\u202eright", "a b;$(x)", "per%cent", "ü", "host=b"]
    names = [f"{host}/engine-0" for host in hosts]
    for name in names:
        engine_at(name)
    assert set(read_here(tmp_path / "fleet").by_name) == {*names}


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_addresses_of_fsspec_give_the_same_report_as_paths(three, read_here, protocol):
    trace = three / "host=1/engine-0/engine-0.jsonl"
    trace.write_bytes(trace.read_bytes()[:-300])  # its problems name the file
    root = f"memory:///{three.parent.name}/fleet" if protocol == "memory" else f"file://{three}"
    if protocol == "memory":
        fsspec.filesystem("memory").put(str(three), f"/{three.parent.name}/", recursive=True)
    local, remote = (msgspec.json.encode(fleet_report(read_here(root_))).decode() for root_ in (three, root))
    assert remote.replace(root, str(three)) == local


def test_a_part_of_a_remote_trace_that_vanishes_is_named(three):
    files = fsspec.filesystem("memory")
    files.put(str(three), f"/{three.parent.name}-gone/", recursive=True)
    inputs = find_fleet([f"memory:///{three.parent.name}-gone"])
    files.rm(f"/{three.parent.name}-gone/fleet/host=1/engine-0/run.json")
    fleet = engines.read_fleet(inputs, lambda _: HereOnly())
    [named] = [engine for engine in fleet.read.engines if engine.problems]
    assert named.engine == "host=1/engine-0"


@pytest.mark.parametrize(
    ("address", "package", "extra"),
    [
        ("s3://bucket/traces", "fsspec", "s3"),
        ("s3://bucket/traces", "s3fs", "s3"),
        ("gs://bucket/traces", "fsspec", "gcs"),
        ("gcs://bucket/traces", "gcsfs", "gcs"),
        ("memory://traces", "fsspec", "remote"),
    ],
)
def test_a_store_whose_package_is_missing_names_the_extra_that_brings_it(
    address, package, extra, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError) as raised:
        find_fleet([address])
    assert str(raised.value) == f"{address} needs an extra: pip install 'schedtrace[{extra}]'"


def test_an_unknown_protocol_is_an_input_error():
    with pytest.raises(InputError, match="nosuch"):
        find_fleet(["nosuch://bucket/traces"])


def test_parquet_of_a_fleet(three, read_here, tmp_path):
    fleet = read_here(three)
    path = tmp_path / "out" / "fleet.parquet"
    write_summaries(path, [*fleet.by_name], [*fleet.by_name.values()])
    frame = pl.read_parquet(path)
    assert frame["engine"].to_list() == [*fleet.by_name]
    assert summaries_in(frame.drop("engine")) == [*fleet.by_name.values()]
    times = frame.select("engine", "times").explode("times").unnest("times")
    assert times.columns == ["engine", "part", "cause", "us"]


def test_duckdb_reads_the_parquet(three, read_here, tmp_path):
    duckdb = pytest.importorskip("duckdb")
    fleet = read_here(three)
    write_summaries(tmp_path / "fleet.parquet", [*fleet.by_name], [*fleet.by_name.values()])
    query = (
        "select engine, sum(t.us) from (select engine, unnest(times) as t from '{}') group by 1 order by 1"
    )
    rows = duckdb.sql(query.format(tmp_path / "fleet.parquet")).fetchall()
    assert rows == [(name, summary.requests_us) for name, summary in fleet.by_name.items()]


def test_messages_survive_a_column_of_text():
    inner = say("{share:%} of {time:us}", share=0.5, time=1200)
    message = say(
        "{setting:setting} is {value:n}: {inner}[ {none}].", setting="x", value=3, inner=inner, none=""
    )
    assert message_from(message_json(message)) == message


@pytest.mark.parametrize(
    ("window", "parts"),
    [
        (Window(begin_us=250), [2, 3]),
        (Window(begin_us=100), [1, 2, 3]),
        (Window(end_us=200), [0, 1]),
        (Window(end_us=201), [0, 1, 2]),
        (Window(begin_us=100, end_us=200), [1]),
        (Window(last_us=50), [2, 3]),
        (Window(last_us=100), [2, 3]),
        (Window(end_us=250, last_us=100), [1, 2]),
        (Window(begin_us=5000), [3]),
    ],
)
def test_only_parts_within_the_window_are_needed(window, parts):
    assert needed_parts([None, 100, 200, 300], window) == parts


def test_a_part_whose_begin_is_unknown_is_kept():
    assert needed_parts([None, None, 200, None], Window(begin_us=150, end_us=160)) == [0, 1, 3]


def test_a_large_trace_leaves_no_file_behind(three, read_here, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(engines, "ReadOptions", partial(ReadOptions, memory_bytes=1))
    read_here(three)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_trace_without_a_manifest_is_an_engine(tmp_path, read_here):
    makers.run_folder(tmp_path / "bare", *engine_lines())
    assert list(read_here(tmp_path / "bare").by_name) == ["engine-0"]
