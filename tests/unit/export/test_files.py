import json
import os
from base64 import b64encode
from stat import S_IMODE

import msgspec
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from schedtrace.errors import InputError, UsageError
from schedtrace.export import ExportKind
from schedtrace.export.exports import export_tables, safe_cell, safe_cells, write_exports
from schedtrace.model.causes import Cap
from schedtrace.model.trace import ChunkCap, Events, Notice, Output, Preemption
from schedtrace.read.run import read_run
from schedtrace.read.tables import LARGE
from schedtrace.workloads.timed_traces import MOONCAKE_BLOCK
from schedtrace.workloads.workload_files import open_workload
from tests import makers
from tests.makers import arrival, finish, step

ROWS = {
    "steps": 2,
    "requests": 3,
    "exits": 2,
    "caps": 1,
    "preemptions": 1,
    "arrivals": 1,
    "finishes": 1,
    "request_states": 2,
    "engine_states": 5,
}


@pytest.fixture
def run(run_of):
    return run_of(
        "r",
        step(0, trial=0, got={"a": 10, "b": 5}, new="ab", arrived=[arrival("a", 0, 1)]),
        step(
            1,
            trial=1,
            got={"a": 1},
            caps=[ChunkCap("a", Cap.TOKEN_BUDGET, 5, 1)],
            preempted=[Preemption("b", 5)],
            finished=[finish("b")],
        ),
    )


@pytest.mark.parametrize(
    ("kind", "read"), [(ExportKind.PARQUET, pl.read_parquet), (ExportKind.CSV, pl.read_csv)]
)
def test_every_table_can_be_read_back(run, tmp_path, kind, read):
    written = write_exports(run, tmp_path / "out" / "in", kind=kind)
    assert {file.name: rows for file, rows in written.items()} == {
        f"{n}.{kind}": rows for n, rows in ROWS.items()
    }
    back = {file.stem: read(file) for file in written}
    assert {name: table.height for name, table in back.items()} == ROWS
    assert back["requests"].select(
        "engine_rank", "step", "trial", "request_id", "scheduled_tokens"
    ).rows() == [
        (0, 0, 0, "a", 10),
        (0, 0, 0, "b", 5),
        (0, 1, 1, "a", 1),
    ]
    assert back["steps"]["remaining_budget"].to_list() == [985, 999]
    assert back["preemptions"].select("step", "request_id", "lost_tokens").row(0) == (1, "b", 5)


def test_no_column_is_nested(run):
    for table in export_tables(run).values():
        assert not any(dtype.is_nested() for dtype in table.collect_schema().dtypes())


def test_engines_stand_below_each_other(tmp_path):
    for rank in (0, 1):
        folder = makers.run_folder(tmp_path / "r", step(0, got={f"r{rank}": 1}), engine_rank=rank)
    requests = export_tables(read_run(folder))["requests"].collect()
    assert requests.select("engine_rank", "request_id").rows() == [(0, "r0"), (1, "r1")]


def test_files_that_are_there_are_kept_unless_told_otherwise(run, tmp_path):
    there = tmp_path / "caps.csv"
    there.write_text("mine")
    with pytest.raises(UsageError, match=r"caps\.csv is there already; --force replaces it"):
        write_exports(run, tmp_path, kind=ExportKind.CSV)
    assert there.read_text() == "mine"
    assert not (tmp_path / "steps.csv").exists()
    write_exports(run, tmp_path, kind=ExportKind.CSV, force=True)
    assert "token_budget" in there.read_text()


