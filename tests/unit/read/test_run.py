"""Runs as people name them: folders, files, logs; their manifests and the files of their front ends."""

import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.errors import ExitCode, InputError
from schedtrace.model.manifest import FILE_NAME, Configured, RequestRefusal, read_manifest, write_manifest
from schedtrace.read.run import ProfileName, find_runs, profile_name, read_front_end, read_record, read_run
from tests.makers import arrival, encoded, header, manifest, result, run_folder, step, workload, write_trace
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


THREAD = Path(__file__).parents[3] / "examples" / "forum-thread"
ITERATIONS = Path(__file__).parent / "data" / "iteration-details-0.19.log"


def test_a_folder_of_logs_stands_for_each_of_them_beside_run_folders(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing of this kind")
    (tmp_path / "a.txt").write_bytes((THREAD / "wrapped.log").read_bytes())
    (tmp_path / "c").write_bytes(ITERATIONS.read_bytes())
    run_folder(tmp_path / "b", step(0))
    assert [path.name for path in find_runs([tmp_path])] == ["a.txt", "b", "c"]


def test_the_name_of_a_log_tells_its_workload():
    named = profile_name(Path("x/profile_1025_bs16_in1024_out64.log"))
    assert named == ProfileName("1025", 16, 1024, 64)
    assert read_run(THREAD / "profile_1025_bs16_in1024_out64.log").label == "10:25 bs16 in1024 out64"


@pytest.mark.parametrize(
    "name", ["profile_10_bs16_in1_out1.log", "wrapped.log", "profile_1025_bs_in_out.log", ""]
)
def test_other_names_tell_nothing(name):
    assert profile_name(Path(name)) is None


def test_a_foreign_log_of_another_name_is_called_by_it():
    run = read_run(THREAD / "wrapped.log")
    assert (run.label, run.manifest, run.engines, run.named) == ("wrapped.log", None, 1, None)


def test_a_log_of_several_engines_is_one_run():
    run = read_run(ITERATIONS)
    assert ([trace.header.engine_rank for trace in run.traces], run.engines) == ([0, 1], 2)


def test_a_foreign_log_beside_a_manifest_does_not_take_it_over(tmp_path):
    folder = run_folder(tmp_path, step(0))
    (folder / "vllm.log").write_bytes(ITERATIONS.read_bytes())
    assert read_run(folder / "vllm.log").manifest is None
    assert len(read_run(folder).traces) == 1


def test_a_log_is_known_by_its_content_not_by_its_name(tmp_path):
    path = tmp_path / "engine-0.jsonl"
    path.write_bytes(b"\n".join([b"vLLM says hello"] * 1000) + b"\n" + (THREAD / "wrapped.log").read_bytes())
    [trace] = read_record(path)
    assert trace.steps.height == 2


def test_a_trace_that_quotes_a_record_is_a_trace(tmp_path):
    path = write_trace(tmp_path / "x.log", header(notices=["{'token_budget': 1}"]), step(0))
    assert read_record(path)[0].header.pid == 1


@pytest.mark.parametrize("content", [b"hello\n", b"\x00" * 100, b"\xff\xfe", b"model: x\n"])
def test_a_file_of_no_known_kind_is_refused_with_what_is_understood(tmp_path, content):
    path = tmp_path / "x.log"
    path.write_bytes(content)
    with pytest.raises(
        InputError, match=r"x\.log: not understood; expected a trace .* a result of vllm bench"
    ) as refused:
        read_run(path)
    assert refused.value.exit_code is ExitCode.INPUT


def test_a_file_that_cannot_be_read_is_an_input_error_whatever_its_kind(tmp_path):
    (tmp_path / "some.log").mkdir()
    with pytest.raises(InputError, match=r"some\.log: cannot be read \(Is a directory\)"):
        read_record(tmp_path / "some.log")


BEGAN = 1_000


def written(folder, pid, *lines, tail=b""):
    folder.mkdir(exist_ok=True)
    encoded = b"".join((x if isinstance(x, bytes) else msgspec.json.encode(x)) + b"\n" for x in lines)
    (folder / f"front-end-{pid}.jsonl").write_bytes(encoded + tail)


def configured(at, **given):
    return Configured(at_unix_us=at, given=given)


def test_the_engines_configuration_is_the_last_before_they_began(tmp_path):
    written(tmp_path, 7, configured(100, max_num_seqs=1), configured(900, max_num_seqs=2))
    written(tmp_path, 8, configured(500, max_num_seqs=3), configured(1_100, max_num_seqs=4))
    assert read_front_end(tmp_path, BEGAN).configured.given == {"max_num_seqs": 2}


def test_refusals_of_all_front_ends_are_in_order_of_time(tmp_path):
    written(tmp_path, 7, RequestRefusal(at_unix_us=30, reason="a"), RequestRefusal(at_unix_us=10, reason="b"))
    written(tmp_path, 8, RequestRefusal(at_unix_us=20, reason="c"))
    found = read_front_end(tmp_path, BEGAN)
    assert [line.reason for line in found.refused] == ["b", "c", "a"]
    assert found.configured is None


def test_broken_unknown_and_cut_lines_are_left_out(tmp_path):
    huge = b'{"type":"refused","at_unix_us":9999999999999999999,"reason":"x"}'
    odd = (
        huge,
        b"",
        b"{",
        b"\xff",
        b'{"type":"other"}',
        b'{"type":"refused","at_unix_us":"now","reason":"x"}',
        b"[" * 9_999,
    )
    cut = msgspec.json.encode(RequestRefusal(at_unix_us=40, reason="cut"))[:-5]
    written(tmp_path, 7, *odd, RequestRefusal(at_unix_us=30, reason="whole"), tail=cut)
    assert [line.reason for line in read_front_end(tmp_path, BEGAN).refused] == ["whole"]


def test_without_a_line_nothing_is_known(tmp_path):
    assert read_front_end(tmp_path, BEGAN) is None
    written(tmp_path, 7, tail=b'{"type":"conf')
    assert read_front_end(tmp_path, BEGAN) is None


def test_a_run_has_its_front_ends_and_counts_the_requests_of_all_its_engines(tmp_path):
    folder = run_folder(
        tmp_path / "run", step(0, arrived=[arrival("a", 0), arrival("b", 0)]), wall_anchor_us=50
    )
    run_folder(folder, step(0, arrived=[arrival("c", 0)]), engine_rank=1, wall_anchor_us=BEGAN)
    lines = (configured(40, policy="priority"), configured(60), RequestRefusal(at_unix_us=90, reason="x"))
    written(folder, 7, *lines)
    front_end = read_run(folder).front_end
    assert (front_end.configured.given, front_end.arrived) == ({"policy": "priority"}, 3)
    assert read_run(run_folder(tmp_path / "other", step(0))).front_end is None


def test_a_manifest_reads_back_as_it_was_written(tmp_path):
    written = manifest(
        label="x",
        command=["schedtrace", "run"],
        engine_args_given={"max_num_seqs": 4},
        config_resolved={"scheduler_config": {"max_num_seqs": 4}},
        workload=workload(request_rate=0.5),
        trials=[result(1, 2.5, prefix_cache_reset=True)],
    )
    write_manifest(tmp_path, written)
    assert read_manifest(tmp_path) == written


def test_a_folder_without_a_manifest_has_none(tmp_path):
    assert read_manifest(tmp_path) is None


def test_writing_again_replaces_the_manifest_and_leaves_no_part_behind(tmp_path):
    write_manifest(tmp_path, manifest(status="starting"))
    write_manifest(tmp_path, manifest(status="finished"))
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert json.loads((tmp_path / FILE_NAME).read_text())["status"] == "finished"
