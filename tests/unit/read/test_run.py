import os
import re

import pytest

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.errors import InputError
from schedtrace.model.manifest import FILE_NAME
from schedtrace.read.run import find_runs, read_run
from tests.makers import encoded, header, manifest, run_folder, step, write_trace
from tests.unit.recorded_words import texts


def test_a_run_folder_is_one_run_with_its_manifest(tmp_path):
    folder = run_folder(tmp_path / "kv", step(0), about=manifest(label="small KV"))
    assert find_runs([folder]) == [folder]
    run = read_run(folder)
    assert (run.label, run.manifest.status, len(run.traces)) == ("small KV", "finished", 1)


def test_without_a_manifest_the_folder_names_the_run(tmp_path):
    run = read_run(run_folder(tmp_path / "kv", step(0)))
    assert (run.label, run.manifest) == ("kv", None)


def test_a_folder_of_runs_stands_for_all_of_them_in_the_order_of_their_names(tmp_path):
    runs = [run_folder(tmp_path / name, step(0)) for name in ("b", "a")]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert find_runs([tmp_path]) == [runs[1], runs[0]]


def test_a_run_named_twice_is_one_run(tmp_path):
    folder = run_folder(tmp_path / "a", step(0))
    assert find_runs([folder, tmp_path, folder]) == [folder]


def test_a_trace_file_is_a_run_of_its_own_with_the_manifest_beside_it(tmp_path):
    folder = run_folder(tmp_path / "a", step(0), about=manifest(label="named"))
    run_folder(folder, step(0), engine_rank=1)
    run = read_run(folder / "engine-1.jsonl")
    assert (run.label, [trace.header.engine_rank for trace in run.traces]) == ("named", [1])


@pytest.mark.parametrize(("about", "alone"), [(manifest(), 2), (None, 1)])
def test_an_engine_read_alone_knows_how_many_the_run_had_if_a_manifest_says_it_is_one(tmp_path, about, alone):
    for rank in (0, 1):
        run_folder(tmp_path, step(0), about=about, engine_rank=rank)
    assert [read_run(path).engines for path in (tmp_path, tmp_path / "engine-1.jsonl")] == [2, alone]


def test_engines_come_in_the_order_of_their_ranks_not_of_their_names(tmp_path):
    for rank in (10, 2, 0):
        run_folder(tmp_path, step(0), engine_rank=rank)
    assert [trace.header.engine_rank for trace in read_run(tmp_path).traces] == [0, 2, 10]


@pytest.mark.parametrize("name", ["gone", "a" * 300])  # the latter can be no name
def test_a_missing_path_is_refused(tmp_path, name):
    with pytest.raises(InputError, match=f"{name}: no such file or folder"):
        find_runs([tmp_path / name])


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no traces in it; expected engine-\*\.jsonl"):
        find_runs([tmp_path])


def test_a_manifest_without_a_trace_says_how_the_run_failed(tmp_path):
    (tmp_path / FILE_NAME).write_text(
        '{"schedtrace_version":"0","status":"failed","started_at":"","error":"out of memory"}'
    )
    assert find_runs([tmp_path]) == [tmp_path]
    with pytest.raises(InputError, match=r"no trace in this run \(run failed: out of memory\)"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "broken",
    [b"", b"{", b"[]", b'{"status":"finished"}', b"\xff\xff", b'{"label":"\xff"}', b'{"a":' * 50_000],
)
def test_a_broken_manifest_is_refused_with_its_path(tmp_path, broken):
    run_folder(tmp_path, step(0))
    (tmp_path / FILE_NAME).write_bytes(broken)
    with pytest.raises(InputError, match=r"run\.json: not a manifest of a schedtrace run"):
        read_run(tmp_path)


def test_a_newer_manifest_is_refused_with_what_to_do(tmp_path):
    run_folder(tmp_path, step(0), about=manifest(schema_version=2, schedtrace_version="9.0"))
    with pytest.raises(InputError, match=r"schedtrace 9\.0 with schema version 2.*up to 1; upgrade"):
        read_run(tmp_path)


def test_fields_that_a_newer_manifest_adds_are_ignored(tmp_path):
    run_folder(tmp_path, step(0), about=manifest(label="x"))
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text().replace("{", '{"mood": "good",', 1))
    assert read_run(tmp_path).label == "x"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (encoded(header(engine_rank=1, schema_version=5)) + b"\n", ":1: schema version 5"),
        (b"", ": empty"),
        (
            encoded(header(engine_rank=1)) + b"\n\xff\n{\n",
            ": not one of the 2 lines after its header is understood",
        ),
        (b"\x00" * 3000, ":1: cut off in its first line"),
    ],
)
def test_a_file_of_which_nothing_is_understood_is_named_and_no_engine(tmp_path, content, says):
    run_folder(tmp_path, step(0))
    (tmp_path / "engine-1.jsonl").write_bytes(content)
    run = read_run(tmp_path)
    assert [trace.header.engine_rank for trace in run.traces] == [0]
    [problem] = run.problems
    assert problem.startswith(f"{tmp_path / 'engine-1.jsonl'}{says}")
    assert problem.endswith("; this file is left out")
    assert run.engines == 1
    assert texts(analyze_run(run).problems[0]) == [problem]
    (tmp_path / "engine-0.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=re.escape(f"engine-0.jsonl{says}")):
        read_run(tmp_path)


def test_an_engine_that_recorded_nothing_yet_is_one(tmp_path):
    for rank in (0, 1):
        write_trace(tmp_path / f"engine-{rank}.jsonl", header(engine_rank=rank), closed=False)
    assert len(read_run(tmp_path).traces) == 2


def test_two_files_of_one_rank_are_refused_by_their_names(tmp_path):
    for name in ("engine-0.jsonl", "engine-1.jsonl"):
        write_trace(tmp_path / name, header(), step(0))
    with pytest.raises(
        InputError, match=r"engine-0\.jsonl and .*engine-1\.jsonl are both of rank 0: name or keep one"
    ):
        read_run(tmp_path)
    assert len(read_run(tmp_path / "engine-1.jsonl").traces) == 1


@pytest.mark.parametrize("name", ["engine-0.jsonl", FILE_NAME, "front-end-1.jsonl"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path, name):
    if name != "engine-0.jsonl":
        run_folder(tmp_path, step(0))
    os.mkfifo(tmp_path / name)
    if name.startswith("front-end"):
        assert read_run(tmp_path).front_end is None
        return
    with pytest.raises(InputError, match=rf"{name}: cannot be read \(not a regular file\)"):
        read_run(tmp_path)
    with pytest.raises(InputError, match="neither a regular file nor a folder"):
        find_runs([tmp_path / name])