def test_a_folder_that_cannot_be_made_is_told(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file.sub: cannot be written to \(Not a directory\)"):
        write_exports(run, tmp_path / "file" / "sub", kind=ExportKind.CSV)


def test_a_trace_in_full_reads_as_the_trace_and_has_no_delta_and_no_output_line(run_of, tmp_path):
    lines = [
        step(0, got={"a": 3}, new="a", back=None),
        b'{"type":"delta","step":1,"start_us":5,"schedule_us":1,"remaining_budget":999,"output_us":9,"update_us":1}',
        Output(step=0, output_us=7, update_us=2, output_tokens=1),
        Notice(at_us=1, message="m"),
        b"garbage",
        b'{"type":"delta","step":2,"start_us":15,"schedule_us":1}',
        Events(at_us=99, arrived=[arrival("c", 3)], finished=[finish("a")]),
        step(3, got={"c": 1}),
    ]
    run = run_of("r", *lines)
    [(file, count)] = write_exports(run, tmp_path / "out", kind=ExportKind.JSONL).items()
    assert (file, count) == (tmp_path / "out" / "engine-0.jsonl", 7)
    told = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
    assert [line["type"] for line in told] == ["header", "step", "step", "notice", "events", "step", "end"]
    assert (told[1]["output_us"], told[1]["output_tokens"]) == (7, 1)
    assert told[2]["requests"] == [{"request_id": "a", "computed_tokens": 3, "scheduled_tokens": 1}]
    [trace], [in_full] = run.traces, read_run(file).traces
    for name in ("steps", "arrivals", "finishes"):
        assert_frame_equal(getattr(in_full, name), getattr(trace, name))
    for name in LARGE:
        assert_frame_equal(in_full.large[name].collect(), trace.large[name].collect())
    assert trace.problems.not_rebuilt == [(2, 2)]


def test_a_trace_is_never_written_over_itself(run):
    with pytest.raises(UsageError, match="the trace itself, which would be lost"):
        write_exports(run, run.path, kind=ExportKind.JSONL, force=True)


@pytest.mark.parametrize("kind", list(ExportKind))
def test_only_the_owner_may_read_the_files(run, run_of, tmp_path, kind):
    if kind is ExportKind.MOONCAKE:  # which has no warm-up
        run = run_of("load", step(0, arrived=[arrival("a", 0)]))
    before = os.umask(0)
    try:
        for force in (False, True):
            written = write_exports(run, tmp_path / "out", kind=kind, force=force)
    finally:
        os.umask(before)
    assert {S_IMODE(file.stat().st_mode) for file in written} == {0o600}
    assert S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


def test_parquet_keeps_the_very_texts_and_csv_shows_them(run_of, tmp_path):
    run = run_of("hostile", step(0, got={"=1\x1b": 1}, new=["=1\x1b"]))
    write_exports(run, tmp_path, kind=ExportKind.PARQUET)
    write_exports(run, tmp_path, kind=ExportKind.CSV)
    assert pl.read_parquet(tmp_path / "requests.parquet")["request_id"].to_list() == ["=1\x1b"]
    assert pl.read_csv(tmp_path / "requests.csv")["request_id"].to_list() == [r"'=1\x1b"]


FILES = {
    "jsonl": "engine-0.jsonl",
    "perfetto": "trace.pftrace",
    "chrome": "trace.json.gz",
    "csv": "steps.csv",
}


@pytest.mark.parametrize("there", [True, False], ids=["a link to a file", "a link to nothing"])
@pytest.mark.parametrize("kind", FILES)
def test_no_output_goes_through_a_link_that_a_run_folder_contains(cli, run, tmp_path, kind, there):
    outside = tmp_path / "outside"
    if there:
        outside.write_text("mine")
    link = run.path / "export" / FILES[kind]
    link.parent.mkdir()
    link.symlink_to(outside)
    code, out, err = cli("export", run.path, "--to", kind)
    assert (code, out) == (2, "")
    assert f"{link} is there already" in err
    assert cli("export", run.path, "--to", kind, "--force")[0] == 0
    assert link.stat().st_size > 4
    assert not link.is_symlink()
    assert outside.read_text() == "mine" if there else not outside.exists()


def test_a_link_in_the_place_of_the_export_folder_is_followed_only_if_it_is_named(cli, run, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (run.path / "export").symlink_to(outside)
    code, out, err = cli("export", run.path)
    assert (code, out) == (2, "")
    assert err == (
        f"schedtrace: {run.path / 'export'} is a link to {outside}; --output names the folder to write to\n"
    )
    assert list(outside.iterdir()) == []
    assert cli("export", run.path, "--output", run.path / "export")[0] == 0
    assert len(list(outside.iterdir())) == len(ROWS)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("t1-6", "t1-6"),
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\uff1d1", "'\uff1d1"),
        ("a;=1", "a;'=1"),
        ("a,-b|@c", "a,'-b|'@c"),
        ("\t=1\r", r"\t=1\r"),
        ("a-b=c, -d", "a-b=c, -d"),
        ("\u202e", r"\u202e"),
        ("a\\b", r"a\\b"),
    ],
)
def test_a_cell_is_no_formula_and_all_of_it_is_visible(text, cell):
    assert safe_cell(text) == cell


