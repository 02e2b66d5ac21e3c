from pathlib import Path

import pytest

from schedtrace.errors import ExitCode, InputError
from schedtrace.read.run import ProfileName, find_runs, profile_name, read_record, read_run
from tests.makers import header, run_folder, step, write_trace

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
