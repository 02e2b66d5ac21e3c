"""Engines at a path: their names, and what is left out."""

import shutil

import pytest

from schedtrace.errors import InputError
from schedtrace.fleet.inputs import engine_named, find_fleet
from tests import makers
from tests.unit.fleet.conftest import engine_lines


def names(*paths):
    return [engine.name for engine in find_fleet([str(path) for path in paths]).engines]


def test_folders_of_hosts(engine_at, tmp_path):
    for name in ("run=a/host=x/engine-10", "run=a/host=x/engine-2", "run=a/host=y/engine-0"):
        engine_at(name)
    expected = ["host=x/engine-2", "host=x/engine-10", "host=y/engine-0"]
    assert names(tmp_path / "fleet") == expected
    assert names(tmp_path / "fleet/run=*/host=*") == expected
    assert names(tmp_path / "fleet/run=a/host=x") == ["engine-2", "engine-10"]
    assert names(tmp_path / "fleet/run=a/host=y") == ["engine-0"]
    assert names(tmp_path / "fleet/run=a/host=y/engine-0") == ["engine-0"]


def test_several_engines_in_a_folder_are_named_by_their_ranks(tmp_path):
    for rank in range(2):
        makers.run_folder(tmp_path / "host=x", *engine_lines(), engine_rank=rank)
    assert names(tmp_path) == ["engine-0", "engine-1"]
    assert names(tmp_path / "host=x" / "engine-1.jsonl") == ["engine-1"]


def test_parts_are_one_engine_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 0, 2):
        (tmp_path / f"engine-0.{number:06}.jsonl.zst").write_bytes(b"")
    [engine] = find_fleet([str(tmp_path)]).engines
    assert [part.file_name for part in engine.parts] == [
        f"engine-0.{number:06}.jsonl.zst" for number in (0, 2, 10)
    ]
    assert engine.trace_name == "engine-0.*.jsonl.zst"


def test_two_engines_of_one_name_are_both_there_under_their_paths(engine_at, tmp_path):
    first = engine_at("a/engine-0")
    second = tmp_path / "other" / "engine-0"
    shutil.copytree(first, second)
    assert names(first, second) == [str(first / "engine-0.jsonl"), str(second / "engine-0.jsonl")]
    assert names(first, first) == ["engine-0"]  # the same path twice is one engine


def test_what_is_no_trace_is_left_out_with_a_reason(engine_at, tmp_path):
    folder = engine_at("a/engine-0")
    (folder / "notes.txt").write_text("hello")
    (tmp_path / "fleet" / "loop").symlink_to(tmp_path / "fleet")
    inputs = find_fleet([str(tmp_path / "fleet"), str(tmp_path / "nothing")])
    assert [(entry.path, entry.why) for entry in inputs.left_out] == [
        (str(tmp_path / "fleet" / "loop"), "a symbolic link to a folder, which is not followed"),
        (str(folder / "notes.txt"), "no trace of schedtrace"),
        (str(tmp_path / "nothing"), "no such file or folder"),
    ]
    assert len(inputs.engines) == 1


def test_nothing_at_all_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        find_fleet([str(tmp_path / "nothing")])
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match=r"notes\.txt: no trace of schedtrace"):
        find_fleet([str(tmp_path)])


def test_an_engine_is_named_by_the_end_of_its_path_if_only_one_has_it(engine_at, tmp_path):
    for name in ("host=x/engine-1", "host=y/engine-1", "host=y/engine-2"):
        engine_at(name)
    inputs = find_fleet([str(tmp_path / "fleet")])
    assert engine_named(inputs, "engine-2").name == "host=y/engine-2"
    assert engine_named(inputs, "host=x/engine-1").name == "host=x/engine-1"
    for name, count in {"engine-1": "2", "engine-7": "no"}.items():
        with pytest.raises(InputError, match=f"{count} engines have this name"):
            engine_named(inputs, name)