def test_texts_of_a_table_are_made_safe_and_numbers_stay():
    table = pl.LazyFrame({"id": ["a", "=1", None, "\x1b", "=1"], "n": [-1, 2, None, 4, 5]})
    assert safe_cells(table).collect().to_dict(as_series=False) == {
        "id": ["a", "'=1", None, r"\x1b", "'=1"],
        "n": [-1, 2, None, 4, 5],
    }


def test_a_table_without_anything_hostile_is_unchanged():
    table = pl.LazyFrame({"id": ["t1-1", None], "where": [None, "scheduler.py:12"]})
    assert safe_cells(table).collect().equals(table.collect())


SIZE = 128
"""Tokens of a recorded block: four are one of Mooncake's."""


def hashes(*blocks):
    return b64encode(b"".join(block.to_bytes(3) for block in blocks)).decode()


def came(name, at_us, tokens, *blocks, **fields):
    texts = {"prefix_hashes": hashes(*blocks)} if blocks else {}
    return arrival(name, at_us, at_us, prompt_tokens=tokens, **texts, **fields)


def ended(name, tokens, status="LENGTH_CAPPED"):
    return finish(name, finished_us=9_000_000, output_tokens=tokens, status=status)


@pytest.fixture
def exported(run_of, cli, tmp_path):
    """``exported(*arrivals)``: the rows of the file, and what was printed."""

    def export(*arrivals, finished, **header):
        run_of(
            "run",
            step(0, arrived=list(arrivals)),
            step(1, finished=finished),
            block_size=SIZE,
            **header,
        )
        code, out, err = cli("export", tmp_path / "run", "--to", "mooncake")
        assert (code, err) == (0, "")
        file = tmp_path / "run" / "export" / "mooncake.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()], out, file

    return export


def test_times_lengths_and_blocks_that_are_shared(exported):
    four = (1, 2, 3, 4)
    rows, out, file = exported(
        came("a", 1_000_000, 1024, *four, 5, 6, 7, 8),
        came(
            "b", 1_002_600, 1100, *four, 5, 6, 7, 9
        ),  # the second block differs; 76 tokens are of no full block
        came("c", 1_900_000, 512, *four),
        came("d", 1_900_000, 600, *four),
        finished=[ended("a", 5), ended("b", 6), ended("c", 7), ended("d", 8)],
    )
    assert rows == [
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 3, "input_length": 1100, "output_length": 6, "hash_ids": [0, 2, 3]},
        {"timestamp": 900, "input_length": 512, "output_length": 7, "hash_ids": [0]},
        {"timestamp": 900, "input_length": 600, "output_length": 8, "hash_ids": [0, 4]},
    ]
    assert "whole blocks of 512 tokens are shared in the file; the trace has blocks of 128 tokens" in out
    load = open_workload(file)
    assert (load.prefix_block, [one.prefix for one in load]) == (
        MOONCAKE_BLOCK,
        [(0, 1), (0, 2, 3), (0,), (0, 4)],
    )
    assert [(one.arrived_us, one.prompt_tokens, one.output_tokens) for one in load] == [
        (0, 1024, 5),
        (3000, 1100, 6),
        (900_000, 512, 7),
        (900_000, 600, 8),
    ]


def test_equal_contents_behind_another_beginning_are_another_block(exported):
    rows, _, _ = exported(
        came("a", 0, 1024, *range(8)),
        came("b", 0, 1024, 9, 9, 9, 9, *range(4, 8)),
        finished=[ended("a", 1), ended("b", 1)],
    )
    assert [row["hash_ids"] for row in rows] == [[0, 1], [2, 3]]


def test_who_did_not_end_by_themselves_may_generate_what_was_asked_for(exported):
    rows, out, _ = exported(
        came("a", 0, 128, 1, max_tokens=20),
        came("b", 5000, 128, 1, max_tokens=30),
        came("c", 6000, 128, 1, max_tokens=40),
        finished=[ended("b", 2), ended("c", 3, "ABORTED")],
    )
    assert [(row["timestamp"], row["output_length"]) for row in rows] == [(0, 20), (5, 2), (6, 40)]
    assert "2 requests did not end by themselves: output_length is the most that they" in out


def test_without_hashes_there_are_no_ids(exported):
    rows, out, _ = exported(came("a", 0, 700), finished=[ended("a", 2)])
    assert rows == [{"timestamp": 0, "input_length": 700, "output_length": 2}]
    assert "which prompts begin alike is not recorded: the file has no hash_ids" in out
